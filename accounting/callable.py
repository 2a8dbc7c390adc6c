"""Modules that can be called: ``accounting.calibrate(m, ...)``, where both have one name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def make_callable(name: str, function: Callable[..., Any]) -> None:
    """Lets the module of that name be called as the function."""

    class CallableModule(types.ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return function(*args, **options)

    sys.modules[name].__class__ = CallableModule
