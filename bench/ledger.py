"""The ledger's figures: what ``make bench-ledger`` runs.

    python -m bench.ledger [--out docs/benchmarks.md] [--part admission]

Each part writes a section of its own, ``ledger-<part>``, and leaves the others.

*admission*: how many releases the budget rule admits, beside basic composition, other families and
what no valid rule admits; and the search that the family's shares of delta were chosen by.

*rates*: how fast it reserves and verifies on PostgreSQL, beside hand-written SQL (minutes, and some
gigabytes of disk for a million entries).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from accounting import bounds
from accounting.bounds import Bracket
from accounting.filters import (
    DELTA_UNITS,
    EPSILON_UNITS,
    INFINITE_ORDER,
    ORDERS,
    Budget,
    FewLarge,
    Filter,
    FilterState,
    ManySmall,
    cap_of,
    charge,
    family,
    family_of,
    further_releases,
)
from accounting.mechanisms import Composition, Mechanism, mechanism_from_json
from bench.ledger_rates import rate_tables
from bench.mechanisms import FETA_PRO, dp_sgd, sampled
from bench.page import PAGE, figure, machine, one_thread, table, target_row, write_section

SECTION: Final = "ledger"
DELTA: Final = Decimal("1e-5")
EPSILONS: Final = (8, 2, 1)
EQUAL_ORDERS: Final = ("2", "4", "8", "16", "32")
# Where the shares of many_small were chosen, and which they are.
SEARCHED_EPSILONS: Final = ("0.5", "1", "2", "4", "8", "16", "30")
CHOSEN: Final = (25, 10, 65)
_MOST: Final = 1_000_000


@dataclass(frozen=True)
class Typical:
    """A release, or a plan, that is asked for again and again."""

    key: str
    label: str
    mechanism: Mechanism


def _composition(*parts: tuple[dict[str, Any], int]) -> dict[str, Any]:
    return {
        "kind": "composition",
        "parts": [{"mechanism": mechanism, "count": count} for mechanism, count in parts],
    }


_RUN: Final = dp_sgd(1 / 14, 14.78, 2100)
_BATCH: Final = sampled(5e-4, 1 / 1.769, 300)
_DECLARED: Final = {"kind": "approximate_dp", "epsilon": "0.1", "delta": "1e-8"}
TYPICAL: Final = tuple(
    Typical(key, label, mechanism_from_json(mechanism))
    for key, label, mechanism in (
        ("run", "DP-SGD run (q 1/14, σ 14.78, 2,100 steps)", _RUN),
        ("batch", "denoising batch (q 5e-4, μ 1.769, 300 outputs a class)", _BATCH),
        ("mix", "plan of one such run and 24 batches", _composition((_RUN, 1), (_BATCH, 24))),
        ("small batch", "batch of 30 outputs a class", sampled(5e-4, 1 / 1.769, 30)),
        ("rare run", "DP-SGD run (q 256/60,000, σ 1.1, 2,000 steps)", dp_sgd(256 / 6e4, 1.1, 2000)),
        ("counts", "noisy counts, σ 20", {"kind": "noisy_counts", "noise_multiplier": 20.0}),
        ("FETA-Pro", "FETA-Pro, three stages", FETA_PRO),
        (
            "declared",
            "run with a declared part (0.1, 1e-8)",
            _composition((_RUN, 1), (_DECLARED, 1)),
        ),
    )
)
SHOWN: Final = TYPICAL[:3]


# --------------------------------------------------------------------------------------------------
# Counting
# --------------------------------------------------------------------------------------------------


@functools.cache
def _epsilon(m: Mechanism, delta: float) -> Bracket:
    return bounds.epsilon(m, delta)


def most(fits: Callable[[int], bool], at_most: int = _MOST) -> int:
    """The largest n up to ``at_most`` with fits(n), which holds up to some n and not beyond; 0 if
    not even one fits."""
    low, high = 0, 1
    while high <= at_most and fits(high):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def admitted(family_: Sequence[Filter], m: Mechanism) -> int:
    """How many of the same release the rule admits one after the other."""
    costs = charge(m, family_, epsilon_bound=_epsilon)
    found = further_releases([FilterState(f, 0, 0) for f in family_], costs)
    if found is None:
        raise ValueError("a release that costs nothing is admitted for ever")
    return found


def order_inf(budget: Budget, delta_units: int, releases: int) -> Filter:
    cap_units = int(Fraction(budget.epsilon) * EPSILON_UNITS)
    return Filter(INFINITE_ORDER, delta_units, cap_units, delta_units // releases)


def basic(budget: Budget, m: Mechanism, delta_units: int) -> int:
    """What order inf admits by itself if it is prepared for just so many releases."""
    return most(lambda n: admitted([order_inf(budget, delta_units, n)], m) >= n)


def _whole(budget: Budget) -> int:
    return int(Fraction(budget.delta) * DELTA_UNITS)


def equal_split(budget: Budget, m: Mechanism) -> int:
    """The union over a few orders and inf, all with the same share of delta."""
    share = _whole(budget) // (len(EQUAL_ORDERS) + 1)
    finite = [Filter(a, share, cap_of(budget, a, share), 0) for a in EQUAL_ORDERS]
    return max(admitted(finite, m), basic(budget, m, share))


def best_order(budget: Budget, m: Mechanism) -> tuple[int, str]:
    """(how many, order): the one finite filter that admits most, with all of delta."""
    whole = _whole(budget)
    found = [(admitted([Filter(a, whole, cap_of(budget, a, whole), 0)], m), a) for a in ORDERS]
    return max(found, key=lambda pair: pair[0])


def along_the_path(budget: Budget, m: Mechanism) -> int:
    """What composing privacy-loss distributions would admit. Not a valid rule."""

    parts = [(p.mechanism, p.count) for p in m.parts] if isinstance(m, Composition) else [(m, 1)]

    def fits(n: int) -> bool:
        many = mechanism_from_json(_composition(*((dict(p.to_json()), n * k) for p, k in parts)))
        return bounds.epsilon(many, float(budget.delta)).upper <= budget.epsilon

    return most(fits)


# --------------------------------------------------------------------------------------------------
# The shares
# --------------------------------------------------------------------------------------------------


def _many_small(epsilon: str | int) -> Budget:
    return Budget(Decimal(epsilon), DELTA, ManySmall())


@functools.cache
def _in_hindsight(epsilon: str, t: Typical) -> int:
    """What the best single filter admits with all of delta, order inf among them."""
    budget = _many_small(epsilon)
    return max(best_order(budget, t.mechanism)[0], basic(budget, t.mechanism, _whole(budget)))


def mean_share(percents: tuple[int, int, int], epsilons: Sequence[str]) -> float:
    """The mean of releases admitted over what the best single filter admits in hindsight.

    Over the epsilons and the typical releases of which that admits at least one.
    """
    shares = [
        admitted(family_of(_many_small(epsilon), percents), t.mechanism) / best
        for epsilon in epsilons
        for t in TYPICAL
        if (best := _in_hindsight(epsilon, t))
    ]
    return sum(shares) / len(shares)


def search(step: int, epsilons: Sequence[str]) -> list[tuple[float, tuple[int, int, int]]]:
    """(mean share, split) of the best split for each share of order inf, in steps of ``step`` %."""
    found = []
    for infinite in range(step, 51, step):
        splits = [(infinite, g, 100 - infinite - g) for g in range(step, 100 - infinite, step)]
        found.append(max((mean_share(split, epsilons), split) for split in splits))
    return found


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def admission_rows(epsilon: int, chosen: Sequence[Typical]) -> list[list[str]]:
    budget = _many_small(epsilon)
    ours = family(budget)
    rows = []
    for t in chosen:
        single, order = best_order(budget, t.mechanism)
        rows.append([
            f"{epsilon}",
            t.label,
            f"{basic(budget, t.mechanism, _whole(budget)):,}",
            f"{equal_split(budget, t.mechanism):,}",
            f"{admitted(ours, t.mechanism):,}",
            f"{single:,} (α {order})" if single else "0",
            f"*{along_the_path(budget, t.mechanism):,}*",
        ])  # fmt: skip
    return rows


def few_large_rows(
    budgets: Sequence[tuple[int, int]], chosen: Sequence[Typical]
) -> list[list[str]]:
    """For each (epsilon, releases declared): each release's epsilon at delta, charge and number."""
    rows = []
    for epsilon, releases in budgets:
        ours = family(Budget(Decimal(epsilon), DELTA, FewLarge(releases)))
        for t in chosen:
            (cost, *_) = charge(t.mechanism, ours, epsilon_bound=_epsilon)
            rows.append([
                f"({epsilon}, {float(DELTA):g}), {releases}",
                t.label,
                figure(_epsilon(t.mechanism, float(DELTA)).upper),
                f"({figure(cost.epsilon_units / EPSILON_UNITS)}, "
                f"{figure(cost.delta_units / DELTA_UNITS)})",
                f"{admitted(ours, t.mechanism):,}",
            ])  # fmt: skip
    return rows


def shares_rows(step: int, epsilons: Sequence[str]) -> list[list[str]]:
    rows = []
    for share, split in search(step, epsilons):
        eight = family_of(_many_small(8), split)
        counts = [f"{admitted(eight, t.mechanism):,}" for t in SHOWN]
        text = " / ".join(f"{p}" for p in split)
        rows.append([f"**{text}**" if split == CHOSEN else text, figure(share), *counts])
    return rows


def target_rows() -> list[list[str]]:
    eight, one = family(_many_small(8)), family(Budget(Decimal(1), DELTA, FewLarge(1)))
    run, batch = (t.mechanism for t in SHOWN[:2])
    return [
        target_row(
            "DP-SGD runs at (8, 1e-5), many_small", admitted(eight, run), 45, "", most=False
        ),
        target_row(
            "batches at (8, 1e-5), many_small", admitted(eight, batch), 1000, "", most=False
        ),
        target_row("batches at (1, 1e-5), few_large, one", admitted(one, batch), 1, "", most=False),
    ]


_COUNTS = """How many of the same release are admitted one after the other, at δ = 1e-5. Basic
composition gives all of δ to order ∞, in the number of parts that admits most; likewise order ∞'s
share in the union with equal shares. The best single order is of the family's list, with all of δ,
and known only in hindsight. *Along the path*: the tight ε of all releases composed as if fixed in
advance. Under adaptive requests that is not a valid rule ([ledger.md](ledger.md), “The adversary”);
it is information only."""

_SHARES = """The mean, over {releases} and over ε = {epsilons}, of the number admitted over what the
best single filter (∞ included) admits in hindsight. For each share of order ∞ the best split of the
rest, in steps of {step} %, and what it admits at ε = 8. In bold the chosen one: the best with at
most a quarter for order ∞, as most of δ is for the finite orders."""


def admission_tables(step: int = 5) -> str:
    """The part *admission*: its tables with what they show, as Markdown.

    The search for the shares goes in steps of ``step`` percent, which divides 50.
    """
    equal = f"union over {{{', '.join(EQUAL_ORDERS)}, ∞}}, equal δ"
    header = ["ε", "release", "basic composition", equal, "`many_small`", "best single order"]
    few = ["budget, releases", "release", "its ε at 1e-5", "charged at order ∞", "admitted"]
    split = ["δ in %: ∞ / Gaussian / subsampled", "mean share", *(t.key for t in SHOWN)]
    shares = _SHARES.format(
        releases="; ".join(t.label for t in TYPICAL),
        epsilons=", ".join(SEARCHED_EPSILONS),
        step=step,
    )
    parts = [
        "## How much the budget rule admits",
        f"One run of `python -m bench.ledger --part admission` on {machine()}. "
        "Counts do not depend on the machine.",
        table(["what", "figure", "target", "met"], target_rows()),
        _COUNTS.replace("\n", " "),
        table(
            [*header, "*along the path (inadmissible)*"],
            [row for epsilon in EPSILONS for row in admission_rows(epsilon, SHOWN)],
        ),
        "`few_large`, with as many releases declared as nats:",
        table(few, few_large_rows([(1, 1), (2, 2), (8, 8)], SHOWN[:2])),
        "### The shares of `many_small`",
        shares.replace("\n", " "),
        table(split, shares_rows(step, SEARCHED_EPSILONS)),
    ]
    return "\n\n".join(parts)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "admission": admission_tables,
    "rates": rate_tables,
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--out", type=Path, help=f"the page to write, such as {PAGE}")
    parser.add_argument("--part", choices=PARTS, action="append", help="by default all of them")
    return parser.parse_args(arguments)


def main() -> int:
    one_thread()
    arguments = parse()
    bounds.warm_up()
    for part in arguments.part or PARTS:
        text = PARTS[part]()
        print(text)
        if arguments.out is not None:
            write_section(arguments.out, f"{SECTION}-{part}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
