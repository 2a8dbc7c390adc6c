"""To and from the events of dp_accounting, for people who come from that library and for comparing.

An event is a tree of what ran. Its JSON form (:class:`accounting.mechanisms.Event`, inside the kind
``dp_event``) has the names of the library's own ``to_named_tuple``: ``module_name``, ``class_name``
and the class's fields. Only this module's functions import the library, and only when called with
or for its own objects.
"""

from __future__ import annotations

import math
import numbers
from fractions import Fraction

from accounting.errors import InvalidMechanism
from accounting.mechanisms import (
    ApproximateDPTerm,
    DpEvent,
    Event,
    EventValue,
    GaussianTerm,
    Mechanism,
    Term,
    dominating_terms,
)
from accounting.rounding import float_above


def from_dp_accounting(event: object) -> DpEvent:
    """The mechanism of an event of dp_accounting; :func:`to_dp_accounting` gives an equal event.

    Raises:
        InvalidMechanism: it is no event, or one that is not read here (the field says which one of
            the tree, the text why), or the tree is too large.
    """
    try:
        tree = Event.read(event, _fields_of)
    except InvalidMechanism as error:
        raise error.within("event") from None
    return DpEvent(tree)


def to_dp_accounting(mechanism: Mechanism) -> object:
    """An event of dp_accounting with the mechanism's privacy, for add/remove neighbours.

    A ``dp_event`` is given back as it was written. Of another kind the event tells what it costs
    and not all of what ran: a fixed-size draw is written as the Poisson-sampled Gaussian that has
    the same pair (the library's own event for it means replacing a record).

    Raises:
        InvalidMechanism: the library has no event for it: a part with a delta of its own, or
            classes of which none is the worst.
    """
    if isinstance(mechanism, DpEvent):
        return _to_library(mechanism.event)
    alternatives = dominating_terms(mechanism)
    if len(alternatives) > 1:
        raise InvalidMechanism("classes", "no one event has the privacy of the worst class")
    return _to_library(event_of_terms(alternatives[0]))


def event_of_terms(terms: tuple[Term, ...]) -> Event:
    """The event that costs what a composition of terms costs, or a little more by rounding.

    Raises:
        InvalidMechanism: a term has a delta of its own, for which the library has no event.
    """
    events = [e for e in map(_event_of, terms) if e.class_name != "NoOpDpEvent"]
    if not events:
        return Event("NoOpDpEvent")
    return events[0] if len(events) == 1 else Event("ComposedDpEvent", (("events", tuple(events)),))


def _event_of(term: Term) -> Event:
    if isinstance(term, GaussianTerm):
        one = Event("GaussianDpEvent", (("noise_multiplier", _noise(term.mu)),))
        if term.sampling_probability < 1.0:
            rate = ("sampling_probability", term.sampling_probability)
            one = Event("PoissonSampledDpEvent", (rate, ("event", one)))
    elif isinstance(term, ApproximateDPTerm):
        if term.delta > 0:
            raise InvalidMechanism("delta", "dp_accounting has no event with a delta of its own")
        if term.epsilon == 0:
            return Event("NoOpDpEvent")
        # The pair of randomised response, which dominates every (epsilon, 0)-DP mechanism.
        one = Event(
            "DiscreteLaplaceDpEvent",
            (("noise_parameter", float_above(term.epsilon)), ("sensitivity", 1)),
        )
    else:
        one = Event("LaplaceDpEvent", (("noise_multiplier", _noise(term.inverse_scale)),))
    if term.count == 1:
        return one
    return Event("SelfComposedDpEvent", (("event", one), ("count", term.count)))


def _noise(mu: float) -> float:
    """A noise multiplier of at most 1/mu: the event may cost a little more, never less."""
    near = 1.0 / mu
    exact = Fraction(near) * Fraction(mu) <= 1
    return near if exact else math.nextafter(near, 0.0)


def _fields_of(node: object) -> object:
    """One event of the library as the object that its JSON would be, its children as they are."""
    from dp_accounting import dp_event as library

    if not isinstance(node, library.DpEvent):
        raise InvalidMechanism("", "must be an event of dp_accounting")
    names = [a.name for a in type(node).__attrs_attrs__]
    out: dict[str, object] = {
        "module_name": type(node).__module__,
        "class_name": type(node).__name__,
    }
    return out | {name: _plain(getattr(node, name)) for name in names}


def _plain(value: object) -> object:
    """Python's own number for one of NumPy's, which events made from arrays hold."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _to_library(event: Event) -> object:
    from dp_accounting import dp_event as library

    values = {name: _value_to_library(value) for name, value in event.fields}
    return getattr(library, event.class_name)(**values)


def _value_to_library(value: EventValue) -> object:
    if isinstance(value, Event):
        return _to_library(value)
    return [_to_library(e) for e in value] if isinstance(value, tuple) else value
