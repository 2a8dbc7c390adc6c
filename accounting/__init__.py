"""The accountant: mechanisms in, certified brackets of epsilon and delta out.

Importing this package is light. The numerical modules are loaded on the first question, so that
what only reads or writes mechanisms doesn't pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accounting.mechanisms import mechanism_from_json, mechanism_to_json

if TYPE_CHECKING:
    from accounting.bounds import Bracket, DeltaBracket, Limits, delta, epsilon, profile

__all__ = [
    "Bracket",
    "DeltaBracket",
    "Limits",
    "delta",
    "epsilon",
    "mechanism_from_json",
    "mechanism_to_json",
    "profile",
]

_LATE = frozenset({"Bracket", "DeltaBracket", "Limits", "delta", "epsilon", "profile"})


def __getattr__(name: str) -> object:
    if name in _LATE:
        from accounting import bounds

        return getattr(bounds, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
