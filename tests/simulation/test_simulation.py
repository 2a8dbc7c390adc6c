"""The ledger under lists of operations and faults, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.operations import REPLAYS, Script, play, search
from tests.simulation.world import Installation, installation

LISTS = 200
LONG_BLOCKS = 20
LONG_LISTS = 10_000


@pytest.fixture
def installed(database_url: str, tmp_path: Path) -> Iterator[Installation]:
    with installation(database_url, tmp_path / "home") as made:
        yield made


def check(installed: Installation, seeds: range) -> None:
    found = list(search(installed, seeds, keep=REPLAYS))
    assert not found, found


def test_lists(installed: Installation) -> None:
    check(installed, range(LISTS))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("block", range(LONG_BLOCKS))
def test_ten_thousand_lists(installed: Installation, block: int) -> None:
    each = LONG_LISTS // LONG_BLOCKS
    first = 1_000_000 + block * each
    check(installed, range(first, first + each))


@pytest.mark.parametrize("path", sorted(REPLAYS.glob("*.json")), ids=lambda path: path.stem)
def test_replays(installed: Installation, path: Path) -> None:
    script = Script.load(path)
    world = play(installed, script)
    ends = {str(key): job.state for key, job in world.model.jobs.items()}
    assert not script.ends or ends == dict(script.ends)
