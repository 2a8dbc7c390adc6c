"""What the benches share: the page they write, a section each, and the machine in words."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

PAGE: Final = Path("docs/benchmarks.md")
_HEAD: Final = """# Benchmarks

Written by the benches themselves (`make bench-accounting`, `make bench-latency`,
`make bench-ledger`): each replaces its own sections and leaves the others. Times depend on the
machine; ratios of times in one run carry over.
"""
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def write_section(page: Path, name: str, text: str) -> None:
    """Puts ``text`` between the markers of section ``name``, which is appended if there is none."""
    old = page.read_text() if page.exists() else _HEAD
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: section, old, count=1)
    else:
        new = f"{old.rstrip()}\n\n{section}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    Raises:
        ValueError: a row has not as many cells as the header.
    """
    lines = [header, ["---"] * len(header), *rows]
    if any(len(line) != len(header) for line in lines):
        raise ValueError("a row is not as long as the header")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(value: float | None, digits: int = 3) -> str:
    """A number in a cell, to so many significant digits and without an exponent where it can be."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "inf" if value > 0 else "undefined"
    if value == 0 or not 1e-3 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}" if value else "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, places)}f}"


def target_row(what: str, value: float, limit: float, unit: str, *, most: bool = True) -> list[str]:
    """The cells of a figure beside its target: what, figure, target, whether it is met."""
    sign = "at most" if most else "at least"
    met = value <= limit if most else value >= limit
    return [
        what,
        f"{figure(value)} {unit}".strip(),
        f"{sign} {limit:,g} {unit}".strip(),
        "yes" if met else "**no**",
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that a share of all values does not exceed (nearest rank).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_ms(run: Callable[[int], object], repeats: int, *, seconds: float = 20.0) -> float:
    """Median wall time of ``run(1)``, ``run(2)`` ... in milliseconds, after a ``run(0)`` that is
    not counted; fewer than ``repeats`` where they take longer than ``seconds`` together."""
    run(0)
    times: list[float] = []
    while len(times) < repeats and sum(times) < seconds:
        start = time.perf_counter()
        run(len(times) + 1)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def machine() -> str:
    """The machine in words, with the versions that matter."""
    cores = len(os.sched_getaffinity(0))
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "scipy"))
    return (
        f"{cores} {platform.machine()} cores, {gibibytes:.0f} GiB of memory, "
        f"Python {platform.python_version()}, {versions}"
    )


def one_thread() -> None:
    """Starts this very program again if its linear algebra would use more than one thread."""
    if any(os.environ.get(name) != "1" for name in _THREADS):
        os.environ.update(dict.fromkeys(_THREADS, "1"))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  no shell
