"""Certificates: what a release cost, signed, and checkable without the service.

A certificate is JSON with an Ed25519 signature over the canonical bytes of everything else:

    {"version": 1, "service": {"name", "version", "key_id"}, "dataset", "snapshot": {"id", "hmac"},
     "neighboring_relation", "mechanism", "post_processing",
     "epsilon": {"lower", "upper", "delta", "direction", "method", ...},
     "artefact": {"sha256", "bytes"}, "ledger": {"sequence", "hash"}, "assumptions": [...],
     "issued_at", "signature"}

Its epsilon is that of this one mechanism at this one delta. It is not what the ledger charged (that
is at the delta that the dataset's filters fix), and it says nothing of other releases.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from accounting import bounds
from accounting.bounds import DEFAULT, Bracket, Limits
from accounting.canonical import canonical_json
from accounting.errors import InvalidRequest, UndecidableBound
from accounting.mechanisms import (
    NEIGHBORING_RELATION,
    Composition,
    DenoisingBlock,
    Mechanism,
    SubsampledGaussian,
    mechanism_from_json,
    mechanism_to_json,
    require_chargeable,
)

VERSION: Final = 1
SERVICE_NAME: Final = "epsilond"

_PUBLIC_MODEL: Final = (
    "The public model was trained on data disjoint from the private dataset; no private record "
    "moved its weights."
)
_OWNER: Final = (
    "The owner's acts (the declared size, the budget, presets, approval, publication) did not "
    "depend on private data or on owner-only figures."
)
_NOISE: Final = (
    "Noise is computational: floating-point normals made from a cipher's keystream under a secret "
    "256-bit seed that was destroyed when the job ended. The guarantee holds against observers who "
    "cannot tell that keystream from random bits, and takes floating-point normals for real ones."
)
_FIXED_SIZE: Final = (
    "Sampling is of a fixed size: the guarantee holds between neighbours that both have at least "
    "the number of units the mechanism declares, in every class it declares one for."
)

# A bracket computed elsewhere differs in its last bits.
_SAME_RELATIVE: Final = 1e-9


@dataclass(frozen=True)
class RigorousCheck:
    """What ball arithmetic, on the mechanism alone, says of the stated upper end.

    ``confirmed`` and ``refuted`` are proofs; ``reason`` says why it is ``undecided``.
    """

    result: Literal["confirmed", "refuted", "undecided"]
    reason: str = ""


@dataclass(frozen=True)
class CertificateCheck:
    """What a reader found.

    Attributes:
        signature_ok: a known key of the service signed exactly this text.
        mechanism_ok: the mechanism can be read, may be charged for, and states the relation.
        bound_ok: the stated upper end is at least the recomputed one, which proves it. False if
            the recomputation refutes the bracket; None if it was not recomputed, no accountant
            answered, or the stated upper end lies inside the recomputed bracket: not confirmed.
        bracket_same: the recomputed bracket is the stated one. None as for ``bound_ok``.
        recomputed: the bracket from the mechanism alone.
        problems: one sentence each, for people.
        rigorous: None if it was not asked for, or there is no mechanism or bracket to check.
    """

    signature_ok: bool
    mechanism_ok: bool
    bound_ok: bool | None
    bracket_same: bool | None
    recomputed: Bracket | None
    problems: tuple[str, ...]
    rigorous: RigorousCheck | None = None

    @property
    def ok(self) -> bool:
        """Signature and mechanism hold, and nothing that was checked is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """The answer of the service's certificate check, with ``rigorous`` where that was asked."""
        out: dict[str, object] = {
            "ok": self.ok,
            "signature_ok": self.signature_ok,
            "mechanism_ok": self.mechanism_ok,
            "bound_ok": self.bound_ok,
            "bracket_same": self.bracket_same,
            "recomputed": None if self.recomputed is None else self.recomputed.to_json(),
            "problems": list(self.problems),
        }
        return out if self.rigorous is None else out | {"rigorous": asdict(self.rigorous)}


def key_id(public_key: Ed25519PublicKey) -> str:
    """The name of a key: the first 16 hexadecimal digits of the SHA-256 of its 32 bytes."""
    raw = public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def build(
    *,
    service_version: str,
    signing_key_id: str,
    dataset_id: str,
    snapshot_id: str,
    snapshot_hmac: str,
    mechanism: Mechanism,
    post_processing: Mapping[str, object],
    epsilon: Mapping[str, object],
    artefact_sha256: str,
    artefact_bytes: int,
    ledger_sequence: int,
    ledger_hash: str,
    issued_at: int,
) -> dict[str, Any]:
    """A certificate without its signature.

    Args:
        epsilon: the JSON of the bracket that was fixed with the reservation.
        ledger_sequence: with ``ledger_hash``, of the job's ``started`` chain row.
        issued_at: microseconds since 1970 UTC.
    """
    assumptions = [_PUBLIC_MODEL, _OWNER, _NOISE]
    if _has_fixed_size(mechanism):
        assumptions.append(_FIXED_SIZE)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=issued_at)
    return {
        "version": VERSION,
        "service": {"name": SERVICE_NAME, "version": service_version, "key_id": signing_key_id},
        "dataset": dataset_id,
        "snapshot": {"id": snapshot_id, "hmac": snapshot_hmac},
        "neighboring_relation": NEIGHBORING_RELATION,
        "mechanism": mechanism_to_json(mechanism),
        "post_processing": dict(post_processing),
        "epsilon": dict(epsilon),
        "artefact": {"sha256": artefact_sha256, "bytes": artefact_bytes},
        "ledger": {"sequence": ledger_sequence, "hash": ledger_hash},
        "assumptions": assumptions,
        "issued_at": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
    }


def sign(certificate: Mapping[str, object], private_key: Ed25519PrivateKey) -> dict[str, Any]:
    """The certificate with its signature, as base64url without padding.

    Raises:
        ValueError: the certificate names another key, is signed already, or is not plain JSON.
    """
    if "signature" in certificate:
        raise ValueError("the certificate is signed already")
    service = certificate.get("service")
    if not isinstance(service, Mapping) or service.get("key_id") != key_id(
        private_key.public_key()
    ):
        raise ValueError("the certificate names another key")
    signature = private_key.sign(canonical_json(dict(certificate)))
    text = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    return {**certificate, "signature": text}


def verify(
    certificate: Mapping[str, object],
    public_keys: Mapping[str, Ed25519PublicKey],
    *,
    recompute: bool,
    rigorous: bool = False,
    limits: Limits = DEFAULT,
) -> CertificateCheck:
    """Checks a certificate that anybody may have written; it never raises because of its content.

    Args:
        public_keys: the service's keys by :func:`key_id`, retired ones included.
        recompute: also compute the bracket again, from the certificate's mechanism alone.
        rigorous: also prove the stated upper end again in ball arithmetic, which shares no code
            with what computed it. What is undecided then is a problem too.
        limits: what the recomputation may use, and then the proof.
    """
    problems: list[str] = []
    signature_problem = _check_signature(certificate, public_keys)
    if signature_problem is not None:
        problems.append(signature_problem)

    mechanism: Mechanism | None = None
    try:
        mechanism = mechanism_from_json(certificate.get("mechanism"))
        require_chargeable(mechanism)
        if certificate.get("neighboring_relation") != NEIGHBORING_RELATION:
            raise InvalidRequest("neighboring_relation", f"must be {NEIGHBORING_RELATION}")
        if certificate.get("version") != VERSION:
            raise InvalidRequest("version", f"must be {VERSION}")
    except InvalidRequest as error:
        problems.append(f"The mechanism does not hold: {error.detail}.")
        mechanism = None

    bound_ok: bool | None = None
    same: bool | None = None
    recomputed: Bracket | None = None
    stated = _stated(certificate.get("epsilon"))
    if stated is None:
        bound_ok = False
        problems.append("The certificate states no bracket of epsilon at a delta.")
    elif recompute and mechanism is not None:
        lower, upper, delta = stated
        try:
            recomputed = bounds.epsilon(mechanism, delta, limits=limits)
            same = _same(lower, recomputed.lower) and _same(upper, recomputed.upper)
            if upper < recomputed.upper:
                recomputed = bounds.confirming_epsilon(mechanism, delta, limits=limits)
        except UndecidableBound as error:
            problems.append(f"The bound could not be computed again: {error.detail}.")
        except InvalidRequest as error:
            bound_ok = False
            problems.append(f"The bound is of no question: {error.detail}.")
        if recomputed is not None:
            found = (
                f"at delta {delta:g} epsilon lies in [{recomputed.lower:g}, {recomputed.upper:g}]"
            )
            if _clearly_below(upper, recomputed.lower) or _clearly_below(recomputed.upper, lower):
                bound_ok = False
                problems.append(f"The stated bracket [{lower:g}, {upper:g}] is false: {found}.")
            elif _clearly_below(upper, recomputed.upper):
                # Not refuted, but nothing here proves it either: that is what an upper end is for.
                problems.append(f"The stated upper end {upper:g} is not confirmed: {found}.")
            else:
                bound_ok = True
    proof: RigorousCheck | None = None
    if rigorous and stated is not None and mechanism is not None:
        _, upper, delta = stated
        proof = _prove(mechanism, upper, delta, limits)
        if proof.result == "refuted":
            problems.append(f"The stated upper end {upper:g} is proven to be too small.")
        elif proof.result == "undecided":
            problems.append(f"The stated upper end {upper:g} is not proven: {proof.reason}.")
    return CertificateCheck(
        signature_ok=signature_problem is None,
        mechanism_ok=mechanism is not None,
        bound_ok=bound_ok,
        bracket_same=same,
        recomputed=recomputed,
        problems=tuple(problems),
        rigorous=proof,
    )


def _prove(mechanism: Mechanism, upper: float, delta: float, limits: Limits) -> RigorousCheck:
    if upper == math.inf:
        return RigorousCheck("confirmed")
    from accounting import rigorous  # Arb is loaded by those who ask for it

    try:
        found = rigorous.confirm(mechanism, upper, delta, seconds=limits.seconds)
    except InvalidRequest as error:
        return RigorousCheck("undecided", error.detail)
    if found.confirmed is None:
        return RigorousCheck("undecided", found.reason)
    return RigorousCheck("confirmed" if found.confirmed else "refuted", found.reason)


def _check_signature(
    certificate: Mapping[str, object], public_keys: Mapping[str, Ed25519PublicKey]
) -> str | None:
    service, signature = certificate.get("service"), certificate.get("signature")
    if not isinstance(service, Mapping) or not isinstance(signature, str):
        return "The certificate is not signed."
    public_key = public_keys.get(str(service.get("key_id")))
    if public_key is None:
        return "The certificate is signed by a key that this service never had."
    signed = {name: value for name, value in certificate.items() if name != "signature"}
    try:
        padded = signature + "=" * (-len(signature) % 4)
        public_key.verify(
            base64.b64decode(padded, altchars=b"-_", validate=True), canonical_json(signed)
        )
    except InvalidSignature:
        return "The certificate was changed after it was signed."
    except (binascii.Error, ValueError, TypeError, RecursionError):
        return "The certificate or its signature is malformed."
    return None


def _stated(epsilon: object) -> tuple[float, float, float] | None:
    """(lower, upper, delta) of the certificate's bracket; None if it states none."""
    if not isinstance(epsilon, Mapping):
        return None
    lower, upper = _number(epsilon.get("lower")), _number(epsilon.get("upper"))
    delta = _number(epsilon.get("delta"))
    if lower is None or upper is None or delta is None:
        return None
    return (lower, upper, delta) if 0 <= lower <= upper and 0 < delta < 1 else None


def _number(value: object) -> float | None:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def _same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=_SAME_RELATIVE)


def _clearly_below(a: float, b: float) -> bool:
    return a < b and not _same(a, b)


def _has_fixed_size(mechanism: Mechanism) -> bool:
    if isinstance(mechanism, Composition):
        return any(_has_fixed_size(part.mechanism) for part in mechanism.parts)
    return (
        isinstance(mechanism, SubsampledGaussian | DenoisingBlock)
        and mechanism.sampling == "fixed_size"
    )
