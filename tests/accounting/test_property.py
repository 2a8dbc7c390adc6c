"""Random mechanisms: every bracket against ball arithmetic, and how wide it is."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from decimal import Decimal

import pytest

import accounting
from accounting import rigorous
from accounting.bounds import Bracket
from accounting.mechanisms import (
    ApproximateDP,
    Composition,
    Gaussian,
    Laplace,
    Mechanism,
    Part,
    RandomizedResponse,
    SubsampledGaussian,
)

SECONDS = 1.0  # of ball arithmetic, for one end of one bracket
SHARP = 1e-2  # the relative width of delta that it must reach in this time, or another is drawn
WIDEST = 1e-3  # of epsilon, where 0.01 <= epsilon <= 100 and delta >= 1e-12


def power(draw: random.Random, low: float, high: float) -> float:
    """Log-uniform, to six digits."""
    return float(f"{10.0 ** draw.uniform(math.log10(low), math.log10(high)):.6g}")


def sampled(draw: random.Random, most: float = 1e6) -> Mechanism:
    q = power(draw, 1e-6, 1.0) if draw.random() < 0.85 else 1.0 - power(draw, 1e-9, 0.3)
    return SubsampledGaussian(q, power(draw, 0.1, 33.0), int(power(draw, 1.0, most)))


def part(draw: random.Random) -> Mechanism:
    kind = draw.randrange(6)
    count = int(power(draw, 1.0, 1000.0))
    if kind == 0:
        return Gaussian(power(draw, 0.3, 33.0), count)
    if kind == 1:
        return Laplace(power(draw, 0.2, 100.0), count)
    if kind == 2:
        return RandomizedResponse(Decimal(str(power(draw, 0.01, 3.0))), count)
    if kind == 3:
        delta = draw.choice(["0", "1e-13", "1e-9"])
        return ApproximateDP(Decimal(str(power(draw, 0.01, 1.0))), Decimal(delta), count)
    return sampled(draw, 1e4)


def mechanism(draw: random.Random) -> Mechanism:
    kind = draw.random()
    if kind < 0.7:
        return sampled(draw)
    if kind < 0.8:
        return part(draw)
    return Composition(tuple(Part(part(draw), 1) for _ in range(draw.choice([2, 3]))))


@dataclass(frozen=True)
class Case:
    """A mechanism with its bracket, and ball arithmetic's delta at the two ends."""

    seed: int
    mechanism: Mechanism
    delta: float
    bracket: Bracket
    at_lower: tuple[float, float]
    at_upper: tuple[float, float]

    def is_enclosed(self) -> bool:
        """Whether ball arithmetic is close enough at both ends to tell a wrong bracket."""
        return all(up - low <= SHARP * up for low, up in (self.at_lower, self.at_upper))

    def is_wrong(self) -> bool:
        return self.at_upper[0] > self.delta or self.at_lower[1] < self.delta

    def is_wide(self) -> bool:
        b = self.bracket
        if not 0.01 <= b.upper <= 100.0:
            return False
        return b.upper - b.lower > WIDEST * b.upper


def case(seed: int) -> Case:
    draw = random.Random(seed)  # noqa: S311 - an example, not a secret
    m, delta = mechanism(draw), power(draw, 1e-12, 1e-3)
    b = accounting.epsilon(m, delta)
    at_lower = at_upper = (delta, delta)  # an infinite upper or a zero lower end can't be wrong
    if b.upper < math.inf:
        at_upper = rigorous.delta_enclosure(m, b.upper, width=SHARP, seconds=SECONDS)
    if 0.0 < b.lower < math.inf:
        at_lower = rigorous.delta_enclosure(m, b.lower, width=SHARP, seconds=SECONDS)
    elif b.lower == math.inf:
        # delta lies below the probability that a part gives up, whatever epsilon is.
        at_lower = rigorous.delta_enclosure(m, 1e6, width=SHARP, seconds=SECONDS)
    return Case(seed, m, delta, b, at_lower, at_upper)


def check(first: int, wanted: int) -> None:
    """Draws until ``wanted`` cases are enclosed; those that were too big are checked as well."""
    enclosed, drawn = 0, 0
    wrong: list[Case] = []
    wide: list[Case] = []
    while enclosed < wanted:
        found = case(first + drawn)
        drawn += 1
        enclosed += found.is_enclosed()
        assert 0.0 <= found.bracket.lower <= found.bracket.upper, found
        if found.is_wrong():
            wrong.append(found)
        if found.is_wide():
            wide.append(found)
        assert drawn <= 1.5 * wanted + 20, f"ball arithmetic enclosed {enclosed} of {drawn}"
    assert not wrong, wrong
    assert not wide, wide


def test_random_brackets() -> None:
    check(1_000_000, 300)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_random_brackets(block: int) -> None:
    check(2_000_000 + 10_000 * block, 500)
