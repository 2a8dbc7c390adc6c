"""A small typed client of the service, for programs and for the demo.

Calls that are safe to repeat are repeated when the service says 503 or does not answer. Ordering a
job is one of them: it carries an idempotency key that is the same for the same order, so a reply
that was lost costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from accounting.canonical import digest

Json = dict[str, Any]

ENDED: Final = frozenset({"released", "failed_charged", "cancelled", "expired", "denied"})
_ATTEMPTS: Final = 5
_LONGEST_PAUSE: Final = 10.0


class ServiceError(Exception):
    """The service answered with a problem (RFC 9457)."""

    def __init__(self, problem: Json) -> None:
        super().__init__(f"{problem.get('code')}: {problem.get('detail')}")
        self.problem = problem

    @property
    def status(self) -> int:
        return int(self.problem.get("status", 0))

    @property
    def code(self) -> str:
        return str(self.problem.get("code", ""))

    @property
    def field(self) -> str | None:
        """The field at fault, where the problem names one."""
        field = self.problem.get("field")
        return None if field is None else str(field)


class BudgetExhausted(ServiceError):
    """No filter of the dataset's budget admits the charge; nothing was charged.

    ``requested``, ``remaining`` and ``blocking`` have one item for each filter:
    ``{"order", "epsilon", "delta"}``.
    """

    @property
    def requested(self) -> list[Json]:
        return list(self.problem["requested"])

    @property
    def remaining(self) -> list[Json]:
        return list(self.problem["remaining"])

    @property
    def blocking(self) -> list[Json]:
        return list(self.problem["blocking"])

    @property
    def largest_that_fits(self) -> Json | None:
        """A request's ``outputs`` that would be admitted now, if the service could tell."""
        found: Json | None = self.problem.get("largest_that_fits")
        return found


class JobFailed(ServiceError):
    """The job ended without a release; its charge stands if it had started."""


@dataclass
class Job:
    """A job of the service, as it last answered."""

    client: Client
    json: Json

    @property
    def id(self) -> str:
        return str(self.json["id"])

    @property
    def state(self) -> str:
        return str(self.json["state"])

    @property
    def done(self) -> int:
        return int(self.json["progress"]["done"])

    @property
    def total(self) -> int:
        return int(self.json["progress"]["total"])

    @property
    def release_id(self) -> str | None:
        release = self.json["release"]
        return None if release is None else str(release)

    def refresh(self) -> Self:
        """Asks the service again."""
        self.json = self.client.get_job(self.id).json
        return self

    def cancel(self) -> Self:
        """Takes the reservation back, if the job has not started."""
        self.json = self.client.request("POST", f"/v1/jobs/{self.id}/cancel").json()
        return self

    def wait(
        self,
        progress: Callable[[int, int], object] | None = None,
        *,
        timeout_seconds: float = 3600.0,
        poll_seconds: float = 0.5,
    ) -> str:
        """Waits for the job to end, and returns its release's id.

        Args:
            progress: called with (outputs done, total) after each look.

        Raises:
            JobFailed: it ended without a release.
            TimeoutError: it did not end in time; it goes on all the same.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.refresh()
            if progress is not None:
                progress(self.done, self.total)
            if self.state in ENDED:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.id} is still {self.state}")
            time.sleep(poll_seconds)
        release_id = self.release_id
        if release_id is None:
            problem = self.json["problem"] or {"code": self.state, "detail": f"it was {self.state}"}
            raise JobFailed(problem)
        return release_id


@dataclass
class Plan:
    """A plan as the service answered, with its jobs in order."""

    json: Json
    jobs: list[Job]

    @property
    def id(self) -> str:
        return str(self.json["id"])

    @property
    def state(self) -> str:
        return str(self.json["state"])


class Client:
    """The service at ``base_url``, called with one key.

    Args:
        key: a key of the service; None for its public calls alone.
        transport: another httpx transport, for tests.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        timeout_seconds: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=base_url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=timeout_seconds,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ----------------------------------------------------------------------------------------------
    # Administration and datasets
    # ----------------------------------------------------------------------------------------------

    def create_organisation(self, name: str) -> Json:
        return self._json("POST", "/v1/organisations", json={"name": name})

    def create_key(self, organisation: str, scopes: Sequence[str]) -> Json:
        body = {"organisation": organisation, "scopes": list(scopes)}
        return self._json("POST", "/v1/keys", json=body)

    def create_dataset(self, facts: Mapping[str, object]) -> Json:
        return self._json("POST", "/v1/datasets", json=dict(facts))

    def datasets(self) -> Iterator[Json]:
        """Every dataset that the key may see."""
        cursor: str | None = None
        while True:
            params = {} if cursor is None else {"cursor": cursor}
            page = self._json("GET", "/v1/datasets", params=params)
            yield from page["datasets"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def upload_snapshot(
        self, dataset: str, file: Path | bytes | None = None, **parts: Path | bytes
    ) -> Json:
        """Uploads records: one file, or the parts ``images``, ``labels`` and ``units``.

        Files are streamed from the disk.
        """
        given = dict(parts) if file is None else {"file": file}
        with ExitStack() as stack:
            files: dict[str, tuple[str, Any]] = {}
            for name, content in given.items():
                if isinstance(content, bytes):
                    files[name] = (name, content)
                else:
                    files[name] = (content.name, stack.enter_context(content.open("rb")))
            answer = self.request("POST", f"{_dataset(dataset)}/snapshots", files=files)
        return dict(answer.json())

    def snapshots(self, dataset: str) -> list[Json]:
        """The owner's view of the snapshots. Its figures are not private."""
        return list(self._json("GET", f"{_dataset(dataset)}/snapshots")["snapshots"])

    def grant(self, dataset: str, organisation: str, scopes: Sequence[str]) -> Json:
        body = {"organisation": organisation, "scopes": list(scopes)}
        return self._json("POST", f"{_dataset(dataset)}/grants", json=body)

    def set_budget(
        self,
        dataset: str,
        epsilon: float,
        delta: float,
        use: Json,
        *,
        organisation_caps: Mapping[str, float] | None = None,
        approval_above: float | None = None,
    ) -> Json:
        """Fixes the budget, or tightens it.

        Args:
            organisation_caps: the most epsilon of each organisation that is named.
            approval_above: jobs charged more epsilon by basic composition wait for the owner.
        """
        body: Json = {"epsilon": epsilon, "delta": delta, "use": use}
        if organisation_caps is not None:
            body["organisation_caps"] = {
                name: {"epsilon": cap} for name, cap in organisation_caps.items()
            }
        if approval_above is not None:
            body["approval_above"] = {"epsilon": approval_above}
        return self._json("PUT", f"{_dataset(dataset)}/budget", json=body)

    def budget(self, dataset: str) -> Json:
        return self._json("GET", f"{_dataset(dataset)}/budget")

    # ----------------------------------------------------------------------------------------------
    # Quotes, jobs, releases
    # ----------------------------------------------------------------------------------------------

    def quote(self, dataset: str, spec: Mapping[str, object]) -> Json:
        """What the job would cost. Charges nothing."""
        return self._json("POST", f"{_dataset(dataset)}/quotes", json=dict(spec), repeat=True)

    def create_job(
        self,
        dataset: str,
        spec: Mapping[str, object],
        *,
        order: str = "1",
        idempotency_key: str | None = None,
    ) -> Job:
        """Orders a job, or finds the one that this very order made before.

        Args:
            order: tells two orders of the same spec apart; give another to buy again.
            idempotency_key: used as it is, in place of one made of dataset, spec and order.

        Raises:
            BudgetExhausted: the budget does not admit it.
        """
        key = idempotency_key
        if key is None:
            key = f"order-{digest({'dataset': dataset, 'spec': dict(spec), 'order': order})}"
        answer = self.request(
            "POST",
            f"{_dataset(dataset)}/jobs",
            json=dict(spec),
            headers={"Idempotency-Key": key},
            repeat=True,
        )
        return Job(self, dict(answer.json()))

    def create_plan(
        self,
        dataset: str,
        specs: Sequence[Mapping[str, object]],
        *,
        order: str = "1",
        idempotency_key: str | None = None,
    ) -> Plan:
        """Orders several jobs as one charge, which is less than one by one.

        The other arguments and the errors are those of :meth:`create_job`.
        """
        body = {"jobs": [dict(spec) for spec in specs]}
        key = idempotency_key
        if key is None:
            key = f"order-{digest({'dataset': dataset, **body, 'order': order})}"
        answer = self.request(
            "POST",
            f"{_dataset(dataset)}/plans",
            json=body,
            headers={"Idempotency-Key": key},
            repeat=True,
        )
        return self._plan(dict(answer.json()))

    def get_plan(self, plan: str) -> Plan:
        return self._plan(self._json("GET", f"/v1/plans/{quote(plan, safe='')}"))

    def _plan(self, found: Json) -> Plan:
        return Plan(found, [Job(self, dict(job)) for job in found["jobs"]])

    def approve(self, job: str) -> Job:
        """Lets a job that waits for its owner go ahead."""
        return Job(self, self._json("POST", f"/v1/jobs/{quote(job, safe='')}/approve"))

    def deny(self, job: str) -> Job:
        """Refuses a job that waits for its owner; its charge is taken back."""
        return Job(self, self._json("POST", f"/v1/jobs/{quote(job, safe='')}/deny"))

    def get_job(self, job: str) -> Job:
        return Job(self, self._json("GET", f"/v1/jobs/{quote(job, safe='')}"))

    def release(self, release: str) -> Json:
        return self._json("GET", _release(release))

    def download(self, release: str, target: Path, *, kind: str = "npz") -> Path:
        """Streams the batch into a file."""
        with self._http.stream(
            "GET", f"{_release(release)}/content", params={"format": kind}
        ) as answer:
            if answer.is_error:
                answer.read()
                raise _error_of(answer)
            with target.open("wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)
        return target

    def certificate(self, release: str) -> Json:
        return self._json("GET", f"{_release(release)}/certificate")

    # ----------------------------------------------------------------------------------------------
    # Checks and questions
    # ----------------------------------------------------------------------------------------------

    def ledger(self, dataset: str) -> Json:
        return self._json("GET", f"{_dataset(dataset)}/ledger")

    def statement(self, dataset: str) -> Json:
        """The books summed up: filters, organisations, and the use of the budget over time."""
        return self._json("GET", f"{_dataset(dataset)}/statement")

    def verify_ledger(self, dataset: str) -> Json:
        return self._json("GET", f"{_dataset(dataset)}/ledger/verify")

    def export_ledger(self, dataset: str) -> str:
        """The hash chain as JSON lines."""
        return self.request("GET", f"{_dataset(dataset)}/ledger/export").text

    def verify_certificate(self, certificate: Json, *, recompute: bool = True) -> Json:
        body = {"certificate": certificate, "recompute": recompute}
        return self._json("POST", "/v1/certificates/verify", json=body, repeat=True)

    def epsilon(self, mechanism: Json, delta: float, *, tolerance: float | None = None) -> Json:
        return self._ask("epsilon", mechanism=mechanism, delta=delta, tolerance=tolerance)

    def delta(self, mechanism: Json, epsilon: float) -> Json:
        return self._ask("delta", mechanism=mechanism, epsilon=epsilon)

    def profile(self, mechanism: Json, epsilons: Sequence[float] | None = None) -> list[Json]:
        """Both bounds of delta at each epsilon; by default at points that show the whole curve."""
        points = None if epsilons is None else list(epsilons)
        return list(self._ask("profile", mechanism=mechanism, epsilons=points)["points"])

    def tradeoff(self, mechanism: Json, alphas: Sequence[float] | None = None) -> list[Json]:
        """Both bounds of the type II error at each type I error."""
        points = None if alphas is None else list(alphas)
        return list(self._ask("tradeoff", mechanism=mechanism, alphas=points)["points"])

    def compare(self, mechanism: Json, delta: float) -> list[Json]:
        """Every method's view of epsilon at delta."""
        return list(self._ask("compare", mechanism=mechanism, delta=delta)["methods"])

    def calibrate(
        self,
        mechanism: Json,
        free: str,
        *,
        epsilon: float,
        delta: float | None = None,
        method: str = "certified",
    ) -> Json:
        """The parameter ``free`` that meets (epsilon, delta); it may be left out of mechanism."""
        target = {"epsilon": epsilon, "delta": delta}
        return self._ask("calibrate", mechanism=mechanism, free=free, target=target, method=method)

    def allocate(
        self,
        stages: Sequence[tuple[Json, float]],
        *,
        epsilon: float,
        delta: float,
        method: str = "certified",
    ) -> Json:
        """The noise of each (mechanism, weight), so that all together meet (epsilon, delta)."""
        listed = [{"mechanism": mechanism, "weight": weight} for mechanism, weight in stages]
        target = {"epsilon": epsilon, "delta": delta}
        return self._ask("allocate", stages=listed, target=target, method=method)

    def _ask(self, question: str, **body: object) -> Json:
        """A question to the accountant; what is None is left to the service."""
        return self._json("POST", f"/v1/accounting/{question}", json=body, repeat=True)

    def models(self) -> list[Json]:
        return list(self._json("GET", "/v1/models")["models"])

    def ready(self) -> bool:
        """Whether the service could take a job now."""
        try:
            return self._http.get("/readyz").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    # ----------------------------------------------------------------------------------------------

    def _json(self, method: str, path: str, **options: Any) -> Json:
        return dict(self.request(method, path, **options).json())

    def request(
        self, method: str, path: str, *, repeat: bool = False, **options: Any
    ) -> httpx.Response:
        """One call; repeated on 503 and on a lost connection where that is safe.

        Raises:
            ServiceError: the service answered with a problem.
            httpx.TransportError: it did not answer.
        """
        attempts = _ATTEMPTS if repeat or method in ("GET", "PUT") else 1
        for attempt in range(1, attempts + 1):
            pause = min(2.0 ** (attempt - 2), _LONGEST_PAUSE)
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError:
                if attempt == attempts:
                    raise
            else:
                if answer.is_success:
                    return answer
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or attempt == attempts:
                    raise _error_of(answer)
                pause = min(float(answer.headers.get("Retry-After", pause)), _LONGEST_PAUSE)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _error_of(answer: httpx.Response) -> ServiceError:
    try:
        problem = dict(answer.json())
    except ValueError:
        problem = {"status": answer.status_code, "code": "", "detail": answer.reason_phrase}
    if problem.get("code") == "budget_exhausted":
        return BudgetExhausted(problem)
    return ServiceError(problem)


def _dataset(dataset: str) -> str:
    return f"/v1/datasets/{quote(dataset, safe='')}"


def _release(release: str) -> str:
    return f"/v1/releases/{quote(release, safe='')}"
