"""Lists of operations: how one is made from a seed, played, shrunk, and kept.

An operation is a list such as ``["submit", 3, "basic", 4, ""]``. It names its objects by small
numbers, and does nothing where they don't exist, so that a list stays playable whatever is taken
out of it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.simulation.world import (
    EXPONENTS,
    FATES,
    KINDS,
    MOST_KEYS,
    POINTS,
    SWEEPERS,
    WORKERS,
    Installation,
    Violation,
    World,
    watched,
)

Operation = list[Any]
REPLAYS: Final = Path(__file__).parent / "replays"
SHORTEST: Final = 6
LONGEST: Final = 26


@dataclass(frozen=True)
class Script:
    """A budget in steps of epsilon, and what happens to it.

    A charge of more than ``approval_above`` steps waits for the owner; None means that none does.
    ``ends`` says in which state each key's job must be in the end, where the writer knows.
    """

    budget: int
    operations: tuple[Operation, ...]
    note: str = ""
    ends: tuple[tuple[str, str], ...] = ()
    approval_above: int | None = None

    @classmethod
    def load(cls, path: Path) -> Script:
        read = json.loads(path.read_text())
        return cls(
            read["budget"],
            tuple(read["operations"]),
            read["note"],
            tuple(read["ends"].items()),
            read["approval_above"],
        )

    def save(self, folder: Path, name: str = "") -> Path:
        """Writes the list, one operation a line; without a name, under one of its own."""
        lines = ",\n    ".join(json.dumps(o) for o in self.operations)
        text = (
            f'{{\n  "note": {json.dumps(self.note)},\n  "budget": {self.budget},\n'
            f'  "approval_above": {json.dumps(self.approval_above)},\n'
            f'  "operations": [\n    {lines}\n  ],\n  "ends": {json.dumps(dict(self.ends))}\n}}\n'
        )
        own = f"found-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        path = folder / f"{name or own}.json"
        path.write_text(text)
        return path


# --------------------------------------------------------------------------------------------------
# Making one
# --------------------------------------------------------------------------------------------------


def generate(seed: int, longest: int = LONGEST) -> Script:
    """The list of this seed, with at most ``longest`` operations."""
    draw = random.Random(seed)  # noqa: S311 - an example, not a secret
    budget = draw.randrange(8, 64)
    approval_above = draw.choice((None, min(budget, 7)))
    operations: list[Operation] = []
    asked: list[Operation] = []

    def fate() -> str:
        return draw.choice(FATES) if draw.random() < 0.3 else ""

    def key() -> int:
        return draw.randrange(len(asked)) if asked else 0

    def worker() -> int:
        return draw.randrange(WORKERS)

    def submit() -> Operation:
        made: Operation
        if len(asked) >= MOST_KEYS:
            return again()
        if asked and draw.random() < 0.1:
            made = ["process", len(asked), key(), fate()]
        else:
            kind = draw.choices(KINDS, (3, 1, 2))[0]
            made = ["submit", len(asked), kind, draw.choice(EXPONENTS), fate()]
        asked.append(made)
        return made

    def again() -> Operation:
        return [*draw.choice(asked)[:-1], fate()] if asked else submit()

    def other_body() -> Operation:
        return ["submit", key(), draw.choice(KINDS), draw.choice(EXPONENTS), fate()]

    def clock() -> Operation:
        seconds = draw.choice((1, 11, 31, 31, 45, 601, 4000))
        return ["clock", seconds if draw.random() < 0.75 else -seconds]

    choices: Sequence[tuple[int, Callable[[], Operation]]] = (
        (20, submit),
        (6, again),
        (3, other_body),
        (4, lambda: ["take", worker()]),
        (12, lambda: ["step", worker()]),
        (8, lambda: ["finish", worker()]),
        (10, lambda: ["kill", worker(), draw.randrange(len(POINTS))]),
        (3, lambda: ["worker's database", worker(), draw.choice(FATES[-2:])]),
        (3, lambda: ["disk full", worker(), draw.randrange(2)]),
        (1, lambda: ["draw fails", worker()]),
        (4, lambda: ["heartbeat", worker(), fate()]),
        (9, clock),
        (4, lambda: ["cancel", key(), fate()]),
        *(
            ()
            if approval_above is None
            else ((6, lambda: ["approve", key(), fate()]), (2, lambda: ["deny", key(), fate()]))
        ),
        (7, lambda: ["sweep", draw.randrange(SWEEPERS), fate()]),
        (1, lambda: ["expire", fate()]),
        (2, lambda: ["lose message", draw.randrange(8)]),
        (4, lambda: ["deliver again", key()]),
        (2, lambda: ["broker", draw.random() < 0.5]),
        (2, lambda: ["new code", draw.randrange(1, 3)]),
        (3, lambda: ["download", key()]),
    )
    weights = [weight for weight, _ in choices]
    for _ in range(draw.randint(SHORTEST, longest)):
        _, make = draw.choices(choices, weights)[0]
        operations.append(make())
    return Script(budget, tuple(operations), f"seed {seed}", approval_above=approval_above)


# --------------------------------------------------------------------------------------------------
# Playing one
# --------------------------------------------------------------------------------------------------


def _apply(world: World, operation: Operation) -> None:
    name, *given = operation
    if name in {"take", "step", "finish", "kill", "worker's database", "disk full", "draw fails"}:
        worker = world.worker(given[0], takes=True)
        if worker is None or name == "take":
            return
        if name == "step":
            worker.step()
        elif name == "finish":
            worker.finish()
        elif name == "kill":
            worker.kill(given[1])
        elif name == "worker's database":
            worker.fate = given[1]
        elif name == "disk full":
            worker.write_fails = given[1]
        else:
            worker.draw_raises = True
    elif name == "broker":
        world.broker_up = given[0]
    elif name == "new code":
        world.code = f"code {given[0]}"
    else:
        acts: dict[str, Callable[..., None]] = {
            "submit": world.submit,
            "process": world.process,
            "cancel": world.cancel,
            "approve": world.approve,
            "deny": world.deny,
            "download": world.download,
            "heartbeat": world.beat,
            "clock": world.jump,
            "sweep": world.sweep,
            "expire": world.expire,
            "lose message": world.lose_message,
            "deliver again": world.deliver_again,
        }
        acts[name](*given)


def play(installation: Installation, script: Script) -> World:
    """Plays a list on a fresh dataset, and drains it.

    Raises:
        Violation: something that must hold did not; the text says after which operation.
    """
    with watched(installation.world(script.budget, script.approval_above)) as world:
        step: object = "the registration"
        try:
            for step in script.operations:
                world.now += 1  # no two operations at the same microsecond
                _apply(world, step)
                world.check()
            step = "the end"
            world.drain()
        except Violation as violation:
            raise Violation(f"after {step}: {violation}") from violation
        except Exception as error:
            # The product raised what its caller does not expect of it.
            raise Violation(f"after {step}: {error!r}") from error
        return world


# --------------------------------------------------------------------------------------------------
# Shrinking one
# --------------------------------------------------------------------------------------------------


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """A list that fails as well, from which nothing can be left out (delta debugging)."""
    operations = list(script.operations)

    def failing(tried: list[Operation]) -> bool:
        return fails(replace(script, operations=tuple(tried)))

    size = max(1, len(operations) // 2)
    while True:
        before = len(operations)
        for start in range(before - size, -1, -size):
            tried = operations[:start] + operations[start + size :]
            if failing(tried):
                operations = tried
        if size > 1:
            size //= 2
        elif len(operations) == before:
            break
    for place, operation in enumerate(operations):
        if operation[-1] in FATES[1:]:
            tried = [*operations[:place], [*operation[:-1], ""], *operations[place + 1 :]]
            if failing(tried):
                operations = tried
    return replace(script, operations=tuple(operations))


def violation_of(installation: Installation, script: Script) -> str | None:
    """What the list shows to be wrong, or None."""
    try:
        play(installation, script)
    except Violation as violation:
        return str(violation)
    return None


def search(
    installation: Installation,
    seeds: range,
    *,
    keep: Path,
    tally: Counter[str],
    longest: int = LONGEST,
) -> Iterator[tuple[int, str, Path]]:
    """Plays the lists of these seeds; each that fails is shrunk, kept, and told.

    ``tally`` counts what happened in those that did not fail.
    """
    for seed in seeds:
        script = generate(seed, longest)
        try:
            tally += play(installation, script).tally
            continue
        except Violation as violation:
            problem = str(violation)
        small = shrink(script, lambda tried: violation_of(installation, tried) is not None)
        final = violation_of(installation, small) or problem
        kept = replace(small, note=f"seed {seed}: {final}").save(keep)
        yield seed, final, kept
