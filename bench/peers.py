"""Other accountants, asked in a process of their own, with their time and memory measured."""

from __future__ import annotations

import json
import re
import select
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from accounting.mechanisms import GaussianTerm, Term

ROOT: Final = Path(__file__).resolve().parent.parent
_REPEATS: Final = 3
_REPEAT_SECONDS: Final = 3.0  # a longer answer is measured once
_START_SECONDS: Final = 300.0  # imports; torch's take long on a cold disk

# Any small question: the answer to it is thrown away, its libraries stay loaded.
_WARM: Final = {"q": 0.01, "mu": 1.0, "count": 10}
_PRV: Final = {"eps_error": 0.01}  # Opacus' default; delta's error is a thousandth of delta


@dataclass(frozen=True)
class Answer:
    """What a peer said: ends that it calls bounds, seconds, and MB beyond its imports.

    ``failure`` says why there are no ends; the other fields are None then.
    """

    lower: float | None = None
    upper: float | None = None
    seconds: float | None = None
    megabytes: float | None = None
    failure: str = ""


class Stopped(Exception):
    """The process gave no answer; the text says why."""


class _Process:
    """One :mod:`accounting.pld_process` under another Python, perhaps."""

    def __init__(self, python: str) -> None:
        self._popen = subprocess.Popen(
            [python, "-m", "accounting.pld_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # errors come back in the answer
            bufsize=0,
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.communicate()

    def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        """The answer; what is not there after the question's seconds comes never."""
        source, sink = self._popen.stdout, self._popen.stdin
        assert source is not None
        assert sink is not None
        deadline = time.monotonic() + float(str(question["seconds"]))
        try:
            sink.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise Stopped("process ended") from None
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([source], [], [], left)[0]:
                raise Stopped("out of time")
            piece = source.read(1 << 16)
            if not piece:
                raise Stopped("process ended")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Stopped(failure_of(str(answer["error"])))
        return answer

    @property
    def pid(self) -> int:
        return self._popen.pid


def resident_megabytes(pid: int | str, *, peak: bool = False) -> float:
    """A process's resident memory in MB, or the most since :func:`count_peak_anew`."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def count_peak_anew(pid: int | str) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5)


def failure_of(error: str) -> str:
    """A library's error in a cell: its first sentence, short and without a table's bars."""
    if error == "memory" or error.startswith("MemoryError"):
        return "out of memory"
    if "No module named" in error:
        return "not installed"
    first = re.split(r"(?<=[a-z])\. |\n", error)[0].replace("|", "/")
    return f"raised {first[:70]}"


def terms_json(terms: Sequence[Term]) -> list[dict[str, object]]:
    """Sampled Gaussians as :mod:`accounting.pld_process` reads them.

    Raises:
        ValueError: another kind of term; the benches ask about none.
    """
    out: list[dict[str, object]] = []
    for term in terms:
        if not isinstance(term, GaussianTerm):
            raise ValueError("only sampled Gaussians are asked about")
        out.append({"q": term.sampling_probability, "mu": term.mu, "count": term.count})
    return out


def ask(
    python: str,
    method: str,
    terms: Sequence[dict[str, object]],
    delta: float,
    *,
    seconds: float,
    megabytes: int,
    interval: float = 0.0,
    pessimistic: bool = True,
) -> Answer:
    """One method's answer about epsilon at delta, in a fresh process whose imports are done."""
    limits = {"method": method, "seconds": seconds, "megabytes": megabytes}
    if method == "dp_accounting_pld":
        asked = {"interval": interval, "pessimistic": pessimistic, "deltas": [delta]}
        settings: dict[str, object] = asked | {"epsilons": []}
    else:
        settings = {"delta": delta, "delta_error": 1e-3 * delta, **_PRV}
    question = limits | settings
    warm = question | {"terms": [_WARM], "seconds": _START_SECONDS}
    if method == "dp_accounting_pld":
        warm["interval"] = 1e-2
    else:
        warm |= {"delta": 1e-5, "delta_error": 1e-8}
    with _Process(python) as process:
        try:
            process.ask(warm)
            count_peak_anew(process.pid)
            before = resident_megabytes(process.pid)
            times: list[float] = []
            answer: dict[str, Any] = {}
            while len(times) < _REPEATS and sum(times) < _REPEAT_SECONDS:
                # Each time another question to nine digits: a process keeps its last answers.
                nudge = 1.0 + 1e-9 * len(times)
                nudged = [t | {"mu": float(str(t["mu"])) * nudge} for t in terms]
                start = time.perf_counter()
                answer = process.ask(question | {"terms": nudged})
                times.append(time.perf_counter() - start)
            used = resident_megabytes(process.pid, peak=True) - before
        except Stopped as stop:
            return Answer(failure=str(stop))
    lower, upper = _ends(method, answer, pessimistic)
    if lower is None and upper is None:
        return Answer(failure="no finite answer")
    return Answer(lower, upper, statistics.median(times), used)


def _ends(
    method: str, answer: Mapping[str, Any], pessimistic: bool
) -> tuple[float | None, float | None]:
    if method != "dp_accounting_pld":
        return answer.get("lower"), answer.get("upper")
    sides = [answer[side]["epsilon"][0] for side in ("remove", "add")]
    # Null is an infinite epsilon.
    end = float("inf") if None in sides else max(0.0, *sides)
    return (None, end) if pessimistic else (end, None)
