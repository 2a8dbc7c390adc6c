"""Questions to the accountant, and their answers as the service and the command line give them.

Each function takes what was asked, already read, and the limits of the whole question, and gives
the JSON of the answer. None of them touches a ledger.
"""

from __future__ import annotations

from collections.abc import Sequence

from accounting import bounds, calibrate, reference, tradeoff
from accounting.bounds import Limits
from accounting.calibrate import Method, Stage
from accounting.mechanisms import Mechanism

Json = dict[str, object]
PROFILE_POINTS = 101


def ask_epsilon(
    mechanism: Mechanism, delta: float, tolerance: float | None, limits: Limits
) -> Json:
    """See :func:`accounting.bounds.epsilon`."""
    return bounds.epsilon(mechanism, delta, tolerance=tolerance, limits=limits).to_json()


def ask_delta(mechanism: Mechanism, epsilon: float, limits: Limits) -> Json:
    """See :func:`accounting.bounds.delta`."""
    return bounds.delta(mechanism, epsilon, limits=limits).to_json()


def ask_profile(mechanism: Mechanism, epsilons: Sequence[float] | None, limits: Limits) -> Json:
    """See :func:`accounting.bounds.profile`; without epsilons, the whole curve."""
    if epsilons is None:
        points = tradeoff.whole_profile(mechanism, points=PROFILE_POINTS, limits=limits)
    else:
        points = bounds.profile(mechanism, epsilons, limits=limits)
    return {"points": [point.to_json() for point in points]}


def ask_tradeoff(mechanism: Mechanism, alphas: Sequence[float] | None, limits: Limits) -> Json:
    """See :func:`accounting.tradeoff.tradeoff`."""
    chosen = tradeoff.DEFAULT_ALPHAS if alphas is None else alphas
    return tradeoff.tradeoff(mechanism, chosen, limits=limits).to_json()


def ask_compare(mechanism: Mechanism, delta: float, limits: Limits) -> Json:
    """See :func:`accounting.reference.compare`; the limits are those of each other library."""
    rows = reference.compare(mechanism, delta, limits=limits)
    return {"delta": delta, "methods": [row.to_json() for row in rows]}


def ask_calibrate(
    mechanism: Mechanism,
    free: str,
    epsilon: float,
    delta: float | None,
    method: Method,
    limits: Limits,
) -> Json:
    """See :func:`accounting.calibrate.calibrate`."""
    return calibrate.calibrate(
        mechanism, free, epsilon=epsilon, delta=delta, method=method, limits=limits
    ).to_json()


def ask_allocate(
    stages: Sequence[Stage], epsilon: float, delta: float, method: Method, limits: Limits
) -> Json:
    """See :func:`accounting.calibrate.allocate`."""
    return calibrate.allocate(
        stages, epsilon=epsilon, delta=delta, method=method, limits=limits
    ).to_json()
