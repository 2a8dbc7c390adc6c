"""Denoisers: EDM preconditioning over a U-Net, and the public models kept as files.

A public model is a folder with two files: `card.json` (plain JSON, readable without torch) and
one safetensors file with the weights and the public class means. Loading reads nothing else and
runs no code from the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import safetensors.torch
import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

CARD_FILE: Final = "card.json"
CLASS_MEANS_KEY: Final = "class_means"
_MAX_CARD_BYTES: Final = 1 << 20
_MAX_WEIGHTS_BYTES: Final = 1 << 28
# Below this level the network sees ln(MIN_LEVEL): the output is x to within it anyway.
_MIN_LEVEL: Final = 1e-4


class ModelFileError(ValueError):
    """A public model's files are missing, malformed, or not the ones the card names."""


class Denoiser(Protocol):
    """The posterior mean of the clean image.

    Args:
        x: [B, C, H, W], clean image in [-1, 1] plus Gaussian noise of standard deviation t.
        t: noise level, one for the batch or [B].
        labels: [B] class indices, or None where the denoiser has no classes.

    Returns:
        [B, C, H, W], an estimate of E[clean image | x, t, label].
    """

    def __call__(self, x: Tensor, t: Tensor | float, labels: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class NetworkConfig:
    """Shape of the U-Net under the preconditioning.

    The image is cut into patches of `patch` x `patch` pixels that become channels, so that the
    first level runs on a grid `patch` times coarser: most of the cost of a small image is in its
    first level. Attention runs at the coarsest level only.

    `noise_scale` multiplies ln(t)/4 before the sinusoidal embedding, whose shortest period is
    2 pi and longest 2 pi * 10^4.
    """

    channels: tuple[int, ...] = (48, 96)
    patch: int = 2
    layers_per_block: int = 1
    attention_head_dim: int = 32
    norm_groups: int = 8
    noise_scale: float = 250.0


class EdmDenoiser(nn.Module):
    """D(x; t) = c_skip x + c_out F(c_in x; c_noise, label), F a U-Net.

    Source: Karras et al. 2022, table 1 (column "Ours") and equation 7.
    """

    def __init__(
        self,
        config: NetworkConfig,
        shape: tuple[int, int, int],
        classes: int,
        sigma_data: float,
    ) -> None:
        """Builds an untrained network for images of `shape` = (height, width, image channels).

        Raises `ValueError` for a height or width that the patches and levels do not divide.
        """
        super().__init__()
        height, width, image_channels = shape
        divisor = config.patch * 2 ** (len(config.channels) - 1)
        if height % divisor or width % divisor:
            raise ValueError(f"{height}x{width} is not divisible by {divisor}")
        levels = len(config.channels)
        patch_channels = image_channels * config.patch**2
        self.config = config
        self.classes = classes
        self.sigma_data = sigma_data
        self.network = UNet2DModel(
            sample_size=(height // config.patch, width // config.patch),
            in_channels=patch_channels,
            out_channels=patch_channels,
            block_out_channels=config.channels,
            layers_per_block=config.layers_per_block,
            down_block_types=("DownBlock2D",) * (levels - 1) + ("AttnDownBlock2D",),
            up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (levels - 1),
            attention_head_dim=config.attention_head_dim,
            norm_num_groups=config.norm_groups,
            num_class_embeds=classes,
        )

    def scalings(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(c_skip, c_out, c_in, c_noise) at noise levels t, each of t's shape."""
        total = t**2 + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = t * self.sigma_data / total.sqrt()
        c_in = 1 / total.sqrt()
        c_noise = t.clamp(min=_MIN_LEVEL).log() / 4
        return c_skip, c_out, c_in, c_noise

    def forward(self, x: Tensor, t: Tensor | float, labels: Tensor | None) -> Tensor:
        """The contract of `Denoiser`; raises `ValueError` without labels."""
        if labels is None:
            raise ValueError("this denoiser is class-conditional: labels are required")
        level = torch.as_tensor(t, dtype=x.dtype, device=x.device).expand(len(x))
        c_skip, c_out, c_in, c_noise = (c.view(-1, 1, 1, 1) for c in self.scalings(level))
        patches = functional.pixel_unshuffle(c_in * x, self.config.patch)
        noise = c_noise.flatten() * self.config.noise_scale
        output = self.network(patches, noise, class_labels=labels).sample
        return c_skip * x + c_out * functional.pixel_shuffle(output, self.config.patch)


@dataclass(frozen=True)
class TrainingPackage:
    """A distribution whose shapes went into the training data."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class TrainingData:
    """What the public model was trained on; `count` images rendered from `seed`."""

    description: str
    count: int
    seed: int
    mix: dict[str, float]
    packages: tuple[TrainingPackage, ...]


@dataclass(frozen=True)
class TrainedBy:
    """How the weights were made: the module, its seed and its settings."""

    script: str
    seed: int
    steps: int
    batch: int
    learning_rate: float
    ema_decay: float
    noise_log_mean: float
    noise_log_std: float


@dataclass(frozen=True)
class PublicModelCard:
    """The parsed `card.json`.

    `shape` is (height, width, channels); `value_range` the pixel range of clean images;
    `weights` the name of the safetensors file in the same folder and `sha256` its digest.
    """

    name: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    value_range: tuple[float, float]
    sigma_data: float
    training_data: TrainingData
    licence: str
    weights: str
    sha256: str
    parameters: int
    network: NetworkConfig
    trained_by: TrainedBy

    def to_json(self) -> str:
        """The text of `card.json`."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> PublicModelCard:
        """Parses the text of `card.json`; raises `ModelFileError` if a field is missing or odd."""
        try:
            fields: dict[str, Any] = json.loads(text)
            data = dict(fields["training_data"])
            data["packages"] = tuple(TrainingPackage(**entry) for entry in data["packages"])
            network = dict(fields["network"])
            network["channels"] = tuple(int(c) for c in network["channels"])
            height, width, channels = (int(n) for n in fields["shape"])
            low, high = (float(v) for v in fields["value_range"])
            card = PublicModelCard(
                **{
                    **fields,
                    "shape": (height, width, channels),
                    "classes": tuple(str(name) for name in fields["classes"]),
                    "value_range": (low, high),
                    "weights": str(fields["weights"]),
                    "sigma_data": float(fields["sigma_data"]),
                    "training_data": TrainingData(**data),
                    "network": NetworkConfig(**network),
                    "trained_by": TrainedBy(**fields["trained_by"]),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(f"{CARD_FILE} is not a model card: {error!r}") from error
        if min(card.shape) < 1 or not card.classes or not 0 < card.sigma_data < math.inf:
            raise ModelFileError(f"{CARD_FILE}: shape, classes or sigma_data is out of range")
        if Path(card.weights).name != card.weights or not card.weights.endswith(".safetensors"):
            raise ModelFileError(f"{CARD_FILE}: weights must name a .safetensors file beside it")
        return card


@dataclass(frozen=True)
class PublicDenoiser:
    """A loaded public model.

    `denoiser` is in eval mode with gradients off. `class_means` is [classes, C, H, W] in
    [-1, 1]: the mean training image of each class.
    """

    card: PublicModelCard
    denoiser: EdmDenoiser
    class_means: Tensor


def load_public_denoiser(folder: Path, device: torch.device | str = "cpu") -> PublicDenoiser:
    """Loads the public model in `folder`.

    Only `card.json` and the safetensors file it names are read; the file's SHA-256 is checked
    before it is parsed. Loading draws no random numbers.

    Raises:
        ModelFileError: a file is missing, too large, malformed, does not have the digest the
            card states, or does not hold the network the card describes.
    """
    card = PublicModelCard.from_json(_read(folder / CARD_FILE, _MAX_CARD_BYTES))
    content = _read(folder / card.weights, _MAX_WEIGHTS_BYTES)
    digest = hashlib.sha256(content).hexdigest()
    if digest != card.sha256:
        raise ModelFileError(f"{card.weights} has SHA-256 {digest}, the card says {card.sha256}")
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ModelFileError(f"{card.weights} is not a safetensors file: {error}") from error
    class_means = tensors.pop(CLASS_MEANS_KEY, None)
    height, width, channels = card.shape
    if class_means is None or class_means.shape != (len(card.classes), channels, height, width):
        raise ModelFileError(f"{card.weights} has no class means of the card's shape")
    try:
        # On the meta device the network has shapes but no storage: nothing is initialised.
        with torch.device("meta"):
            denoiser = EdmDenoiser(card.network, card.shape, len(card.classes), card.sigma_data)
        denoiser.load_state_dict(tensors, strict=True, assign=True)
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        raise ModelFileError(f"{card.weights} does not fit the card's network: {error}") from error
    if sum(p.numel() for p in denoiser.parameters()) != card.parameters:
        raise ModelFileError(f"{CARD_FILE}: wrong number of parameters")
    denoiser.eval().requires_grad_(False).to(device)
    return PublicDenoiser(card=card, denoiser=denoiser, class_means=class_means.to(device))


def save_public_denoiser(
    folder: Path, card: PublicModelCard, denoiser: EdmDenoiser, class_means: Tensor
) -> PublicModelCard:
    """Writes the two files; returns `card` with the digest and the parameter count filled in."""
    tensors = {name: value.contiguous() for name, value in denoiser.state_dict().items()}
    tensors[CLASS_MEANS_KEY] = class_means.contiguous()
    content = safetensors.torch.save(tensors)
    fields = {name: getattr(card, name) for name in card.__dataclass_fields__}
    fields["sha256"] = hashlib.sha256(content).hexdigest()
    fields["parameters"] = sum(p.numel() for p in denoiser.parameters())
    written = PublicModelCard(**fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / card.weights).write_bytes(content)
    (folder / CARD_FILE).write_text(written.to_json(), encoding="utf-8")
    return written


def _read(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelFileError(f"{path.name} has {size} bytes, more than {limit}")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from error
