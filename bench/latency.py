"""How long the real service takes to answer a question: what ``make bench-latency`` runs.

    python -m bench.latency [--out docs/benchmarks.md] [--rate 20] [--seconds 60]

The embedded service runs in a temporary folder, without its worker. Questions arrive in an open
loop: their times are fixed beforehand, and a latency counts from the time of arrival, so that a
stall also counts for the questions that wait behind it. The client's own cost shows in the calls to
/livez, which do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from accounting import bounds
from accounting.mechanisms import mechanism_from_json
from bench.mechanisms import ROWS, random_release
from bench.page import PAGE, figure, machine, one_thread, quantile, table, target_row, write_section

SECTION: Final = "latency"
READY_SECONDS: Final = 120.0
QUESTION: Final = "/v1/accounting/epsilon"
KNOWN: Final = next(row for row in ROWS if row.key == "65")
# Open before the clock starts. The client looks at every idle one for each request, so not more
# than the load needs.
_CONNECTIONS: Final = 8
# The event loop's timers are late by up to this much; the rest of the time is spent looking.
_TIMER_SECONDS: Final = 2e-3

Send = Callable[[int], Awaitable[bool]]


class NotReady(Exception):
    """The service did not start."""


@dataclass
class Measured:
    """Milliseconds from the arrival to the answer, and how many answers were not the right kind.

    ``processor`` is what the service's process took of a core for one request, in milliseconds.
    """

    milliseconds: list[float] = field(default_factory=list)
    failures: int = 0
    processor: float = 0.0


# --------------------------------------------------------------------------------------------------
# The load
# --------------------------------------------------------------------------------------------------


async def open_loop(send: Send, arrivals: Sequence[float]) -> Measured:
    """Sends request i at ``arrivals[i]`` seconds from now, whatever became of the others."""
    found = Measured()
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(i: int) -> None:
        try:
            ok = await send(i)
        except httpx.HTTPError:
            ok = False
        found.milliseconds.append(1e3 * (loop.time() - start - arrivals[i]))
        found.failures += not ok

    async with asyncio.TaskGroup() as group:
        for i, at in enumerate(arrivals):
            await asyncio.sleep(max(0.0, start + at - loop.time() - _TIMER_SECONDS))
            while loop.time() < start + at:
                await asyncio.sleep(0.0)
            group.create_task(one(i))
    return found


def arrivals(rate: float, seconds: float) -> list[float]:
    """Evenly spaced times, ``rate`` a second."""
    return [i / rate for i in range(round(rate * seconds))]


def fresh_questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Random questions about releases whose Renyi bound lies between 0.01 and 100."""
    generator = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        mechanism, delta = random_release(generator)
        if 0.01 <= bounds.renyi(mechanism_from_json(mechanism), delta).upper <= 100.0:
            found.append({"mechanism": mechanism, "delta": delta})
    return found


def accountant_milliseconds(questions: Sequence[dict[str, Any]]) -> list[float]:
    """What the accountant alone takes for the same questions, in this process, one by one."""
    bounds.warm_up()
    found = []
    for question in questions:
        start = time.perf_counter()
        bounds.epsilon(mechanism_from_json(question["mechanism"]), question["delta"])
        found.append(1e3 * (time.perf_counter() - start))
    return found


# --------------------------------------------------------------------------------------------------
# The service
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A service: its address, an admin's key, and its process."""

    url: str
    key: str
    pid: int

    def processor_milliseconds(self) -> float:
        """The processor time that the process has taken so far; see proc(5)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_service(home: Path) -> Iterator[Running]:
    """The API on a fresh home, as a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EPSILOND_")}
    environment |= {"EPSILOND_HOME": str(home / "home"), "EPSILOND_PORT": str(port)}
    epsilond = [sys.executable, "-m", "api.cli"]
    first = subprocess.run(
        [*epsilond, "init"], env=environment, capture_output=True, text=True, check=True
    )
    with (home / "service.log").open("wb") as log:
        process = subprocess.Popen(
            [*epsilond, "serve", "--without-worker"], env=environment, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + READY_SECONDS
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise NotReady((home / "service.log").read_text(errors="replace"))
            time.sleep(0.2)
        yield Running(url, str(json.loads(first.stdout)["admin_key"]), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def measure(
    service: Running, times: Sequence[float], fresh: Sequence[dict[str, Any]]
) -> dict[str, Measured]:
    """The three loads, one after the other."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {service.key}"}
    known = {"mechanism": KNOWN.mechanism, "delta": KNOWN.delta}
    async with httpx.AsyncClient(
        base_url=service.url, headers=headers, limits=limits, timeout=60
    ) as client:

        async def live(_: int) -> bool:
            return (await client.get("/livez")).status_code == 200

        async def ask(question: dict[str, Any]) -> bool:
            answer = await client.post(QUESTION, json=question)
            return answer.status_code == 200 and "reason" not in answer.json()

        # Warm: connections, the routes, the accountant's libraries.
        for _ in range(3):
            await asyncio.gather(*(live(i) for i in range(_CONNECTIONS)))
        for question in (known, known, *fresh_questions(20, seed=1)):
            await ask(question)
        found = {}
        for name, send in (
            ("nothing (/livez)", live),
            ("a known question", lambda _: ask(known)),
            ("a fresh question", lambda i: ask(fresh[i])),
        ):
            before = service.processor_milliseconds()
            found[name] = await open_loop(send, times)
            taken = service.processor_milliseconds() - before
            found[name].processor = taken / len(times)
            await asyncio.sleep(1.0)
        return found


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def page_of(
    arguments: argparse.Namespace, found: dict[str, Measured], alone: Sequence[float]
) -> str:
    shares = (0.5, 0.9, 0.99, 1.0)
    header = ["request", "count", "median, ms", "90 %", "99 %", "largest"]
    header += ["processor, ms each", "failures"]
    rows = [
        [
            name,
            f"{len(m.milliseconds):,}",
            *(figure(quantile(m.milliseconds, share)) for share in shares),
            figure(m.processor),
            str(m.failures),
        ]
        for name, m in found.items()
    ]
    rows.append([
        "fresh, the accountant alone",
        f"{len(alone):,}",
        *(figure(quantile(alone, share)) for share in shares),
        "–",
        "–",
    ])  # fmt: skip
    known, fresh = found["a known question"].milliseconds, found["a fresh question"].milliseconds
    targets = [
        target_row("a known question, median", quantile(known, 0.5), 5, "ms"),
        target_row("a fresh question, median", quantile(fresh, 0.5), 25, "ms"),
        target_row("a fresh question, 99 %", quantile(fresh, 0.99), 100, "ms"),
    ]
    return "\n\n".join([
        "## The service",
        f"One run of `python -m bench.latency` on {machine()}: `epsilond serve` with SQLite, "
        f"client and service on the same cores, {arguments.rate:g} requests a second for "
        f"{arguments.seconds:g} s each in an open loop. A latency counts from the scheduled "
        "arrival to the whole answer; what /livez takes is the cost of the client and of HTTP "
        "alone. The client spends the last 2 ms before each arrival looking at the clock, as its "
        "timers are late. Fresh questions are what releases are made of, with random parameters "
        "and ε between 0.01 and 100 by the Rényi bound (`bench.mechanisms.random_release`, seed "
        f"{arguments.seed}), none of them asked before. A failure is any answer but a bracket of "
        "the wanted width.",
        table(header, rows),
        table(["what", "figure", "target", "met"], targets),
    ])  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--out", type=Path, help=f"the page to write, such as {PAGE}")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--seed", type=int, default=20260101)
    return parser.parse_args(arguments)


def main() -> int:
    one_thread()
    arguments = parse()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    times = arrivals(arguments.rate, arguments.seconds)
    fresh = fresh_questions(len(times), arguments.seed)
    with (
        tempfile.TemporaryDirectory(prefix="epsilond-bench-") as home,
        running_service(Path(home)) as service,
    ):
        found = asyncio.run(measure(service, times, fresh))
    text = page_of(arguments, found, accountant_milliseconds(fresh))
    print(text)
    if arguments.out is not None:
        write_section(arguments.out, SECTION, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
