"""One canonical byte form of a JSON value, for digests, the hash chain and signatures.

Keys sorted by code point, no white space, UTF-8, integers as integers, floats in Python's shortest
round-trip form, no NaN or infinity. The form follows RFC 8785 in spirit; it differs in the spelling
of floats (Python's ``repr``), which is itself unique for each double.
"""

from __future__ import annotations

import hashlib
import json


def canonical_json(value: object) -> bytes:
    """The canonical UTF-8 bytes of a JSON value.

    Raises:
        ValueError: the value holds NaN or an infinity.
        TypeError: the value holds something that JSON has no form for.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(value: object) -> str:
    """SHA-256 of the canonical form, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
