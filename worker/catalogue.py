"""The catalogue of public models: what their cards say, read without torch.

A public model is a folder ``public_models/NAME`` with a ``card.json`` and the safetensors file that
it names. The API answers from the card; the worker loads the weights and checks their digest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from accounting.errors import EpsilondError, NotFound

CARD_FILE: Final = "card.json"
MAX_CARD_BYTES: Final = 1_000_000
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class CatalogueError(EpsilondError):
    """An installed public model's card is not one."""

    status = 500
    code = "catalogue_error"
    title = "Catalogue error"


@dataclass(frozen=True)
class PublicModel:
    """One public model as its card describes it.

    Attributes:
        name: its name, which is also its folder's.
        shape: height, width, channels.
        classes: class names; None for a model without classes.
        value_range: pixel values of a clean image, lowest and highest.
        sha256: digest of the weights file, in hexadecimal.
        licence: under which the weights are published.
        training_data: what it was trained on, as the card says it.
        weights: name of the weights file in ``folder``.
        folder: where both files lie; a path of this machine, never shown.
        card: the whole card.
    """

    name: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...] | None
    value_range: tuple[float, float]
    sha256: str
    licence: str
    training_data: dict[str, Any]
    weights: str
    folder: Path
    card: dict[str, Any]


def list_models(folder: Path) -> tuple[PublicModel, ...]:
    """Every model in ``folder``, by name; none if there is no such folder.

    Raises:
        CatalogueError: a card is damaged. A half-readable catalogue would change what a job means.
    """
    return tuple(_read_card(card) for card in sorted(folder.glob(f"*/{CARD_FILE}")))


def get_model(folder: Path, name: str) -> PublicModel:
    """The model of this name.

    Raises:
        NotFound: there is none.
        CatalogueError: its card is damaged.
    """
    # The name becomes a path, so only a name's characters may pass.
    card = folder / name / CARD_FILE
    if not _NAME.fullmatch(name) or not card.is_file():
        raise NotFound("no such public model")
    return _read_card(card)


def _read_card(path: Path) -> PublicModel:
    name = path.parent.name
    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            raise ValueError("too large")
        card = json.loads(path.read_bytes())
        height, width, channels = card["shape"]
        low, high = card["value_range"]
        classes = card["classes"]
        model = PublicModel(
            name=str(card["name"]),
            shape=(int(height), int(width), int(channels)),
            classes=None if classes is None else tuple(str(label) for label in classes),
            value_range=(float(low), float(high)),
            sha256=str(card["sha256"]),
            licence=str(card["licence"]),
            training_data=dict(card["training_data"]),
            weights=str(card["weights"]),
            folder=path.parent,
            card=card,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CatalogueError(f"the card of public model {name} can't be read") from error
    well_formed = (
        model.name == name
        and _NAME.fullmatch(name)
        and min(model.shape) >= 1
        and model.value_range[0] < model.value_range[1]
        and _SHA256.fullmatch(model.sha256)
        and model.weights == Path(model.weights).name
        and model.weights.endswith(".safetensors")
        and (model.classes is None or len(set(model.classes)) == len(model.classes) >= 1)
    )
    if not well_formed:
        raise CatalogueError(f"the card of public model {name} is not a model's card")
    return model
