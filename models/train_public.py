"""Trains the public digit denoiser and writes its folder.

    python -m models.train_public --out models/public/glyphs-28

Only rendered font glyphs are used (`models.glyphs`); no private record and no handwriting is read.
The weights depend on the arguments, the package versions and floating-point order (thread count and
processor), not on how often training was stopped: each step draws its batch and noise from a
generator seeded by (seed, step), and the checkpoint holds the whole optimiser state. With
`--minutes`, training stops early at a checkpoint; the same command goes on from it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from models.denoisers import (
    EdmDenoiser,
    NetworkConfig,
    PublicModelCard,
    TrainedBy,
    TrainingData,
    TrainingPackage,
    save_public_denoiser,
)
from models.glyphs import CLASSES, SIDE, GlyphMix, font_packages, render_glyphs
from models.handoff import heun
from models.schedules import refinement_levels

WEIGHTS_FILE: Final = "denoiser.safetensors"
LOG_EVERY: Final = 50
CHECKPOINT_EVERY: Final = 500


@dataclass(frozen=True)
class Settings:
    """Everything the weights depend on.

    The noise levels in training are log-normal, exp(N(noise_log_mean, noise_log_std^2)). EDM's
    (-1.2, 1.2) suits sampling from scratch; the hybrid hands over at t = 1..10, so the mean is
    moved up: 95 % of the draws lie in 0.1..16.
    """

    seed: int
    steps: int
    glyphs: int
    mix: GlyphMix
    network: NetworkConfig
    batch: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 200
    ema_decay: float = 0.999
    noise_log_mean: float = 0.25
    noise_log_std: float = 1.3


def rate_at(step: int, settings: Settings) -> float:
    """Learning rate of a step: linear warm-up, then half a cosine down to zero."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / settings.steps))


def edm_loss(
    denoiser: EdmDenoiser, clean: Tensor, labels: Tensor, t: Tensor, gaussian: Tensor
) -> Tensor:
    """The weighted squared error, averaged over a batch and its pixels.

    lambda(t) = (t^2 + sigma_data^2) / (t sigma_data)^2 makes the error of the raw network the
    same size at every level. Source: Karras et al. 2022, equations 2 and 8 and table 1.
    """
    level = t.view(-1, 1, 1, 1)
    sigma_data = denoiser.sigma_data
    weight = (level**2 + sigma_data**2) / (level * sigma_data) ** 2
    estimate = denoiser(clean + level * gaussian, t, labels)
    loss: Tensor = (weight * (estimate - clean) ** 2).mean()
    return loss


class Trainer:
    """Network, EMA copy and Adam state, with a checkpoint that restores all three."""

    def __init__(self, settings: Settings, images: Tensor, labels: Tensor, work: Path) -> None:
        """`images` is uint8 [n, 28, 28], `labels` int64 [n]; checkpoints go to `work`."""
        self.settings = settings
        self.images = images
        self.labels = labels
        self.work = work
        self.step = 0
        self.log: list[tuple[int, float, float]] = []
        pixels = images.to(torch.float32) / 127.5 - 1
        self.sigma_data = round(float(pixels.std()), 4)
        self.class_means = torch.stack(
            [pixels[labels == k].mean(dim=0, keepdim=True) for k in range(len(CLASSES))]
        )
        torch.manual_seed(settings.seed)
        self.denoiser = self._network()
        self.ema = self._network()
        self.ema.load_state_dict(self.denoiser.state_dict())
        self.ema.eval().requires_grad_(False)
        self.optimiser = torch.optim.Adam(
            self.denoiser.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99)
        )

    def _network(self) -> EdmDenoiser:
        return EdmDenoiser(
            self.settings.network, (SIDE, SIDE, 1), len(CLASSES), sigma_data=self.sigma_data
        )

    def advance(self) -> float:
        """One step; returns its loss."""
        settings = self.settings
        # Large odd multiplier: the seeds of two runs do not meet within any usable step count.
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        chosen = torch.randint(len(self.images), (settings.batch,), generator=generator)
        clean = self.images[chosen, None].to(torch.float32) / 127.5 - 1
        normal = torch.randn(settings.batch, generator=generator)
        t = (settings.noise_log_mean + settings.noise_log_std * normal).exp()
        gaussian = torch.randn(clean.shape, generator=generator)
        for group in self.optimiser.param_groups:
            group["lr"] = rate_at(self.step, settings)
        self.optimiser.zero_grad(set_to_none=True)
        loss = edm_loss(self.denoiser, clean, self.labels[chosen], t, gaussian)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        decay = min(settings.ema_decay, self.step / (self.step + 9))
        with torch.no_grad():
            pairs = zip(self.ema.parameters(), self.denoiser.parameters(), strict=True)
            for average, current in pairs:
                average.lerp_(current, 1 - decay)
        return float(loss.detach())

    def save(self) -> None:
        """Writes the checkpoint: tensors as safetensors, the rest as JSON."""
        tensors = {}
        for name, value in self.denoiser.named_parameters():
            state = self.optimiser.state[value]
            tensors[f"network.{name}"] = value.detach()
            tensors[f"first.{name}"] = state["exp_avg"]
            tensors[f"second.{name}"] = state["exp_avg_sq"]
        tensors |= {f"ema.{name}": value for name, value in self.ema.named_parameters()}
        facts = {"settings": asdict(self.settings), "step": self.step, "log": self.log}
        # The JSON goes last and by rename: a checkpoint is whole once its step is named there.
        name = f"checkpoint-{self.step}.safetensors"
        safetensors.torch.save_file(tensors, self.work / name)
        partial = self.work / "checkpoint.json.part"
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(self.work / "checkpoint.json")
        for old in self.work.glob("checkpoint-*.safetensors"):
            if old.name != name:
                old.unlink()

    def resume(self) -> None:
        """Restores the checkpoint in `work`, if there is one.

        Raises `ValueError` if it was made with other settings.
        """
        path = self.work / "checkpoint.json"
        if not path.exists():
            return
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["settings"] != json.loads(json.dumps(asdict(self.settings))):
            raise ValueError(f"{path} belongs to other settings: use another --work folder")
        self.step = int(facts["step"])
        self.log = [(int(step), float(loss), float(rate)) for step, loss, rate in facts["log"]]
        stored = safetensors.torch.load_file(self.work / f"checkpoint-{self.step}.safetensors")
        with torch.no_grad():
            for name, value in self.denoiser.named_parameters():
                value.copy_(stored[f"network.{name}"])
                self.optimiser.state[value] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": stored[f"first.{name}"].clone(),
                    "exp_avg_sq": stored[f"second.{name}"].clone(),
                }
            for name, value in self.ema.named_parameters():
                value.copy_(stored[f"ema.{name}"])

    def preview(self) -> None:
        """Draws ten samples of each class from the averaged network to `work`."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        labels = torch.arange(len(CLASSES)).repeat_interleave(10)
        start = 20.0 * torch.randn((len(labels), 1, SIDE, SIDE), generator=generator)
        levels = refinement_levels(20.0, 0.01, steps=16, rho=7.0)
        images = heun(self.ema, start, levels, labels)
        grey = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        sheet = grey.view(10, 10, SIDE, SIDE).transpose(1, 2).reshape(10 * SIDE, 10 * SIDE)
        Image.fromarray(sheet.numpy()).save(self.work / f"samples-{self.step}.png")


def load_glyphs(settings: Settings, work: Path) -> tuple[Tensor, Tensor]:
    """The training set as tensors, rendered once and kept in `work`."""
    key = json.dumps([settings.seed, settings.glyphs, asdict(settings.mix)])
    path = work / "glyphs.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["key"]) == key:
                return torch.from_numpy(kept["images"]), torch.from_numpy(kept["labels"])
    begun = time.monotonic()

    def show(done: int) -> None:
        _bar("glyphs", done, settings.glyphs, begun, "")

    images, labels = render_glyphs(settings.glyphs, settings.seed, settings.mix, progress=show)
    np.savez(path, key=np.array(key), images=images, labels=labels)
    return torch.from_numpy(images), torch.from_numpy(labels)


def write_results(trainer: Trainer, out: Path) -> PublicModelCard:
    """Writes the weights, the card, `loss.csv` and `loss.png` to `out`."""
    settings = trainer.settings
    card = PublicModelCard(
        name="glyphs-28",
        shape=(SIDE, SIDE, 1),
        classes=CLASSES,
        value_range=(-1.0, 1.0),
        sigma_data=trainer.sigma_data,
        training_data=TrainingData(
            description=(
                "Digits of Hershey vector alphabets and of typefaces, rendered by "
                "models/glyphs.py: slanted, bent and given another weight at random. No "
                "handwriting, digitised or imitated, and no scanned or collected image."
            ),
            count=settings.glyphs,
            seed=settings.seed,
            mix=asdict(settings.mix),
            packages=tuple(TrainingPackage(**asdict(package)) for package in font_packages()),
        ),
        licence="Apache-2.0",
        weights=WEIGHTS_FILE,
        sha256="",
        parameters=0,
        network=settings.network,
        trained_by=TrainedBy(
            script="models/train_public.py",
            seed=settings.seed,
            steps=settings.steps,
            batch=settings.batch,
            learning_rate=settings.learning_rate,
            ema_decay=settings.ema_decay,
            noise_log_mean=settings.noise_log_mean,
            noise_log_std=settings.noise_log_std,
        ),
    )
    written = save_public_denoiser(out, card, trainer.ema, trainer.class_means)
    with (out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("step", "mean_loss", "learning_rate"))
        table.writerows((s, f"{loss:.6f}", f"{rate:.3e}") for s, loss, rate in trainer.log)
    _plot(trainer.log, out / "loss.png")
    return written


def _plot(log: Sequence[tuple[int, float, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([step for step, _, _ in log], [loss for _, loss, _ in log], linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel(f"EDM loss, mean of {LOG_EVERY} steps")
    axes.set_yscale("log")
    figure.savefig(path, dpi=100)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _bar(name: str, done: int, total: int, begun: float, note: str) -> None:
    filled = 30 * done // total
    elapsed = time.monotonic() - begun
    bar = "#" * filled + "." * (30 - filled)
    _say(f"{name} [{bar}] {done}/{total} {elapsed:.0f} s {note}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 0 when the model is written, 3 when `--minutes` ran out first."""
    parser = argparse.ArgumentParser(prog="python -m models.train_public", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--work", type=Path, default=Path("build/glyphs-28"), help="checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000, help="length of training")
    parser.add_argument("--glyphs", type=int, default=60_000, help="training images")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop early, go on later")
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 for its default")
    arguments = parser.parse_args(argv)
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    settings = Settings(
        seed=arguments.seed,
        steps=arguments.steps,
        glyphs=arguments.glyphs,
        mix=GlyphMix(),
        network=NetworkConfig(),
    )
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    images, labels = load_glyphs(settings, work)
    trainer = Trainer(settings, images, labels, work)
    trainer.resume()
    begun = time.monotonic()
    losses: list[float] = []
    while trainer.step < settings.steps:
        losses.append(trainer.advance())
        if trainer.step % LOG_EVERY == 0 or trainer.step == settings.steps:
            mean = sum(losses) / len(losses)
            trainer.log.append((trainer.step, mean, rate_at(trainer.step - 1, settings)))
            losses.clear()
            _bar("training", trainer.step, settings.steps, begun, f"loss {mean:.4f}")
        if trainer.step % CHECKPOINT_EVERY == 0:
            trainer.save()
            trainer.preview()
            if time.monotonic() - begun > 60 * arguments.minutes and trainer.step < settings.steps:
                _say(f"stopped at step {trainer.step}; run the same command to go on")
                return 3
    card = write_results(trainer, arguments.out)
    _say(f"wrote {arguments.out} ({card.parameters} parameters, SHA-256 {card.sha256})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
