"""Exact (epsilon, delta) curves of single outputs and of repeated randomised response.

**One output of the sampled Gaussian** (Balle, Barthe and Gaboardi 2018, theorem 2). With
Q = (1 - q) P + q P' and gamma = exp(epsilon) >= 1, the remove direction is

    sup over E of Q(E) - gamma P(E) = q delta_mu(x),   exp(x) = 1 + (gamma - 1)/q,

delta_mu the Gaussian curve. It is the worse direction: for every event E, with P and P' exchanged
by their reflection,

    P(E) - gamma Q(E) = [q P(E) - (gamma - 1 + q) P'(E)] - (1 - q)(gamma - 1)(P(E) - P'(E)),

and at the best E for the left side, a set where P/P' is large, P(E) >= P'(E).

**One Laplace output:** delta = 1 - exp((epsilon - rate)/2) up to epsilon = rate.

**Randomised responses:** S = sum of (n - 2k) eps0 with binomial probabilities, k flipped answers,
so delta = sum of pmf (1 - exp(epsilon - S)) over S > epsilon: positive terms only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from scipy.special import gammaln

from accounting import gaussian_dp
from accounting.mechanisms import ApproximateDPTerm, GaussianTerm, LaplaceTerm, Term
from accounting.rounding import SLACK, U

MAX_SUMS: Final = 4_000  # of losses of randomised responses
_LOUDEST: Final = 8  # single outputs that are looked at for a lower bound


@dataclass(frozen=True)
class Exact:
    """An enclosure of the exact value, the direction it belongs to, and the formula's name."""

    lower: float
    upper: float
    direction: Literal["remove", "both"]
    method: Literal["closed_form", "gaussian_dp_closed_form", "randomized_response"]


def epsilon_bounds(terms: Sequence[Term], delta: float) -> Exact | None:
    """epsilon at delta in (0, 1) if the terms (without deltas of their own) have a closed form."""
    gaussians = _all_unsampled(terms)
    if gaussians:
        mu = gaussian_dp.total_mu(gaussians)
        return Exact(*gaussian_dp.epsilon_bounds(mu, delta), "both", "gaussian_dp_closed_form")
    term = _only(terms)
    if isinstance(term, GaussianTerm):
        return Exact(*_sampled_epsilon(term, delta), "remove", "closed_form")
    if isinstance(term, LaplaceTerm):
        lower, upper = _laplace_epsilon(term, delta)
        return Exact(lower, upper, "both", "closed_form")
    responses = _all_responses(terms)
    if responses is not None:
        below, above = (_Responses(responses, up=up) for up in (False, True))
        return Exact(below.epsilon(delta), above.epsilon(delta), "both", "randomized_response")
    return None


def delta_bounds(terms: Sequence[Term], epsilon: float) -> Exact | None:
    """delta at epsilon >= 0 if the terms (without deltas of their own) have a closed form."""
    gaussians = _all_unsampled(terms)
    if gaussians:
        mu = gaussian_dp.total_mu(gaussians)
        return Exact(*gaussian_dp.delta_bounds(mu, epsilon), "both", "gaussian_dp_closed_form")
    term = _only(terms)
    if isinstance(term, GaussianTerm):
        return Exact(*_sampled_delta(term, epsilon), "remove", "closed_form")
    if isinstance(term, LaplaceTerm):
        gap = 0.5 * (term.inverse_scale - epsilon)
        slack = SLACK * (term.inverse_scale + epsilon)
        lower, upper = (max(0.0, -math.expm1(-max(0.0, gap + s))) for s in (-slack, slack))
        return Exact(lower * (1.0 - SLACK), min(1.0, upper * (1.0 + SLACK)), "both", "closed_form")
    responses = _all_responses(terms)
    if responses is not None:
        below, above = (_Responses(responses, up=up) for up in (False, True))
        return Exact(below.delta(epsilon), above.delta(epsilon), "both", "randomized_response")
    return None


def top_bounds(terms: Sequence[Term], delta: float) -> tuple[float, float] | None:
    """Bounds on epsilon at delta where every loss is bounded: Laplace and pure-DP parts.

    S is at most its largest value s, which it takes with probability p = prod 1/2 (Laplace) and
    1/(1 + e^-eps0): delta(eps) >= p (1 - e^(eps - s)), so epsilon >= s + log(1 - delta/p).
    """
    largest, log_p = [], []
    for term in terms:
        if isinstance(term, LaplaceTerm):
            largest.append(term.count * term.inverse_scale)
            log_p.append(term.count * math.log(0.5))
        elif isinstance(term, ApproximateDPTerm):
            e = float(term.epsilon)
            largest.append(term.count * e)
            log_p.append(-term.count * math.log1p(math.exp(-e)))
        else:
            return None
    top = math.fsum(largest)
    share = delta * math.exp(min(-math.fsum(log_p) * (1.0 + SLACK) + SLACK, 700.0)) * (1.0 + SLACK)
    low = top * (1.0 - SLACK) + math.log1p(-share) * (1.0 + SLACK) if share < 1.0 else 0.0
    return max(0.0, low), top * (1.0 + SLACK)


def least_epsilon(terms: Sequence[Term], delta: float) -> float:
    """A lower bound on epsilon at delta: the largest of some sub-compositions'.

    Whoever sees all outputs sees some of them, so no sub-composition has the larger curve.
    """
    ends = [0.0]
    for some in _sub_compositions(terms):
        exact = epsilon_bounds(some, delta)
        ends.append(0.0 if exact is None else exact.lower)
    top = top_bounds(_bounded(terms), delta)
    return max(*ends, 0.0 if top is None else top[0])


def least_delta(terms: Sequence[Term], epsilon: float) -> float:
    """A lower bound on delta at epsilon: the largest of some sub-compositions'."""
    ends = [0.0]
    for some in _sub_compositions(terms):
        exact = delta_bounds(some, epsilon)
        ends.append(0.0 if exact is None else exact.lower)
    return max(ends)


def whole_parts(terms: Sequence[Term]) -> list[frozenset[int]]:
    """The places of sub-compositions that have a closed form, each term in or out with its count.

    All randomised responses, all unsampled Gaussians, all bounded losses, and each single output.
    """
    kinds: list[list[int]] = [[], [], []]
    found = set()
    for i, term in enumerate(terms):
        if isinstance(term, ApproximateDPTerm):
            kinds[0].append(i)
        elif isinstance(term, GaussianTerm) and term.sampling_probability == 1.0:
            kinds[1].append(i)
        elif term.count == 1:
            found.add(frozenset((i,)))
        if not isinstance(term, GaussianTerm):
            kinds[2].append(i)
    found |= {frozenset(places) for places in kinds if places}
    return sorted(found, key=sorted)


def _bounded(terms: Sequence[Term]) -> list[Term]:
    return [term for term in terms if not isinstance(term, GaussianTerm)]


def _sub_compositions(terms: Sequence[Term]) -> list[tuple[Term, ...]]:
    """Sub-compositions with a closed form: what is alike together, and the worst single outputs."""
    found = [tuple(terms[i] for i in sorted(places)) for places in whole_parts(terms)]
    singles = [replace(term, count=1) for term in terms]
    # Of many outputs those with the largest losses, and those that lose most often.
    for rank in (_size, _share):
        found += [(term,) for term in sorted(singles, key=rank, reverse=True)[:_LOUDEST]]
    responses = [term for term in terms if isinstance(term, ApproximateDPTerm)]
    found += [
        (replace(term, count=min(term.count, MAX_SUMS - 1)),) for term in responses[:_LOUDEST]
    ]
    return list(dict.fromkeys(found))


def _size(term: Term) -> float:
    """Orders single outputs by how large their losses are."""
    if isinstance(term, GaussianTerm):
        return term.mu
    return term.inverse_scale if isinstance(term, LaplaceTerm) else float(term.epsilon)


def _share(term: Term) -> float:
    """Orders single outputs by how often they lose anything."""
    size = math.tanh(0.5 * _size(term))
    return size * term.sampling_probability if isinstance(term, GaussianTerm) else size


def _only(terms: Sequence[Term]) -> Term | None:
    """The one term, if there is one and it has a closed form."""
    if len(terms) != 1:
        return None
    term = terms[0]
    return term if term.count == 1 and not isinstance(term, ApproximateDPTerm) else None


def _all_unsampled(terms: Sequence[Term]) -> list[tuple[float, int]]:
    """(mu, count) of each term, if all are unsampled Gaussians; else nothing."""
    found = [
        (t.mu, t.count)
        for t in terms
        if isinstance(t, GaussianTerm) and t.sampling_probability == 1.0
    ]
    return found if len(found) == len(terms) else []


def _all_responses(terms: Sequence[Term]) -> list[ApproximateDPTerm] | None:
    """The terms, if they are randomised responses with few enough sums of losses."""
    responses = [t for t in terms if isinstance(t, ApproximateDPTerm)]
    if len(responses) < len(terms):
        return None
    sums = math.prod(min(t.count + 1, MAX_SUMS + 1) for t in responses)
    return responses if sums <= MAX_SUMS else None


# -- the sampled Gaussian --------------------------------------------------------------------------


def _sampled_epsilon(term: GaussianTerm, delta: float) -> tuple[float, float]:
    q, mu = term.sampling_probability, term.mu
    if delta >= q:
        return 0.0, 0.0  # delta(0) is q times a total variation distance
    out = []
    for side, sign in ((0, 1.0), (1, -1.0)):
        share = delta / q * (1.0 + sign * 4.0 * U)
        if not share < 1.0:
            out.append(0.0)
            continue
        x = gaussian_dp.epsilon_bounds((mu, mu), share)[side]
        # log(1 + q (e^x - 1))
        value = math.log1p(q * math.expm1(x)) if x < 30.0 else _far(x, q)
        out.append(max(0.0, value * (1.0 - sign * SLACK)))
    return out[0], out[1]


def _far(x: float, q: float) -> float:
    return x + math.log(q) + math.log1p((1.0 - q) / q * math.exp(-x)) if x < math.inf else x


def _sampled_delta(term: GaussianTerm, epsilon: float) -> tuple[float, float]:
    q, mu = term.sampling_probability, term.mu
    if epsilon < 30.0:
        x = math.log1p(math.expm1(epsilon) / q)
    else:
        x = epsilon - math.log(q) + math.log1p((q - 1.0) * math.exp(-epsilon))
    slack = SLACK * (abs(x) + abs(math.log(q)))
    low = gaussian_dp.delta_bounds((mu, mu), x + slack)[0]
    high = gaussian_dp.delta_bounds((mu, mu), max(0.0, x - slack))[1]
    return q * low * (1.0 - SLACK), min(1.0, q * high * (1.0 + SLACK))


# -- Laplace ---------------------------------------------------------------------------------------


def _laplace_epsilon(term: LaplaceTerm, delta: float) -> tuple[float, float]:
    value = term.inverse_scale + 2.0 * math.log1p(-delta)
    slack = SLACK * (term.inverse_scale - 2.0 * math.log1p(-delta))
    return max(0.0, value - slack), max(0.0, value + slack)


# -- randomised response ---------------------------------------------------------------------------


class _Responses:
    """The losses and probabilities of randomised responses, rounded to one side."""

    def __init__(self, terms: Sequence[ApproximateDPTerm], *, up: bool) -> None:
        loss, log_pmf, error, size = np.zeros(1), np.zeros(1), 0.0, 0.0
        for term in terms:
            n = term.count
            e = float(term.epsilon)
            # The curve grows with eps0, a decimal that need not be a double.
            if up and e < term.epsilon:
                e = math.nextafter(e, math.inf)
            if not up and e > term.epsilon:
                e = math.nextafter(e, 0.0)
            k = np.arange(n + 1, dtype=np.float64)
            choose = gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(n - k + 1.0)
            one = choose - k * e - n * math.log1p(math.exp(-e))
            # gammaln is taken to be right to 32 units of 2^-53.
            error += 64.0 * U * (1.0 + 3.0 * float(gammaln(n + 1.0)) + 3.0 * n * (1.0 + e))
            size += n * e
            loss = np.add.outer(loss, (n - 2.0 * k) * e).ravel()
            log_pmf = np.add.outer(log_pmf, one).ravel()
        self._loss, self._pmf = loss, np.exp(log_pmf)
        self._factor = 1.0 + error if up else 1.0 - error
        self._slack = (SLACK if up else -SLACK) * size
        self._up = up

    def delta(self, epsilon: float) -> float:
        gap = self._loss - epsilon + self._slack
        above = gap > 0.0
        value = float((self._pmf[above] * -np.expm1(-gap[above])).sum()) * self._factor
        # Whatever is below the least double is not 0, unless no loss reaches epsilon.
        least = 1e-300 if self._up and above.any() else 0.0
        return min(1.0, max(least, value))

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, float(self._loss.max()) * (1.0 + SLACK)
        if self.delta(0.0) <= delta:
            return 0.0
        # Invariant: delta(low) > delta >= delta(high), as far as the rounded values show.
        while True:
            middle = 0.5 * (low + high)
            if not low < middle < high or high - low <= 1e-14 * high:
                return high if self._up else low
            if self.delta(middle) <= delta:
                high = middle
            else:
                low = middle
