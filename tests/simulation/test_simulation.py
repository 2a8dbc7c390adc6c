"""The ledger under lists of operations and faults, on both databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.model import ENDED
from tests.simulation.operations import LONGEST, REPLAYS, Script, play, search
from tests.simulation.world import FATES, POINTS, Installation, installation

LISTS = 200
LONG_BLOCKS = 20
LONG_LISTS = 10_000


@pytest.fixture
def installed(database_url: str, tmp_path: Path) -> Iterator[Installation]:
    with installation(database_url, tmp_path / "home") as made:
        yield made


# What must have happened, for the lists to say anything about it.
EVENTS = {
    "refused",
    "disk full",
    "lease lost",
    *(f"killed: {point}" for point in POINTS),
    *(f"start: {how}" for how in ("started", "attempt", "nothing", "expired", "failed_charged")),
    *(f"caller: {fate}" for fate in FATES if fate),
    *(f"worker: {fate}" for fate in FATES if fate.startswith("database lost")),
    *(f"ended: {state}" for state in ENDED),
}


def check(installed: Installation, seeds: range, longest: int = LONGEST) -> None:
    tally: Counter[str] = Counter()
    found = list(search(installed, seeds, keep=REPLAYS, tally=tally, longest=longest))
    assert not found, found
    assert set(tally) >= EVENTS, EVENTS - set(tally)


def test_lists(installed: Installation) -> None:
    check(installed, range(LISTS))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("block", range(LONG_BLOCKS))
def test_ten_thousand_lists(installed: Installation, block: int) -> None:
    each = LONG_LISTS // LONG_BLOCKS
    first = 1_000_000 + block * each
    check(installed, range(first, first + each), longest=2 * LONGEST)


@pytest.mark.parametrize("path", sorted(REPLAYS.glob("*.json")), ids=lambda path: path.stem)
def test_replays(installed: Installation, path: Path) -> None:
    script = Script.load(path)
    world = play(installed, script)
    ends = {str(key): job.state for key, job in world.model.jobs.items()}
    assert not script.ends or ends == dict(script.ends)
