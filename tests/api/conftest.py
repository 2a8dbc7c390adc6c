"""Fixtures of the API's tests; see :mod:`tests.api.world`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api.world import World, counts, files, running, write_card
from worker.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, _sqlite_template: Path) -> Settings:
    """The embedded default in a folder of its own, with a sweeper that stays out of the way.

    Its tables are a copy of ready ones, which takes less time than to make them.
    """
    write_card(tmp_path / "public")
    (tmp_path / "home").mkdir(mode=0o700)
    shutil.copyfile(_sqlite_template, tmp_path / "home" / "epsilond.db")
    return Settings(
        home=tmp_path / "home",
        public_models=tmp_path / "public",
        sweep_seconds=3600,
        max_upload_bytes=1_000_000,
    )


@pytest.fixture
def world(settings: Settings) -> Iterator[World]:
    """A service on SQLite."""
    with running(settings) as made:
        yield made


@pytest.fixture(scope="session")
def start_world(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], World]]:
    """Starts services that outlive a test."""
    with ExitStack() as stack:

        def start(name: str) -> World:
            folder = tmp_path_factory.mktemp(name)
            write_card(folder / "public")
            made = Settings(
                home=folder / "home",
                public_models=folder / "public",
                sweep_seconds=3600,
                max_upload_bytes=1_000_000,
            )
            return stack.enter_context(running(made))

        yield start


@pytest.fixture(scope="session")
def _one_world(start_world: Callable[[str], World]) -> World:
    return start_world("calm")


@pytest.fixture
def calm(_one_world: World) -> Iterator[World]:
    """A service that many tests share, because none of them may leave anything behind."""
    rows, kept = counts(_one_world.database), files(_one_world.settings)
    yield _one_world
    assert counts(_one_world.database) == rows
    assert files(_one_world.settings) == kept


@pytest.fixture
def each_world(settings: Settings, database_url: str) -> Iterator[World]:
    """A service once on SQLite and once on PostgreSQL."""
    with running(settings.model_copy(update={"database_url": database_url})) as made:
        yield made
