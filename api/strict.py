"""JSON by RFC 8259 alone, for the service and the command line.

Python's parser would let NaN, Infinity and integers of any length through, and text that no
database can store.
"""

from __future__ import annotations

import json
import math
from typing import Final

from accounting.errors import InvalidRequest
from api.kinds import ProblemError, field_path

MAX_JSON_BYTES: Final = 2 * 1024 * 1024
_MAX_DEPTH: Final = 64
# Far above any count or size here, and what 64-bit columns hold.
_MAX_INTEGER: Final = 2**63 - 1


def strict_json(raw: bytes) -> object:
    """Parses one JSON value.

    Raises:
        ProblemError: malformed_json, if it is not JSON, or an object has a name twice.
        InvalidRequest: names the field that holds NaN, an infinity, an integer beyond 64 bits, or
            text with a NUL or half a surrogate pair.
    """
    try:
        value: object = json.loads(raw.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        # Includes bytes that are not UTF-8 and integers with thousands of digits.
        raise ProblemError("malformed_json") from None
    _check_value(value, ())
    return value


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose names are distinct: which of two values was meant, nobody can know."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProblemError("malformed_json", "An object of the body has a name twice.")
    return found


def _check_value(value: object, path: tuple[str | int, ...]) -> None:
    if len(path) > _MAX_DEPTH:
        raise ProblemError("malformed_json", "The body is nested too deeply.")
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_text(name, path)
            _check_value(inner, (*path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_value(inner, (*path, i))
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field_path(path), "must be a finite number")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MAX_INTEGER:
        raise InvalidRequest(field_path(path), "is an integer beyond 64 bits")


def _check_text(text: str, path: tuple[str | int, ...]) -> None:
    if "\x00" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidRequest(field_path(path), "holds text that is not valid Unicode or a NUL")
