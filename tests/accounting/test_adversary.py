"""An adaptive adversary against the budget rule, by exact computation over the whole tree.

A requester picks each next release from the outputs of the earlier ones. Every release here has
finitely many outputs with rational probabilities, so for a rule of admission the hockey-stick
divergence sum max(0, P - e^epsilon Q) of the full transcript under the *worst* adversary is found
by dynamic programming over all of its strategies, in rational numbers: e^epsilon is replaced by a
bound below it where the divergence must not be understated, and by one above it otherwise.

The rule under test is the project's own: costs by ``filters.charge``, admission by
``filters.admitting``, filters by ``filters.family``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import pytest

import accounting
from accounting import cumulants, mechanism_from_json
from accounting.filters import (
    DELTA_UNITS,
    EPSILON_UNITS,
    INFINITE,
    Budget,
    Cost,
    FewLarge,
    Filter,
    FilterState,
    ManySmall,
    Use,
    admitting,
    charge,
    family,
)
from accounting.mechanisms import Mechanism

# -- releases with few outputs ---------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """A mechanism as it is charged, and what it really is.

    Attributes:
        charged: what the ledger is told.
        epsilon, delta: what that says of it.
        outputs: the probabilities (P, Q) of each output on the two datasets.
    """

    charged: Mechanism
    epsilon: Decimal
    delta: Decimal
    outputs: tuple[tuple[Fraction, Fraction], ...]

    def mirrored(self) -> Release:
        swapped = tuple((q, p) for p, q in self.outputs)
        return Release(self.charged, self.epsilon, self.delta, swapped)


def exp_below(x: Decimal) -> Fraction:
    """A rational number at most e^x, and within 1e-14 of it, for 0 <= x <= 3."""
    total = sum(Fraction(x) ** k / math.factorial(k) for k in range(40))
    return Fraction(math.floor(total * 10**15), 10**15)


def exp_above(x: Decimal) -> Fraction:
    return exp_below(x) + Fraction(1, 10**14)


def log_above(odds: Fraction) -> Decimal:
    """A decimal a little above log odds, as a client would write it."""
    return Decimal(math.ceil(math.log(odds) * 10**11 + 0.01)).scaleb(-11)


def declared(epsilon: Decimal, delta: Decimal = Decimal(0)) -> Mechanism:
    return mechanism_from_json(
        {"kind": "approximate_dp", "epsilon": str(epsilon), "delta": str(delta)}
    )


def response(odds: Fraction, kind: str = "approximate_dp") -> Release:
    """Randomised response: the right answer ``odds`` times as often as the wrong one."""
    epsilon = log_above(odds)
    charged = mechanism_from_json({"kind": kind, "epsilon": str(epsilon)})
    right, wrong = odds / (1 + odds), 1 / (1 + odds)
    return Release(charged, epsilon, Decimal(0), ((right, wrong), (wrong, right)))


def lopsided(up: Fraction, down: Fraction) -> Release:
    """Two outputs, one of ratio P/Q = ``up`` and one of ratio 1/``down``."""
    epsilon = log_above(max(up, down))
    first = (1 - 1 / down) / (1 - 1 / (up * down))
    second = 1 - first
    outputs = ((first, first / up), (second, second * down))
    return Release(declared(epsilon), epsilon, Decimal(0), outputs)


def geometric(step: Fraction) -> Release:
    """A position, 0 or 2, with two-sided geometric noise (the discrete Laplace), clamped to 0 .. 2.

    A step further out is ``step`` times as rare, so the ratios are step^2, 1 and step^-2.
    """

    def law(at: int) -> tuple[Fraction, Fraction, Fraction]:
        a = 1 / step
        return a**at / (1 + a), (1 - a) / (1 + a) * a, a ** (2 - at) / (1 + a)

    epsilon = log_above(step**2)
    outputs = tuple(zip(law(2), law(0), strict=True))
    return Release(declared(epsilon), epsilon, Decimal(0), outputs)


TINY = Decimal("1e-9")  # the ledger knows no declared release of epsilon 0


def leak(delta: Decimal) -> Release:
    """Tells the dataset with probability delta, and nothing otherwise."""
    d = Fraction(delta)
    outputs = ((d, Fraction(0)), (Fraction(0), d), (1 - d, 1 - d))
    return Release(declared(TINY, delta), TINY, delta, outputs)


# -- the tree --------------------------------------------------------------------------------------

State = tuple[int, ...]
# From a state, the releases (by their index in the menu) that are admitted, and what follows each.
Rule = Callable[[State], Iterable[tuple[int, State]]]


def divergence(outputs: Iterable[tuple[Fraction, Fraction]], threshold: Fraction) -> Fraction:
    return sum((max(Fraction(0), p - threshold * q) for p, q in outputs), Fraction(0))


def worst(menu: Sequence[Release], rule: Rule, start: State, threshold: Fraction) -> Fraction:
    """The divergence of the transcript under the worst of all adaptive adversaries.

    A node is what was admitted so far and r = P/Q of what was seen. Its value, per unit of Q, is
    (r - threshold)+ if the adversary stops, else the largest sum over a release's outputs; an
    output that Q cannot show adds all of its P, one that P cannot show adds nothing.
    """

    @functools.cache
    def follow(state: State) -> tuple[tuple[int, State], ...]:
        return tuple(rule(state))

    @functools.cache
    def value(state: State, r: Fraction) -> Fraction:
        best = max(Fraction(0), r - threshold)
        for i, after in follow(state):
            total = Fraction(0)
            for p, q in menu[i].outputs:
                if q == 0:
                    total += r * p
                elif p != 0:
                    total += q * value(after, r * p / q)
            best = max(best, total)
        return best

    return value(start, Fraction(1))


def one_more(counts: State, i: int) -> State:
    return (*counts[:i], counts[i] + 1, *counts[i + 1 :])


def total_state(f: Filter, costs: Sequence[Cost], counts: State) -> FilterState:
    """What a filter has seen after so many of each release."""
    seen = [(n, c) for n, c in zip(counts, costs, strict=True) if n]
    finite = [(n, c) for n, c in seen if INFINITE not in (c.epsilon_units, c.delta_units)]
    return FilterState(
        f,
        sum(n * c.epsilon_units for n, c in finite),
        sum(n * c.delta_units for n, c in finite),
        crossed=len(finite) < len(seen),
    )


def union_of(menu: Sequence[Release], filters: Sequence[Filter]) -> Rule:
    """The project's rule over these filters; a state says how many of each release there are."""
    costs = [charge(m.charged, filters, epsilon_bound=accounting.epsilon) for m in menu]

    def rule(counts: State) -> Iterable[tuple[int, State]]:
        states = [total_state(f, [c[j] for c in costs], counts) for j, f in enumerate(filters)]
        for i in range(len(menu)):
            if admitting(states, costs[i]):
                yield i, one_more(counts, i)

    return rule


def composed(menu: Sequence[Release], counts: State, threshold: Fraction) -> Fraction:
    """The divergence of so many of each release as if all had been fixed in advance."""
    law = {Fraction(1): Fraction(1)}  # P/Q of an outcome: its Q
    certain = Fraction(0)  # P of what Q cannot show
    for m, n in zip(menu, counts, strict=True):
        for _ in range(n):
            after: dict[Fraction, Fraction] = {}
            certain += sum((p for p, q in m.outputs if q == 0), Fraction(0)) * sum(
                r * mass for r, mass in law.items()
            )
            for r, mass in law.items():
                for p, q in m.outputs:
                    if p != 0 and q != 0:
                        after[r * p / q] = after.get(r * p / q, Fraction(0)) + mass * q
            law = after
    return certain + divergence(((r * mass, mass) for r, mass in law.items()), threshold)


def composing_along_the_path(menu: Sequence[Release], delta: Fraction, threshold: Fraction) -> Rule:
    """The natural filter: admits while the composition of the path's releases keeps delta."""
    mirror = [m.mirrored() for m in menu]

    def rule(counts: State) -> Iterable[tuple[int, State]]:
        for i in range(len(menu)):
            after = one_more(counts, i)
            if max(composed(side, after, threshold) for side in (menu, mirror)) <= delta:
                yield i, after

    return rule


# -- the games -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Game:
    """A budget, and the releases that the adversary may choose from."""

    budget: Budget
    menu: tuple[Release, ...]

    @property
    def start(self) -> State:
        return (0,) * len(self.menu)

    @property
    def delta(self) -> Fraction:
        return Fraction(self.budget.delta)

    def worst(self, rule: Rule) -> Fraction:
        """At least the worst divergence at e^epsilon, over both directions."""
        below = exp_below(self.budget.epsilon)
        sides = (self.menu, tuple(m.mirrored() for m in self.menu))
        return max(worst(side, rule, self.start, below) for side in sides)

    def surely(self, rule: Rule) -> Fraction:
        """At most the worst divergence at e^epsilon."""
        return worst(self.menu, rule, self.start, exp_above(self.budget.epsilon))


def units(n: int) -> Decimal:
    return Decimal(n) / DELTA_UNITS


def game(base: Fraction, length: int, powers: Sequence[int], delta: str, use: Use) -> Game:
    """e^epsilon a little above base^length; responses of odds base^k; leaks of three sizes."""
    budget = Budget(log_above(base**length), Decimal(delta), use)
    share = family(budget)[0].delta_units
    menu = [
        *(response(base**k) for k in powers),
        *(leak(d) for d in (units(share), units(share // 2), budget.delta)),
    ]
    return Game(budget, tuple(menu))


def with_others(g: Game, base: Fraction, k: int) -> Game:
    """The same with a release of each other kind."""
    others = (
        lopsided(base ** (2 * k), base**k),
        geometric(base**k),
        response(base ** (3 * k), "randomized_response"),
    )
    return Game(g.budget, g.menu + others)


BASE = Fraction(11, 10)
GAMES = {
    "a few responses of odds 2": game(Fraction(2), 3, (1, 2), "0.1", ManySmall()),
    "small steps": game(BASE, 10, (1, 2, 4), "0.01", ManySmall()),
    "a large delta": game(BASE, 10, (2, 5), "0.1", ManySmall()),
    "a larger budget": game(Fraction(5, 4), 9, (1, 2), "0.001", ManySmall()),
    "few_large, one": game(BASE, 10, (2, 5), "0.01", FewLarge(1)),
    "few_large, three": game(Fraction(5, 4), 9, (1, 2), "0.01", FewLarge(3)),
    "all kinds": with_others(game(BASE, 10, (2, 5), "0.1", ManySmall()), BASE, 2),
}
EACH = pytest.mark.parametrize("g", GAMES.values(), ids=GAMES.keys())


@EACH
def test_each_release_is_what_it_is_charged_as(g: Game) -> None:
    for m in g.menu:
        for side in (m.outputs, m.mirrored().outputs):
            assert sum(p for p, _ in side) == 1
            assert divergence(side, exp_below(m.epsilon)) <= Fraction(m.delta)


@EACH
def test_the_union_of_filters_keeps_the_budget(g: Game) -> None:
    reached = g.worst(union_of(g.menu, family(g.budget)))
    assert reached <= g.delta
    # the adversary is no straw man: it gets all of order inf's share at least
    assert reached >= Fraction(family(g.budget)[0].delta_units, DELTA_UNITS)


@EACH
def test_each_filter_alone_keeps_its_share(g: Game) -> None:
    """Step 1 of the proof."""
    for f in family(g.budget):
        alone = g.worst(union_of(g.menu, [f]))
        assert alone <= Fraction(f.delta_units, DELTA_UNITS)


# -- rules that are wrong --------------------------------------------------------------------------


def all_of_delta_each(budget: Budget) -> tuple[Filter, ...]:
    """The family with every filter's share raised to the whole of delta."""
    whole = int(Fraction(budget.delta) * DELTA_UNITS)
    raised = []
    for f in family(budget):
        cap = f.cap_units
        if f.order != "inf":
            price = cumulants.conversion(float(f.order), math.log(budget.delta))
            cap = math.floor((Fraction(budget.epsilon) - Fraction(price)) * EPSILON_UNITS)
        raised.append(Filter(f.order, whole, cap, f.delta_per_release_units))
    return tuple(raised)


def test_without_shares_of_delta_the_union_is_broken() -> None:
    for name, at_least in (
        ("small steps", "1.55"),
        ("a large delta", "1.2"),
        ("a larger budget", "1.55"),
    ):
        g = GAMES[name]
        broken = g.surely(union_of(g.menu, all_of_delta_each(g.budget)))
        assert broken > Fraction(at_least) * g.delta


def forgetful(menu: Sequence[Release], filters: Sequence[Filter]) -> tuple[Rule, State]:
    """Wrong: a filter counts only the releases that it was the first to admit."""
    n = len(menu)
    costs = [charge(m.charged, filters, epsilon_bound=accounting.epsilon) for m in menu]

    def rule(counts: State) -> Iterable[tuple[int, State]]:
        states = [
            total_state(f, [c[j] for c in costs], counts[j * n : (j + 1) * n])
            for j, f in enumerate(filters)
        ]
        for i in range(n):
            if found := admitting(states, costs[i]):
                yield i, one_more(counts, found[0] * n + i)

    return rule, (0,) * (n * len(filters))


def test_filters_that_forget_what_others_admitted_are_broken() -> None:
    g = game(Fraction(2), 3, (1,), "0.1", ManySmall())
    rule, start = forgetful(g.menu, family(g.budget))
    broken = worst(g.menu, rule, start, exp_above(g.budget.epsilon))
    assert broken > 2 * g.delta


# -- composing along the path ----------------------------------------------------------------------


def natural(g: Game) -> Rule:
    return composing_along_the_path(g.menu, g.delta, exp_below(g.budget.epsilon))


def test_composing_along_the_path_is_broken_by_a_simple_adversary() -> None:
    """Budget (ln 8, 1/10). Three responses of odds 2; then two more if all three said the same,
    else a leak of 1/10. Either path composes to at most 1/10; together they reach 137/810.
    """
    odds_2, tell = response(Fraction(2)), leak(Decimal("0.1"))
    g = Game(Budget(log_above(Fraction(8)), Decimal("0.1"), ManySmall()), (odds_2, tell))
    below, above = exp_below(g.budget.epsilon), exp_above(g.budget.epsilon)
    assert 8 <= below <= above < 8 + Fraction(1, 10**9)
    # the compositions of the two paths, as if fixed in advance, are within the budget
    on_the_path = [(3, 1), (5, 0)]
    assert [composed(g.menu, c, Fraction(8)) for c in on_the_path] == [
        Fraction(1, 10),
        Fraction(8, 81),
    ]
    for counts in on_the_path:
        assert composed(g.menu, counts, below) <= g.delta
        # and the project's accountant says the same of them
        parts = [
            {"mechanism": m.charged.to_json(), "count": n}
            for m, n in zip(g.menu, counts, strict=True)
            if n
        ]
        both = mechanism_from_json({"kind": "composition", "parts": parts})
        bracket = accounting.delta(both, float(g.budget.epsilon))
        exact = float(composed(g.menu, counts, Fraction(8)))
        assert bracket.lower == pytest.approx(exact, rel=1e-6)
        assert bracket.upper == pytest.approx(exact, rel=1e-6)

    def chosen(path: tuple[int, ...], seen: tuple[int, ...]) -> int | None:
        if len(path) < 3:
            return 0
        if seen[:3] == (0, 0, 0):
            return 0 if len(path) < 5 else None
        return 1 if len(path) == 3 else None

    leaves = list(transcripts(g, chosen, natural(g)))
    assert sum(p for p, _ in leaves) == sum(q for _, q in leaves) == 1
    assert divergence(leaves, Fraction(8)) == Fraction(137, 810)
    assert divergence(leaves, above) > Fraction("1.69") * g.delta
    # no other adversary does better with these two
    assert worst(g.menu, natural(g), g.start, Fraction(8)) == Fraction(137, 810)
    # the project's rule refuses it on the way
    with pytest.raises(LookupError):
        list(transcripts(g, chosen, union_of(g.menu, family(g.budget))))


def transcripts(
    g: Game, chosen: Callable[[tuple[int, ...], tuple[int, ...]], int | None], rule: Rule
) -> Iterable[tuple[Fraction, Fraction]]:
    """(P, Q) of each full transcript of an adversary that sees its path and the outputs so far.

    Raises:
        LookupError: it asks for what the rule refuses.
    """
    todo: list[tuple[tuple[int, ...], tuple[int, ...], Fraction, Fraction]]
    todo = [((), (), Fraction(1), Fraction(1))]
    while todo:
        path, seen, p, q = todo.pop()
        i = chosen(path, seen)
        if i is None:
            yield p, q
            continue
        counts = tuple(path.count(k) for k in range(len(g.menu)))
        if i not in [k for k, _ in rule(counts)]:
            raise LookupError(path)
        for y, (a, b) in enumerate(g.menu[i].outputs):
            todo.append(((*path, i), (*seen, y), p * a, q * b))


@pytest.mark.parametrize(
    ("g", "at_least"),
    [
        (game(BASE, 10, (2, 5), "0.01", ManySmall()), "1.75"),
        # randomised responses alone are enough
        (Game(GAMES["a large delta"].budget, tuple(response(BASE**k) for k in (2, 5))), "1.10"),
    ],
    ids=["responses and leaks", "responses alone"],
)
def test_composing_along_the_path_does_not_keep_the_budget(g: Game, at_least: str) -> None:
    broken = g.surely(natural(g))
    assert broken > Fraction(at_least) * g.delta
    # the same adversaries stay within the budget under the union
    assert g.worst(union_of(g.menu, family(g.budget))) <= g.delta
