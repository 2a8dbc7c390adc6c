"""The subprocess that asks other people's accountants.

``python -m accounting.pld_process`` reads questions from standard input, one JSON object a line,
and answers each with one JSON line on standard output. It ends when its input closes, and kills
itself when a question outlives its time, so that it can't outlive whoever asked.

Question: ``{"method": name, "terms": [...], "seconds": s, "megabytes": m}`` and what the method
reads besides; a term is ``{"q", "mu", "count"}``, ``{"epsilon", "delta", "count"}`` or
``{"inverse_scale", "count"}``.
Answer: the method's, or ``{"error": "memory" | text}``. An infinite or undefined number is null.

===================== =============================== ==============================================
method                reads                           answers
===================== =============================== ==============================================
``dp_accounting_pld`` ``pessimistic``, ``interval``,  ``{"remove": {"epsilon": [...], "delta":
                      ``deltas``, ``epsilons``        [...]}, "add": {...}}``: epsilons at the
                                                      deltas, deltas at the epsilons
``dp_accounting_rdp`` ``delta``; no (epsilon, delta)  ``{"upper", "order"}``
                      terms
``opacus_prv``        ``delta``, ``eps_error``,       ``{"upper"}``
                      ``delta_error``; Gaussian terms
``microsoft_prv``     the same; any terms             ``{"lower", "estimate", "upper"}``
===================== =============================== ==============================================

Settings of dp_accounting's distributions: interval h, log mass truncation -50, tail truncation
1e-15 a composition. The pessimistic one is made by "connect the dots" (Doroshenko et al. 2022), the
optimistic one by dp_accounting's own rounding down of each loss (it has no other).

A method's library is imported on its first question, before the memory limit is set; its address
space counts in the limit. Opacus' and Microsoft's packages are not dependencies.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, TextIO

# Each thread of a linear-algebra library reserves address space, which the memory limit counts.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

LOG_MASS_TRUNCATION: Final = -50.0
TAIL_MASS_TRUNCATION: Final = 1e-15
_KEPT: Final = (
    2  # one pessimistic and one optimistic distribution, for the next question about them
)

_made: dict[str, Any] = {}


def _number(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


@functools.cache
def _library(name: str) -> Any:
    return importlib.import_module(name)


# --------------------------------------------------------------------------------------------------
# dp_accounting
# --------------------------------------------------------------------------------------------------

_PLD: Final = "dp_accounting.pld.privacy_loss_distribution"


def _single(term: dict[str, Any], interval: float, pessimistic: bool) -> Any:
    pld = _library(_PLD)
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
    if "inverse_scale" in term:
        return pld.from_laplace_mechanism(
            1.0,
            sensitivity=term["inverse_scale"],
            pessimistic_estimate=pessimistic,
            value_discretization_interval=interval,
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


def _dp_accounting_pld(question: dict[str, Any]) -> dict[str, Any]:
    both = _composed(question)
    # dp_accounting's public methods give the larger direction only; which one it is belongs to the
    # answer. The attributes are those of the pinned version 0.6.0.
    remove = _ask(both._pmf_remove, question)
    add = remove if both._symmetric else _ask(both._pmf_add, question)
    return {"remove": remove, "add": add}


def _dp_accounting_rdp(question: dict[str, Any]) -> dict[str, Any]:
    events = _library("dp_accounting.dp_event")
    accountant = _library("dp_accounting.rdp.rdp_privacy_accountant").RdpAccountant()
    for term in question["terms"]:
        if "mu" in term:
            event = events.GaussianDpEvent(1.0 / term["mu"])
            if term["q"] < 1.0:
                event = events.PoissonSampledDpEvent(term["q"], event)
        else:
            event = events.LaplaceDpEvent(1.0 / term["inverse_scale"])
        accountant.compose(event, term["count"])
    epsilon, order = accountant.get_epsilon_and_optimal_order(question["delta"])
    return {"upper": _number(epsilon), "order": _number(order)}


# --------------------------------------------------------------------------------------------------
# The two implementations of Gopi, Lee and Wutschitz (2021)
# --------------------------------------------------------------------------------------------------


def _opacus_prv(question: dict[str, Any]) -> dict[str, Any]:
    accountant = _library("opacus.accountants.prv").PRVAccountant()
    for term in question["terms"]:
        accountant.history.append((1.0 / term["mu"], term["q"], term["count"]))
    upper = accountant.get_epsilon(
        question["delta"],
        eps_error=question["eps_error"],
        delta_error=question["delta_error"],
    )
    return {"upper": _number(upper)}


def _microsoft_prv(question: dict[str, Any]) -> dict[str, Any]:
    prv = _library("prv_accountant")
    variables = []
    for term in question["terms"]:
        if "mu" in term:
            variables.append(prv.PoissonSubsampledGaussianMechanism(term["q"], 1.0 / term["mu"]))
        elif "inverse_scale" in term:
            variables.append(prv.LaplaceMechanism(term["inverse_scale"]))
        else:
            variables.append(prv.ApproximateDPMechanism(term["epsilon"], term["delta"]))
    counts = [term["count"] for term in question["terms"]]
    accountant = prv.PRVAccountant(
        prvs=variables,
        max_self_compositions=counts,
        eps_error=question["eps_error"],
        delta_error=question["delta_error"],
    )
    found = accountant.compute_epsilon(question["delta"], counts)
    return dict(zip(("lower", "estimate", "upper"), map(_number, found), strict=True))


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------

_METHODS: Final[dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]]]] = {
    "dp_accounting_pld": ((_PLD,), _dp_accounting_pld),
    "dp_accounting_rdp": (
        ("dp_accounting.dp_event", "dp_accounting.rdp.rdp_privacy_accountant"),
        _dp_accounting_rdp,
    ),
    "opacus_prv": (("opacus.accountants.prv",), _opacus_prv),
    "microsoft_prv": (("prv_accountant",), _microsoft_prv),
}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answers one question (see the module's text); raises what the library raises."""
    libraries, ask = _METHODS[question.get("method", "dp_accounting_pld")]
    for name in libraries:
        _library(name)
    _limit_memory(int(question["megabytes"]))
    return ask(question)


def _limit_memory(megabytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = megabytes << 20
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def serve(source: TextIO, sink: TextIO) -> None:
    """Answers questions until the source ends."""
    for line in source:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, float(question["seconds"]) + 1.0)
        try:
            reply = answer(question)
        except MemoryError:
            _made.clear()
            reply = {"error": "memory"}
        except Exception as error:  # noqa: BLE001  whatever another library raises is its answer
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sink.write(json.dumps(reply) + "\n")
        sink.flush()


if __name__ == "__main__":
    # A library that prints must not break the protocol: what it writes goes to standard error.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)
