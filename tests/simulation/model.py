"""What the books must say: a second, independent bookkeeper that knows no table and no lock.

It says beforehand what the ledger must answer to a call, and takes the call into its own books when
(and only when) the transaction commits. Its sums are plain integers over plain lists, so an error
in the ledger's SQL can't be in them as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# One pair (epsilon, delta) for each filter; None crosses the filter.
Costs = tuple[tuple[int, int] | None, ...]

HELD = frozenset({"awaiting_approval", "reserved"})
CHARGED = HELD | {"started", "released", "failed_charged"}
ENDED = frozenset({"released", "failed_charged", "cancelled", "expired", "denied"})


@dataclass(frozen=True)
class Cap:
    """A filter's cap; ``delta`` is None where the filter does not add deltas."""

    epsilon: int
    delta: int | None


@dataclass(frozen=True)
class Sum:
    """What one filter holds; ``crossed`` says that a cost it can't add is among it."""

    epsilon: int = 0
    delta: int = 0
    crossed: bool = False

    def within(self, cap: Cap) -> bool:
        """Whether the filter, left with this sum, still holds."""
        return (
            not self.crossed
            and self.epsilon <= cap.epsilon
            and (cap.delta is None or self.delta <= cap.delta)
        )


@dataclass
class Job:
    """A job that somebody was granted."""

    key: int
    job_id: str
    body: str
    costs: Costs
    max_attempts: int
    expires_at: int
    state: str = "reserved"
    attempts: int = 0
    ever_started: bool = False
    token: str | None = None
    lease_until: int = 0
    code: str | None = None
    release: tuple[str, str] | None = None


@dataclass
class Model:
    """The books of one dataset."""

    caps: tuple[Cap, ...]
    approval_above: int | None = None
    jobs: dict[int, Job] = field(default_factory=dict)

    def by_id(self, job_id: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.job_id == job_id), None)

    # Sums --------------------------------------------------------------------------------------

    def sums(self, jobs: Iterable[Job]) -> tuple[Sum, ...]:
        """What the filters hold if exactly these jobs count."""
        counted = [job for job in jobs if job.costs]
        found = []
        for j in range(len(self.caps)):
            each = [job.costs[j] for job in counted]
            finite = [cost for cost in each if cost is not None]
            found.append(
                Sum(sum(e for e, _ in finite), sum(d for _, d in finite), len(finite) < len(each))
            )
        return tuple(found)

    def charged(self) -> tuple[Sum, ...]:
        return self.sums(
            job for job in self.jobs.values() if job.state in CHARGED or job.ever_started
        )

    def started(self) -> tuple[Sum, ...]:
        return self.sums(job for job in self.jobs.values() if job.ever_started)

    def released(self) -> tuple[Sum, ...]:
        return self.sums(job for job in self.jobs.values() if job.release is not None)

    def holds(self, sums: tuple[Sum, ...]) -> bool:
        """Whether at least one filter is within its cap."""
        return any(s.within(cap) for s, cap in zip(sums, self.caps, strict=True))

    # What the ledger must answer ---------------------------------------------------------------

    def reserve(self, key: int, body: str, costs: Costs, parent: int | None) -> str:
        known = self.jobs.get(key)
        if known is not None:
            return "existing" if known.body == body else "mismatch"
        if parent is not None:
            above = self.jobs.get(parent)
            free = above is not None and above.state == "released"
            return "created" if free else "parent_not_released"
        for (cap, have), cost in zip(
            zip(self.caps, self.charged(), strict=True), costs, strict=True
        ):
            if cost is not None and Sum(
                have.epsilon + cost[0], have.delta + cost[1], have.crossed
            ).within(cap):
                return "created"
        return "exhausted"

    def awaits_approval(self, costs: Costs) -> bool:
        """Whether a charge of more epsilon than the owner's threshold waits for the owner."""
        if self.approval_above is None:
            return False
        return any(
            cap.delta is not None and (cost is None or cost[0] > self.approval_above)
            for cap, cost in zip(self.caps, costs, strict=False)  # post-processing costs nothing
        )

    def start(self, job: Job, code: str, now: int) -> str:
        if job.state == "reserved":
            return "expired" if job.expires_at <= now else "started"
        if job.state == "started" and job.lease_until <= now:
            if job.code != code or job.attempts >= job.max_attempts:
                return "failed_charged"
            return "attempt"
        return "nothing"

    def holds_lease(self, job: Job, token: str) -> bool:
        return job.state == "started" and job.token == token

    def overdue(self, now: int, *, reservations_only: bool) -> dict[int, str]:
        """The jobs that a sweep ends, and the states it leaves them in."""
        ended = {}
        for job in self.jobs.values():
            if job.state in HELD and job.expires_at <= now:
                ended[job.key] = "expired"
            elif (
                not reservations_only
                and job.state == "started"
                and job.lease_until <= now
                and job.attempts >= job.max_attempts
            ):
                ended[job.key] = "failed_charged"
        return ended

    # What a commit changes ---------------------------------------------------------------------

    def add(self, job: Job) -> None:
        self.jobs[job.key] = job

    def begin(self, job: Job, *, token: str, code: str, lease_until: int) -> None:
        job.state = "started"
        job.attempts += 1
        job.ever_started = True
        job.token, job.code, job.lease_until = token, code, lease_until

    def approve(self, job: Job, expires_at: int) -> None:
        job.state, job.expires_at = "reserved", expires_at

    def end(self, job: Job, state: str) -> None:
        job.state, job.token = state, None
