"""The accountant: mechanisms in, certified brackets of epsilon and delta out.

Importing this package is light. The numerical modules are loaded on the first question, so that
what only reads or writes mechanisms doesn't pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from accounting.mechanisms import mechanism_from_json, mechanism_to_json

if TYPE_CHECKING:
    from accounting.bounds import Bracket, DeltaBracket, Limits, delta, epsilon, profile
    from accounting.reference import compare

__all__ = [
    "Bracket",
    "DeltaBracket",
    "Limits",
    "compare",
    "delta",
    "epsilon",
    "mechanism_from_json",
    "mechanism_to_json",
    "profile",
]

_LATE = {
    "Bracket": "bounds",
    "DeltaBracket": "bounds",
    "Limits": "bounds",
    "compare": "reference",
    "delta": "bounds",
    "epsilon": "bounds",
    "profile": "bounds",
}
# Modules that can be called: accounting.calibrate(m, ...), accounting.tradeoff(m, ...).
_CALLABLE = frozenset({"calibrate", "tradeoff"})


def __getattr__(name: str) -> object:
    if name in _LATE:
        return getattr(importlib.import_module(f"accounting.{_LATE[name]}"), name)
    if name in _CALLABLE:
        return importlib.import_module(f"accounting.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_CALLABLE})
