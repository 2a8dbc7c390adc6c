"""A dataset with a budget, and the steps of its jobs, for tests of what stands on the ledger.

Charges are ``approximate_dp`` with a tiny delta, whose cost in the basic filter is the decimal as
written and which no Rényi order admits; so a budget of epsilon 5 admits five charges of 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

from accounting import ledger
from accounting.canonical import digest
from accounting.filters import Budget, Cost, FewLarge, Filter, charge
from accounting.mechanisms import ApproximateDP, Mechanism
from accounting.tables import Database, DatasetRow, JobRow, OrganisationRow, SnapshotRow

if TYPE_CHECKING:
    from accounting.bounds import Bracket

SECOND = ledger.MICROSECONDS
NOW = 1_800_000_000 * SECOND


def no_bound(_mechanism: Mechanism, _delta: float) -> Bracket:
    raise AssertionError("an approximate_dp charge is as written")


def dp(epsilon: str, delta: str = "1e-9") -> ApproximateDP:
    return ApproximateDP(Decimal(epsilon), Decimal(delta))


@dataclass
class Books:
    """One dataset, one organisation, and a clock that the test moves."""

    database: Database
    dataset_id: str = "ds_1"
    organisation_id: str = "org_1"
    snapshot_id: str = "snap_1"
    filters: tuple[Filter, ...] = ()
    now: int = NOW
    keys: itertools.count[int] = field(default_factory=itertools.count)
    bound: Callable[[Mechanism, float], Bracket] = no_bound

    def register(self, *, snapshot: bool = True) -> Books:
        with self.database.write() as session:
            if session.get(OrganisationRow, self.organisation_id) is None:
                session.add(
                    OrganisationRow(
                        id=self.organisation_id, name=self.organisation_id, created_at=self.now
                    )
                )
            session.flush()
            session.add(
                DatasetRow(
                    id=self.dataset_id,
                    organisation_id=self.organisation_id,
                    name=self.dataset_id,
                    facts={"public_size": 5000},
                    created_at=self.now,
                )
            )
            session.flush()
            if snapshot:
                session.add(
                    SnapshotRow(
                        id=self.snapshot_id,
                        dataset_id=self.dataset_id,
                        created_at=self.now,
                        location="snapshots/1",
                        hmac="ab" * 32,
                        sealed_key=b"sealed",
                        records=5000,
                    )
                )
        return self

    def set_budget(
        self,
        epsilon: str = "5",
        delta: str = "1e-5",
        *,
        approval_above: str | None = None,
        caps: Mapping[str, str] | None = None,
    ) -> Books:
        budget = Budget(
            Decimal(epsilon),
            Decimal(delta),
            FewLarge(5),
            {name: Decimal(cap) for name, cap in (caps or {}).items()},
            None if approval_above is None else Decimal(approval_above),
        )
        with self.database.write() as session:
            self.filters = ledger.set_budget(
                session, dataset_id=self.dataset_id, budget=budget, now=self.now
            )
        return self

    def reserve(
        self,
        mechanism: Mechanism | str = "1",
        *,
        key: str | None = None,
        body: str = "body",
        max_attempts: int = 3,
        ttl_seconds: float = 1000,
        progress_total: int = 10,
        costs: tuple[Cost, ...] | None = None,
    ) -> ledger.Reservation:
        made = dp(mechanism) if isinstance(mechanism, str) else mechanism
        if costs is None:
            costs = charge(made, self.filters, epsilon_bound=self.bound)
        with self.database.write() as session:
            return ledger.reserve(
                session,
                dataset_id=self.dataset_id,
                organisation_id=self.organisation_id,
                idempotency_key=key or f"key-{next(self.keys)}",
                body_hash=digest(body),
                kind="denoise",
                spec={"kind": "denoise", "beta": 0.1},
                mechanism=made,
                post_processing={"public_model": "glyphs-28"},
                certificate_epsilon={"lower": 0.9, "upper": 1.0, "delta": 1e-5},
                costs=costs,
                snapshot_id=self.snapshot_id,
                progress_total=progress_total,
                max_attempts=max_attempts,
                ttl_seconds=ttl_seconds,
                now=self.now,
            )

    def reserve_plan(
        self, mechanisms: Sequence[str], *, key: str | None = None, ttl_seconds: float = 1000
    ) -> ledger.PlanReservation:
        jobs = [
            ledger.PlannedJob(
                kind="denoise",
                spec={"kind": "denoise", "number": number},
                mechanism=dp(mechanism),
                post_processing={"public_model": "glyphs-28"},
                certificate_epsilon={"lower": 0.9, "upper": 1.0, "delta": 1e-5},
                progress_total=10,
            )
            for number, mechanism in enumerate(mechanisms)
        ]
        whole = ledger.plan_mechanism(jobs)
        costs = charge(whole, self.filters, epsilon_bound=self.bound)
        with self.database.write() as session:
            return ledger.reserve_plan(
                session,
                dataset_id=self.dataset_id,
                organisation_id=self.organisation_id,
                idempotency_key=key or f"plan-{next(self.keys)}",
                body_hash=digest(list(mechanisms)),
                jobs=jobs,
                costs=costs,
                snapshot_id=self.snapshot_id,
                max_attempts=3,
                ttl_seconds=ttl_seconds,
                now=self.now,
            )

    def start(
        self, job_id: str, *, job_digest: str = "d1", seed: bytes = b"seed 1", lease: float = 30
    ) -> ledger.Started | None:
        with self.database.write() as session:
            return ledger.start(
                session,
                job_id=job_id,
                job_digest=job_digest,
                sealed_seed=seed,
                lease_seconds=lease,
                now=self.now,
            )

    def must_start(self, job_id: str, **how: object) -> ledger.Started:
        started = self.start(job_id, **how)  # type: ignore[arg-type]
        assert started is not None
        return started

    def heartbeat(self, started: ledger.Started, done: int = 0) -> None:
        with self.database.write() as session:
            ledger.heartbeat(
                session,
                job_id=started.job_id,
                lease_token=started.lease_token,
                progress_done=done,
                lease_seconds=30,
                now=self.now,
            )

    def release(self, started: ledger.Started, *, sha256: str = "a" * 64) -> str:
        with self.database.write() as session:
            return ledger.release(
                session,
                job_id=started.job_id,
                lease_token=started.lease_token,
                location="releases/1",
                sha256=sha256,
                size=7,
                certificate={
                    "dataset": started.dataset_id,
                    "mechanism": started.mechanism,
                    "artefact": {"sha256": sha256, "bytes": 7},
                    "ledger": {"sequence": started.sequence, "hash": started.hash},
                },
                now=self.now,
            )

    def fail(self, started: ledger.Started) -> None:
        with self.database.write() as session:
            ledger.fail(
                session,
                job_id=started.job_id,
                lease_token=started.lease_token,
                code=ledger.FAILURE_CODE,
                now=self.now,
            )

    def cancel(self, job_id: str) -> None:
        with self.database.write() as session:
            ledger.cancel(session, job_id=job_id, now=self.now)

    def approve(self, job_id: str) -> tuple[str, ...]:
        with self.database.write() as session:
            return ledger.approve(session, job_id=job_id, ttl_seconds=1000, now=self.now)

    def deny(self, job_id: str) -> None:
        with self.database.write() as session:
            ledger.deny(session, job_id=job_id, now=self.now)

    def sweep(self, resend: float = 10) -> tuple[str, ...]:
        with self.database.write() as session:
            return ledger.sweep(session, now=self.now, resend_after_seconds=resend)

    def wait(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    def verify(self) -> ledger.Verification:
        with self.database.read() as session:
            return ledger.verify(session, self.dataset_id)

    def spent(self) -> float:
        """What the basic filter counts, in nats."""
        with self.database.read() as session:
            found = ledger.states(session, self.dataset_id)
        return next(s.epsilon_units for s in found if s.filter.order == "inf") / 1e9

    def state_of(self, job_id: str) -> str:
        with self.database.read() as session:
            return session.get_one(JobRow, job_id).state
