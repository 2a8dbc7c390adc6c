"""The accountant beside other people's, on the same rows in one run: what ``make bench-accounting``
runs.

    python -m bench.accounting [--out docs/benchmarks.md] [--peers-python PYTHON] [--quick]

Each figure of ours is a median over questions that differ in the ninth digit, so that no kept
answer helps, in a warm process on one thread. Every other accountant answers in a process of its
own, its imports done, under a time and a memory limit. dp_accounting is a dependency; Opacus and
Microsoft's prv_accountant are looked for in the environment of ``--peers-python``.

Without ``--out`` the tables are printed only. ``--quick`` leaves out dp_accounting's fine interval
but on the 65 % row, and shortens the rest.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from accounting import bounds
from accounting.bounds import Bracket, Limits
from accounting.calibrate import calibrate
from accounting.mechanisms import Mechanism, dominating_terms, mechanism_from_json
from bench import peers
from bench.mechanisms import (
    FETA_PRO,
    ROWS,
    Row,
    block,
    dp_sgd,
    in_words,
    nudged,
    random_question,
    sampled,
)
from bench.page import (
    PAGE,
    figure,
    machine,
    median_ms,
    one_thread,
    quantile,
    table,
    target_row,
    write_section,
)

SECTION: Final = "accounting"
HEADLINE: Final = "65"
PICTURE: Final = "images/bench-accounting.png"
PEERS: Final = ("dp_accounting", "opacus", "prv_accountant")
_METHODS: Final = {"opacus": "opacus_prv", "prv_accountant": "microsoft_prv"}
COARSE, FINE = 1e-4, 1e-5
_SWEEP_LIMITS: Final = Limits(seconds=10.0)


@dataclass(frozen=True)
class Own:
    """Our answer to a row, at the default tolerance and at 1e-3 of epsilon."""

    bracket: Bracket
    milliseconds: float
    coarse: Bracket
    coarse_milliseconds: float


@dataclass(frozen=True)
class Found:
    """What a row's question was answered, by us and by each peer that was asked."""

    row: Row
    own: Own
    others: dict[str, peers.Answer]


def width(b: Bracket) -> float:
    """The relative width; 0 where both ends are 0 or infinite."""
    return 0.0 if b.upper == b.lower else (b.upper - b.lower) / b.upper


# --------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------


def variants(mechanism: dict[str, Any], repeats: int) -> list[Mechanism]:
    """The mechanism for a warm-up and for each repeat."""
    return [mechanism_from_json(nudged(mechanism, k)) for k in range(repeats + 1)]


def measure_own(row: Row, repeats: int) -> Own:
    many = variants(row.mechanism, 2 * repeats + 1)
    fine = [m for i, m in enumerate(many) if i % 2 == 0]
    rough = [m for i, m in enumerate(many) if i % 2 == 1]
    default = median_ms(lambda k: bounds.epsilon(fine[k], row.delta), repeats)
    bracket = bounds.epsilon(fine[0], row.delta)
    tolerance = 1e-3 * bracket.upper
    coarse = median_ms(lambda k: bounds.epsilon(rough[k], row.delta, tolerance=tolerance), repeats)
    return Own(
        bracket,
        default,
        bounds.epsilon(rough[0], row.delta, tolerance=tolerance),
        coarse,
    )


def ask_peers(row: Row, arguments: argparse.Namespace) -> dict[str, peers.Answer]:
    """Each peer's answer by its name; dp_accounting's by interval and end."""
    (terms,) = dominating_terms(mechanism_from_json(row.mechanism))
    ask = functools.partial(
        peers.ask,
        terms=peers.terms_json(terms),
        delta=row.delta,
        seconds=arguments.seconds,
        megabytes=arguments.megabytes,
    )
    found: dict[str, peers.Answer] = {}
    if "dp_accounting" in arguments.peers:
        for interval in (COARSE, FINE):
            if interval == FINE and arguments.quick and row.key != HEADLINE:
                continue
            for pessimistic in (True, False):
                name = f"dp_accounting {interval:g} {'upper' if pessimistic else 'lower'}"
                found[name] = ask(
                    sys.executable,
                    "dp_accounting_pld",
                    interval=interval,
                    pessimistic=pessimistic,
                )
                print(f"  {name}: {found[name]}", flush=True)
    for name in ("opacus", "prv_accountant"):
        if name in arguments.peers:
            found[name] = ask(arguments.peers_python, _METHODS[name])
            print(f"  {name}: {found[name]}", flush=True)
    return found


def memory_above_imports(row: Row) -> float:
    """The most resident memory that a row takes, in MB above what is there once all is imported.

    Meant for a fresh process: what an earlier question took and kept would count.
    """
    mechanism = mechanism_from_json(row.mechanism)
    peers.count_peak_anew("self")
    before = peers.resident_megabytes("self")
    bounds.epsilon(mechanism, row.delta)
    return peers.resident_megabytes("self", peak=True) - before


def measure_memory(rows: Sequence[Row]) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(memory_above_imports, rows, chunksize=1)
    return {row.key: megabytes for row, megabytes in zip(rows, found, strict=True)}


def measure_inverses(repeats: int) -> list[tuple[str, str, float]]:
    """(question, answer, milliseconds) of questions that users ask."""
    questions: list[tuple[str, dict[str, Any], str, float, float]] = [
        ("σ of DP-SGD", dp_sgd(1 / 14, 10.0, 2100), "noise_multiplier", 1.0, 1e-5),
        ("steps of DP-SGD", dp_sgd(1 / 14, 14.78, 2100), "steps", 1.0, 1e-5),
        ("outputs of the 65 % block", block(65, 25), "outputs", 6.0, 1e-5),
        ("β of the 65 % block", block(65, 25), "beta", 1.0, 1e-5),
        ("handoff of a block", block(65, 25), "block_steps", 10.0, 1e-5),
        ("subsample of the 62 % block", block(62, 25), "subsample_size", 2.0, 1e-5),
        ("rate of 50 outputs", sampled(0.0075, 1 / 4.3, 50), "sampling_probability", 20.0, 1e-5),
        ("σ of FETA-Pro's DP-SGD", FETA_PRO, "dp_sgd.noise_multiplier", 1.0, 1e-5),
    ]
    found = []
    for label, mechanism, free, epsilon, delta in questions:
        start = variants(mechanism, repeats)

        def run(
            k: int,
            start: list[Mechanism] = start,
            free: str = free,
            epsilon: float = epsilon,
            delta: float = delta,
        ) -> object:
            # The noise may be what is free, so the target is changed as well.
            return calibrate(start[k], free, epsilon=epsilon * (1 + 1e-9 * k), delta=delta)

        answer = calibrate(start[0], free, epsilon=epsilon, delta=delta)
        text = f"{label} for ε {epsilon:g} at δ {delta:g}"
        found.append((text, figure(answer.parameter, 6), median_ms(run, repeats)))
    return found


def measure_profiles(repeats: int) -> list[tuple[str, float]]:
    tops = {"55": 1.0, "65": 12.0, "sgd": 2.0, "counts": 60.0, "feta": 2.0}
    found = []
    for row in (r for r in ROWS if r.key in tops):
        points = [float(x) for x in np.linspace(0.0, tops[row.key], 200)]
        many = variants(row.mechanism, repeats)

        def run(k: int, many: list[Mechanism] = many, points: list[float] = points) -> object:
            return bounds.profile(many[k], points)

        text = f"δ at 200 points, ε up to {points[-1]:g}: {row.label}"
        found.append((text, median_ms(run, repeats)))
    return found


@dataclass(frozen=True)
class Drawn:
    """A random question's answer."""

    text: str
    bracket: Bracket
    milliseconds: float

    @property
    def width(self) -> float:
        return width(self.bracket)


def sweep(count: int, seed: int) -> list[Drawn]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        mechanism_json, delta = random_question(generator)
        mechanism = mechanism_from_json(mechanism_json)
        start = time.perf_counter()
        b = bounds.epsilon(mechanism, delta, limits=_SWEEP_LIMITS)
        taken = 1e3 * (time.perf_counter() - start)
        found.append(Drawn(f"{in_words(mechanism_json)}, δ {delta:.2g}", b, taken))
    return found


def in_range(drawn: Sequence[Drawn]) -> list[Drawn]:
    """Those with epsilon in [0.01, 100]."""
    return [d for d in drawn if d.bracket.upper >= 0.01 and d.bracket.lower <= 100.0]


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def ends(lower: float | None, upper: float | None, own: Bracket) -> str:
    """A peer's ends, in italics where one of them contradicts our bracket."""
    text = f"{figure(lower, 6)} … {figure(upper, 6)}"
    above = lower is not None and lower > own.upper
    below = upper is not None and upper < own.lower
    return f"*{text}*" if above or below else text


def cells_of_peer(answer: peers.Answer | None, own: Bracket) -> list[str]:
    """Ends, seconds and MB."""
    if answer is None:
        return ["not asked", "–", "–"]
    if answer.failure:
        return [answer.failure, "–", "–"]
    return [
        ends(answer.lower, answer.upper, own),
        figure(answer.seconds),
        figure(answer.megabytes),
    ]


def cells_of_pld(lower: peers.Answer | None, upper: peers.Answer | None, own: Bracket) -> list[str]:
    """Both ends, and the seconds and MB of the upper one alone."""
    if upper is None:
        return ["not asked", "–", "–"]
    if upper.failure:
        return [f"did not finish: {upper.failure}", "–", "–"]
    below = None if lower is None else lower.lower
    return [ends(below, upper.upper, own), figure(upper.seconds), figure(upper.megabytes)]


def ratio(found: Found, interval: float) -> float | None:
    """How many times longer dp_accounting took for its upper end than we did for both of ours."""
    upper = found.others.get(f"dp_accounting {interval:g} upper")
    if upper is None or upper.seconds is None:
        return None
    return 1e3 * upper.seconds / found.own.milliseconds


def own_table(all_found: Sequence[Found], memory: dict[str, float]) -> str:
    header = ["row", "δ", "bracket", "width", "ms", "width, coarse", "ms, coarse", "MB", "method"]
    rows = []
    for found in all_found:
        b, own = found.own.bracket, found.own
        rows.append([
            found.row.label,
            f"{found.row.delta:g}",
            f"{figure(b.lower, 8)} … {figure(b.upper, 8)}",
            figure(width(b), 2),
            figure(own.milliseconds),
            figure(width(own.coarse), 2),
            figure(own.coarse_milliseconds),
            figure(memory.get(found.row.key)),
            f"{b.method}, {b.direction}",
        ])  # fmt: skip
    return table(header, rows)


def pld_table(all_found: Sequence[Found]) -> str:
    header = ["row", "δ", "our width", "our ms"]
    for interval in (COARSE, FINE):
        header += [f"interval {interval:g}: ends", "s", "MB", "times ours"]
    rows = []
    for found in all_found:
        cells = [
            found.row.label,
            f"{found.row.delta:g}",
            figure(found.own.bracket.upper - found.own.bracket.lower, 2),
            figure(found.own.milliseconds),
        ]
        for interval in (COARSE, FINE):
            lower = found.others.get(f"dp_accounting {interval:g} lower")
            upper = found.others.get(f"dp_accounting {interval:g} upper")
            cells += cells_of_pld(lower, upper, found.own.bracket)
            cells.append(figure(ratio(found, interval)))
        rows.append(cells)
    return table(header, rows)


def prv_table(all_found: Sequence[Found]) -> str:
    header = ["row", "δ", "our bracket", "our ms"]
    header += ["Opacus: ends", "s", "MB", "prv_accountant: ends", "s", "MB"]
    rows = []
    for found in all_found:
        b = found.own.bracket
        cells = [found.row.label, f"{found.row.delta:g}", ends(b.lower, b.upper, b)]
        cells.append(figure(found.own.milliseconds))
        for name in ("opacus", "prv_accountant"):
            cells += cells_of_peer(found.others.get(name), b)
        rows.append(cells)
    return table(header, rows)


def sweep_table(counted: Sequence[Drawn]) -> str:
    rows = []
    for what, values, unit in (
        ("relative width", [d.width for d in counted], ""),
        ("time", [d.milliseconds for d in counted], " ms"),
    ):
        cells = [figure(quantile(values, share)) + unit for share in (0.5, 0.9, 0.99, 1.0)]
        rows.append([what, *cells])
    return table(["", "median", "90 %", "99 %", "largest"], rows)


def histogram_table(counted: Sequence[Drawn]) -> str:
    """How many widths lie in each decade, and how many times in each factor of two or so."""
    rows = []
    for label, values, edges in (
        ("width", [d.width for d in counted], [0.0, *(10.0**k for k in range(-7, 1))]),
        ("ms", [d.milliseconds for d in counted], [0.0, 5, 10, 20, 50, 100, 200, 500, 1000]),
    ):
        for low, high in itertools.pairwise([*edges, math.inf]):
            inside = sum(low <= v < high for v in values)
            if inside:
                share = f"{100 * inside / len(values):.1f} %"
                rows.append([f"{label} from {low:g} to {high:g}", f"{inside:,}", share])
    return table(["", "mechanisms", "share"], rows)


def extremes_table(drawn: Sequence[Drawn]) -> str:
    """The widest and the slowest of them, none hidden."""
    chosen = sorted(drawn, key=lambda d: -d.width)[:5]
    chosen += [d for d in sorted(drawn, key=lambda d: -d.milliseconds)[:5] if d not in chosen]
    rows = [
        [
            d.text,
            f"{figure(d.bracket.lower, 4)} … {figure(d.bracket.upper, 4)}",
            figure(d.width, 2),
            figure(d.milliseconds),
            d.bracket.reason or "–",
        ]
        for d in chosen
    ]
    return table(["the widest, then the slowest", "bracket", "width", "ms", "reason"], rows)


def draw(counted: Sequence[Drawn], target: Path) -> None:
    """Histograms of the widths and of the times, both axes of values logarithmic."""
    import matplotlib as mpl  # of the extra "demo"; only the full page needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    picture, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for place, values, label, limit in (
        (axes[0], [d.width for d in counted], "relative width of the bracket", 1e-3),
        (axes[1], [d.milliseconds for d in counted], "milliseconds", 50.0),
    ):
        shown = [max(v, 1e-8) for v in values]
        edges = np.geomspace(min(shown) * 0.99, max(shown) * 1.01, 41)
        place.hist(shown, bins=[float(x) for x in edges], color="#1f5fa8")
        place.axvline(limit, color="#c0392b", linestyle="--", label=f"{limit:g}")
        place.set_xscale("log")
        place.set_xlabel(label)
        place.set_ylabel("mechanisms")
        place.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(target, dpi=120)
    plt.close(picture)


def target_table(
    all_found: Sequence[Found],
    memory: dict[str, float],
    inverses: Sequence[tuple[str, str, float]],
    profiles: Sequence[tuple[str, float]],
) -> str:
    rows = []
    by_key = {found.row.key: found for found in all_found}
    if HEADLINE in by_key and (times := ratio(by_key[HEADLINE], FINE)) is not None:
        what = f"65 % row: dp_accounting's time at {FINE:g} over ours"
        rows.append(target_row(what, times, 1000, "times", most=False))
    single = [found.own for found in all_found if found.row.key != "1000"]
    if single:
        slowest = max(own.milliseconds for own in single)
        what = "slowest row of one mechanism, default tolerance"
        rows.append(target_row(what, slowest, 50, "ms"))
        middle = quantile([own.coarse_milliseconds for own in single], 0.5)
        rows.append(target_row("median of these rows at 1e-3 of ε", middle, 10, "ms"))
    if "1000" in by_key:
        taken = by_key["1000"].own.milliseconds
        rows.append(target_row("1,000 distinct sampled Gaussians", taken, 2000, "ms"))
    for text, answer, taken in inverses:
        rows.append(target_row(f"{text} ({answer})", taken, 200, "ms"))
    for text, taken in profiles:
        rows.append(target_row(text, taken, 100, "ms"))
    if memory:
        rows.append(target_row("most memory above imports", max(memory.values()), 300, "MB"))
    return table(["what", "figure", "target", "met"], rows)


def page_of(
    arguments: argparse.Namespace,
    all_found: Sequence[Found],
    memory: dict[str, float],
    targets: str,
    drawn: Sequence[Drawn],
) -> str:
    by_key = {found.row.key: found for found in all_found}
    parts = ["## The accountant"]
    if HEADLINE in by_key and (times := ratio(by_key[HEADLINE], FINE)) is not None:
        found = by_key[HEADLINE]
        upper = found.others[f"dp_accounting {FINE:g} upper"]
        parts.append(
            f"**65 % block, B 25, δ = 1e-5: both ends in {figure(found.own.milliseconds)} ms at a "
            f"relative width of {figure(width(found.own.bracket), 2)}; dp_accounting's upper end "
            f"alone, at interval {FINE:g}, takes {figure(upper.seconds)} s: {figure(times)} times "
            "as long in the same run.**"
        )
    kind = "A quick run" if arguments.quick else "One run"
    parts += [
        f"{kind} of `python -m bench.accounting` on {machine()}; one thread, warm processes. "
        f"A time of ours is the median of {arguments.repeats} questions, each new to the process, "
        "both directions together; the default tolerance is the smaller of 1e-3 and 1e-3 of ε, and "
        "“coarse” is 1e-3 of ε. MB are resident memory beyond the imports.",
        "### Figures and targets",
        targets,
        "### Brackets",
        own_table(all_found, memory),
    ]
    limits = (
        f"each question under limits of {arguments.seconds:g} s and {arguments.megabytes:,} MB "
        "of address space"
    )
    if "dp_accounting" in arguments.peers:
        parts += [
            "### Beside dp_accounting",
            "dp_accounting 0.6.0: the upper end by connect-the-dots, the lower by its optimistic "
            "distribution. Seconds and MB are those of the upper end alone (the lower takes as "
            f"much again); {limits}. *Italics*: an end contradicts the proven bracket.",
            pld_table(all_found),
        ]
    if {"opacus", "prv_accountant"} & set(arguments.peers):
        parts += [
            "### Beside the PRV accountants",
            "Opacus and prv_accountant, both asked for an ε error of 0.01 (Opacus' default) and "
            f"a δ error of a thousandth of δ; both know the direction “remove” alone; {limits}.",
            prv_table(all_found),
        ]
    counted = in_range(drawn)
    if counted:
        parts += [
            "### Random mechanisms",
            f"{len(drawn):,} random mechanisms, sensible or not, at the default tolerance (seed "
            f"{arguments.seed}; `bench.mechanisms.random_question` says how they are drawn), δ in "
            f"[1e-12, 1e-3]; {len(counted):,} have ε in [0.01, 100] and are counted here. The "
            f"slowest of all took {figure(max(d.milliseconds for d in drawn))} ms.",
            sweep_table(counted),
            histogram_table(counted),
            extremes_table(counted),
        ]
        if arguments.out is not None:
            parts.append(f"![Histograms of the relative widths and of the times]({PICTURE})")
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        wanted = tuple(x for x in text.split(",") if x)
        unknown = [x for x in wanted if x not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return wanted

    return read


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    keys = tuple(row.key for row in ROWS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--out", type=Path, help=f"the page to write, such as {PAGE}")
    parser.add_argument(
        "--rows", type=_names(keys), default=keys, help="by comma: " + ",".join(keys)
    )
    parser.add_argument("--peers", type=_names(PEERS), default=PEERS, help="by comma; '' for none")
    parser.add_argument("--peers-python", default=sys.executable, help="has Opacus, prv_accountant")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a peer's question")
    parser.add_argument("--megabytes", type=int, default=12_288, help="limit of a peer's question")
    parser.add_argument("--random", type=int, default=2000, help="random mechanisms; 0 for none")
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--quick", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.repeats = min(parsed.repeats, 5)
        parsed.random = min(parsed.random, 200)
    return parsed


def main() -> int:
    one_thread()
    arguments = parse()
    bounds.warm_up()
    rows = [row for row in ROWS if row.key in arguments.rows]
    memory = measure_memory(rows)
    # All of ours first: the processor is cool and nobody else's process runs.
    own = {}
    for row in rows:
        own[row.key] = measure_own(row, arguments.repeats)
        print(f"{row.label}, δ = {row.delta:g}: {own[row.key].milliseconds:.1f} ms", flush=True)
    inverses = measure_inverses(arguments.repeats)
    profiles = measure_profiles(arguments.repeats)
    drawn = sweep(arguments.random, arguments.seed)
    all_found = []
    for row in rows:
        print(f"{row.label}, δ = {row.delta:g}", flush=True)
        all_found.append(Found(row, own[row.key], ask_peers(row, arguments)))
    targets = target_table(all_found, memory, inverses, profiles)
    text = page_of(arguments, all_found, memory, targets, drawn)
    print(text)
    if arguments.out is not None:
        write_section(arguments.out, SECTION, text)
        if counted := in_range(drawn):
            draw(counted, arguments.out.parent / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
