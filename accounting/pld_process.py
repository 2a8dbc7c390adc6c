"""The subprocess that asks dp_accounting for privacy-loss-distribution bounds.

``python -m accounting.pld_process`` reads questions from standard input, one JSON object a line,
and answers each with one JSON line on standard output. It ends when its input closes, and kills
itself when a question outlives its time, so that it can't outlive whoever asked.

Question: ``{"terms": [...], "pessimistic": bool, "interval": h, "deltas": [...],
"epsilons": [...], "seconds": s, "megabytes": m}``; a term is ``{"q", "mu", "count"}`` or
``{"epsilon", "delta", "count"}``.
Answer: ``{"remove": {"epsilon": [...], "delta": [...]}, "add": {...}}``, epsilons at the asked
deltas and deltas at the asked epsilons (an infinite or undefined number is null), or
``{"error": "memory" | text}``.

Settings of dp_accounting: interval h, log mass truncation -50, tail truncation 1e-15 a composition.
The pessimistic distribution is made by "connect the dots" (Doroshenko et al. 2022), the optimistic
one by dp_accounting's own rounding down of each loss (it has no other).
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from typing import Any, Final, TextIO

# Each thread of a linear-algebra library reserves address space, which the memory limit counts.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: E402  after the thread limits

LOG_MASS_TRUNCATION: Final = -50.0
TAIL_MASS_TRUNCATION: Final = 1e-15
_KEPT: Final = (
    2  # one pessimistic and one optimistic distribution, for the next question about them
)

_made: dict[str, Any] = {}


def _single(term: dict[str, Any], interval: float, pessimistic: bool) -> Any:
    if "mu" in term:
        # sensitivity mu at standard deviation 1 needs no division, hence no rounding
        return pld.from_gaussian_mechanism(
            1.0,
            sensitivity=term["mu"],
            pessimistic_estimate=pessimistic,
            value_discretization_interval=interval,
            log_mass_truncation_bound=LOG_MASS_TRUNCATION,
            sampling_prob=term["q"],
            use_connect_dots=pessimistic,
        )
    # The worst (epsilon, delta)-DP mechanism (Kairouz, Oh and Viswanath 2015).
    epsilon, delta = term["epsilon"], term["delta"]
    whole = math.ceil if pessimistic else math.floor
    low = math.exp(-epsilon)
    masses: dict[int, float] = {}
    for loss, share in ((epsilon, 1.0 / (1.0 + low)), (-epsilon, low / (1.0 + low))):
        place = whole(loss / interval)
        masses[place] = masses.get(place, 0.0) + (1.0 - delta) * share
    return pld.PrivacyLossDistribution.create_from_rounded_probability(
        masses, delta, interval, pessimistic
    )


def _composed(question: dict[str, Any]) -> Any:
    key = json.dumps([question["terms"], question["interval"], question["pessimistic"]])
    if key not in _made:
        total = None
        for term in question["terms"]:
            one = _single(term, question["interval"], question["pessimistic"])
            one = one.self_compose(term["count"], TAIL_MASS_TRUNCATION)
            total = one if total is None else total.compose(one, TAIL_MASS_TRUNCATION)
        while len(_made) >= _KEPT:
            del _made[next(iter(_made))]
        _made[key] = total
    return _made[key]


def _number(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _ask(pmf: Any, question: dict[str, Any]) -> dict[str, list[float | None]]:
    at_zero = float(pmf.get_delta_for_epsilon(0.0))
    return {
        # The library's search overflows on losses far below 0, which it meets only where
        # delta(0) <= delta, and there the answer is 0.
        "epsilon": [
            0.0 if at_zero <= d else _number(pmf.get_epsilon_for_delta(d))
            for d in question["deltas"]
        ],
        "delta": [_number(pmf.get_delta_for_epsilon(e)) for e in question["epsilons"]],
    }


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answers one question (see the module's text); raises what dp_accounting raises."""
    both = _composed(question)
    # dp_accounting's public methods give the larger direction only; which one it is belongs to the
    # answer. The attributes are those of the pinned version 0.6.0.
    remove = _ask(both._pmf_remove, question)
    add = remove if both._symmetric else _ask(both._pmf_add, question)
    return {"remove": remove, "add": add}


def serve(source: TextIO, sink: TextIO) -> None:
    """Answers questions until the source ends."""
    for line in source:
        question = json.loads(line)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = int(question["megabytes"]) << 20
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
        signal.setitimer(signal.ITIMER_REAL, float(question["seconds"]) + 1.0)
        try:
            reply = answer(question)
        except MemoryError:
            _made.clear()
            reply = {"error": "memory"}
        except (ArithmeticError, ValueError, LookupError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sink.write(json.dumps(reply) + "\n")
        sink.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
