"""Who may call what: keys, scopes, and the one table of scopes by route.

A key is 256 random bits, shown once and stored as its SHA-256 (it has all the entropy a password
lacks, so a slow hash would only cost rate). It belongs to an organisation, and the organisation of
a call comes from the key and from nowhere else.

:data:`ACCESS` names for every route the scopes of which a key needs one. A route without an entry
cannot be made (:class:`api.bodies.ServiceRoute` looks it up), so nothing is open by omission. The
table decides 401 and 403; whether the *object* may be seen is decided in :mod:`api.deps`, where
unknown and forbidden are both 404.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from accounting.tables import Database, KeyRow
from api.kinds import ProblemError

Scope = Literal["owner", "requester", "auditor", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
KEY_PREFIX: Final = "epk_"
_LONGEST_KEY: Final = 200


@dataclass(frozen=True)
class Access:
    """The scopes of which a call needs one; ``public`` calls need no key at all."""

    scopes: frozenset[Scope]
    public: bool = False


PUBLIC: Final = Access(frozenset(), public=True)
ANY_KEY: Final = Access(frozenset(SCOPES))


def _needs(*scopes: Scope) -> Access:
    return Access(frozenset(scopes))


ACCESS: Final[Mapping[tuple[str, str], Access]] = {
    # The service itself
    ("GET", "/livez"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/.well-known/epsilond-keys.json"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
    ("GET", "/"): PUBLIC,
    ("GET", "/docs"): PUBLIC,
    ("GET", "/problems"): PUBLIC,
    ("GET", "/problems/{slug}"): PUBLIC,
    # Administration
    ("POST", "/v1/organisations"): _needs("admin"),
    ("GET", "/v1/organisations"): _needs("admin"),
    ("POST", "/v1/keys"): _needs("admin"),
    # Questions to the accountant, and checks
    ("POST", "/v1/accounting/epsilon"): ANY_KEY,
    ("POST", "/v1/accounting/delta"): ANY_KEY,
    ("POST", "/v1/accounting/profile"): ANY_KEY,
    ("POST", "/v1/accounting/tradeoff"): ANY_KEY,
    ("POST", "/v1/accounting/compare"): ANY_KEY,
    ("POST", "/v1/accounting/calibrate"): ANY_KEY,
    ("POST", "/v1/accounting/allocate"): ANY_KEY,
    ("POST", "/v1/certificates/verify"): ANY_KEY,
    ("GET", "/v1/models"): ANY_KEY,
    # Datasets
    ("POST", "/v1/datasets"): _needs("owner"),
    ("GET", "/v1/datasets"): _needs("owner", "requester", "auditor"),
    ("GET", "/v1/datasets/{dataset_id}"): _needs("owner", "requester", "auditor"),
    ("POST", "/v1/datasets/{dataset_id}/snapshots"): _needs("owner"),
    ("GET", "/v1/datasets/{dataset_id}/snapshots"): _needs("owner"),
    ("POST", "/v1/datasets/{dataset_id}/grants"): _needs("owner"),
    ("GET", "/v1/datasets/{dataset_id}/grants"): _needs("owner"),
    ("PUT", "/v1/datasets/{dataset_id}/budget"): _needs("owner"),
    ("GET", "/v1/datasets/{dataset_id}/budget"): _needs("owner", "requester", "auditor"),
    ("GET", "/v1/datasets/{dataset_id}/statement"): _needs("owner", "auditor"),
    ("GET", "/v1/datasets/{dataset_id}/ledger"): _needs("owner", "auditor"),
    ("GET", "/v1/datasets/{dataset_id}/ledger/verify"): _needs("owner", "auditor"),
    ("GET", "/v1/datasets/{dataset_id}/ledger/export"): _needs("owner", "auditor"),
    # Jobs and releases
    ("POST", "/v1/datasets/{dataset_id}/quotes"): _needs("requester"),
    ("POST", "/v1/datasets/{dataset_id}/jobs"): _needs("requester"),
    ("GET", "/v1/jobs/{job_id}"): _needs("owner", "requester"),
    ("POST", "/v1/jobs/{job_id}/cancel"): _needs("requester"),
    ("POST", "/v1/jobs/{job_id}/approve"): _needs("owner"),
    ("POST", "/v1/jobs/{job_id}/deny"): _needs("owner"),
    ("POST", "/v1/datasets/{dataset_id}/plans"): _needs("requester"),
    ("GET", "/v1/plans/{plan_id}"): _needs("owner", "requester"),
    ("GET", "/v1/releases/{release_id}"): _needs("owner", "requester", "auditor"),
    ("GET", "/v1/releases/{release_id}/content"): _needs("owner", "requester"),
    ("GET", "/v1/releases/{release_id}/certificate"): _needs("owner", "requester", "auditor"),
}


def admin_key_exists(session: Session) -> bool:
    """Whether an admin key was ever made; then ``epsilond init`` makes no other."""
    return any("admin" in scopes for scopes in session.scalars(select(KeyRow.scopes)))


@dataclass(frozen=True)
class Principal:
    """The caller: a key, its organisation and its scopes."""

    key_id: str
    organisation_id: str
    scopes: frozenset[str]


def new_key() -> str:
    """A fresh key: 256 bits from the operating system, as text."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_sha256(key: str) -> str:
    """What the database holds in place of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def bearer_of(header: str | None) -> str:
    """The key in an Authorization header.

    Raises:
        ProblemError: unauthenticated, for a missing or malformed header.
    """
    scheme, _, key = (header or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > _LONGEST_KEY:
        raise ProblemError("unauthenticated")
    return key


# Every request asks this; made once, it need not be built and compiled for each.
_KEY_OF = select(KeyRow.id, KeyRow.organisation_id, KeyRow.scopes, KeyRow.revoked_at).where(
    KeyRow.sha256 == bindparam("sha256")
)


def principal_of(database: Database, key: str) -> Principal:
    """The caller behind a key.

    Raises:
        ProblemError: unauthenticated, if the key is unknown or revoked.
    """
    row = database.find(_KEY_OF, {"sha256": key_sha256(key)})
    if row is None or row.revoked_at is not None:
        raise ProblemError("unauthenticated")
    return Principal(row.id, row.organisation_id, frozenset(str(s) for s in row.scopes))


def require_scope(principal: Principal, access: Access) -> None:
    """Raises ProblemError forbidden if the key has none of the scopes."""
    if not principal.scopes & access.scopes:
        raise ProblemError("forbidden", extra={"scopes": sorted(access.scopes)})
