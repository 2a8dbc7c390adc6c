"""The catalogue: the cards that ship, and cards that are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from accounting.errors import NotFound
from worker.catalogue import CatalogueError, get_model, list_models
from worker.settings import Settings

CARD: dict[str, Any] = {
    "name": "squares",
    "shape": [8, 8, 1],
    "classes": ["a", "b"],
    "value_range": [0, 255],
    "sha256": "0f" * 32,
    "licence": "Apache-2.0",
    "training_data": {"description": "drawn squares"},
    "weights": "squares.safetensors",
}


def _install(folder: Path, card: Any, name: str = "squares") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "card.json").write_text(card if isinstance(card, str) else json.dumps(card))


def test_the_models_that_ship_are_listed_with_their_digests() -> None:
    models = list_models(Settings().public_models)
    assert "glyphs-28" in [model.name for model in models]
    for model in models:
        content = (model.folder / model.weights).read_bytes()
        assert hashlib.sha256(content).hexdigest() == model.sha256
        assert model.card["name"] == model.name
    glyphs = get_model(Settings().public_models, "glyphs-28")
    assert glyphs.shape == (28, 28, 1)
    assert glyphs.classes == tuple("0123456789")


def test_a_card_is_read(tmp_path: Path) -> None:
    _install(tmp_path, CARD)
    _install(tmp_path, CARD | {"name": "another", "classes": None}, "another")
    (tmp_path / "not-a-model").mkdir()
    another, squares = list_models(tmp_path)
    assert (another.name, another.classes) == ("another", None)
    assert squares == get_model(tmp_path, "squares")
    assert squares.shape == (8, 8, 1)
    assert squares.value_range == (0.0, 255.0)
    assert squares.classes == ("a", "b")


def test_no_folder_is_an_empty_catalogue(tmp_path: Path) -> None:
    assert list_models(tmp_path / "none") == ()


@pytest.mark.parametrize("name", ["absent", "", ".", "..", "../squares", "squares/", "SQUARES"])
def test_an_unknown_name_is_not_found(tmp_path: Path, name: str) -> None:
    _install(tmp_path / "models", CARD)
    _install(tmp_path, CARD)
    with pytest.raises(NotFound):
        get_model(tmp_path / "models", name)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"shape": [8, 8]},
        {"shape": [8, 0, 1]},
        {"shape": "8x8"},
        {"value_range": [255, 0]},
        {"value_range": None},
        {"sha256": "0f"},
        {"weights": "../escape.safetensors"},
        {"weights": "squares.pkl"},
        {"classes": []},
        {"classes": ["a", "a"]},
        {"classes": 3},
        {"training_data": None},
    ],
)
def test_a_damaged_card_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    _install(tmp_path, CARD | change)
    with pytest.raises(CatalogueError, match="squares"):
        list_models(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"text"', "{}" + " " * 1_000_001])
def test_a_card_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    _install(tmp_path, text)
    with pytest.raises(CatalogueError):
        get_model(tmp_path, "squares")
