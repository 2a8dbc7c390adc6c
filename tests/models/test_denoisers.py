"""Preconditioning, the model files, and the model that is shipped."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from models.denoisers import (
    CLASS_MEANS_KEY,
    EdmDenoiser,
    ModelFileError,
    NetworkConfig,
    PublicDenoiser,
    PublicModelCard,
    TrainedBy,
    TrainingData,
    load_public_denoiser,
    save_public_denoiser,
)
from models.glyphs import GlyphMix, font_packages, render_glyphs
from models.handoff import heun
from models.schedules import refinement_levels
from models.train_public import main as train

GLYPHS_28 = Path(__file__).parents[2] / "models" / "public" / "glyphs-28"
SMALL = NetworkConfig(channels=(8, 16), attention_head_dim=8, norm_groups=4)


@pytest.fixture
def small() -> EdmDenoiser:
    torch.manual_seed(0)
    return EdmDenoiser(SMALL, (12, 12, 1), classes=3, sigma_data=0.5).eval()


@pytest.fixture
def folder(tmp_path: Path, small: EdmDenoiser) -> Path:
    """A small untrained model on disk."""
    card = PublicModelCard(
        name="small",
        shape=(12, 12, 1),
        classes=("a", "b", "c"),
        value_range=(-1.0, 1.0),
        sigma_data=0.5,
        training_data=TrainingData("none", count=0, seed=0, mix={}, packages=()),
        licence="Apache-2.0",
        weights="weights.safetensors",
        sha256="",
        parameters=0,
        network=SMALL,
        trained_by=TrainedBy("none", 0, 0, 0, 0.0, 0.0, 0.0, 0.0),
    )
    save_public_denoiser(tmp_path, card, small, torch.zeros(3, 1, 12, 12))
    return tmp_path


def _edit_card(folder: Path, **changes: Any) -> None:
    path = folder / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _replace_weights(folder: Path, content: bytes) -> None:
    """Puts other bytes in place of the weights, with a card that vouches for them."""
    (folder / "weights.safetensors").write_bytes(content)
    _edit_card(folder, sha256=hashlib.sha256(content).hexdigest())


# --- preconditioning -------------------------------------------------------------------------


def test_scalings_are_those_of_the_table(small: EdmDenoiser) -> None:
    t = torch.tensor([0.002, 0.5, 1.0, 80.0], dtype=torch.float64)
    c_skip, c_out, c_in, c_noise = small.scalings(t)
    torch.testing.assert_close(c_skip, 0.25 / (t**2 + 0.25))
    torch.testing.assert_close(c_out, t * 0.5 / (t**2 + 0.25).sqrt())
    torch.testing.assert_close(c_in, 1 / (t**2 + 0.25).sqrt())
    torch.testing.assert_close(c_noise, t.log() / 4)
    # The two identities they were derived from: unit input variance, unit target variance.
    torch.testing.assert_close(c_in**2 * (t**2 + 0.25), torch.ones_like(t))
    target = c_skip**2 * t**2 + (1 - c_skip) ** 2 * 0.25
    torch.testing.assert_close(target, c_out**2)


def test_without_noise_the_image_comes_back(small: EdmDenoiser) -> None:
    x = torch.randn(3, 1, 12, 12)
    labels = torch.tensor([0, 1, 2])
    with torch.no_grad():
        assert torch.equal(small(x, 0.0, labels), x)
        torch.testing.assert_close(small(x, 1e-5, labels), x, rtol=0, atol=1e-3)


def test_one_level_or_one_each_and_labels_matter(small: EdmDenoiser) -> None:
    x = torch.randn(3, 1, 12, 12)
    labels = torch.tensor([0, 1, 2])
    with torch.no_grad():
        one = small(x, 2.0, labels)
        torch.testing.assert_close(small(x, torch.full((3,), 2.0), labels), one)
        assert not torch.allclose(small(x, torch.tensor([2.0, 2.0, 0.1]), labels)[2], one[2])
        assert not torch.allclose(small(x, 2.0, labels.flip(0))[0], one[0])
    with pytest.raises(ValueError, match="labels"):
        small(x, 2.0, None)


def test_a_size_the_levels_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible"):
        EdmDenoiser(SMALL, (14, 14, 1), classes=3, sigma_data=0.5)


# --- model files -----------------------------------------------------------------------------


def test_what_is_saved_is_loaded(folder: Path, small: EdmDenoiser) -> None:
    before = torch.random.get_rng_state()
    model = load_public_denoiser(folder)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.denoiser.training
    assert not any(p.requires_grad for p in model.denoiser.parameters())
    assert model.card.parameters == sum(p.numel() for p in small.parameters())
    assert PublicModelCard.from_json(model.card.to_json()) == model.card
    x = torch.randn(3, 1, 12, 12)
    with torch.no_grad():
        labels = torch.tensor([0, 1, 2])
        assert torch.equal(model.denoiser(x, 1.5, labels), small(x, 1.5, labels))


def test_a_changed_weight_file_is_refused(folder: Path) -> None:
    path = folder / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ModelFileError, match="SHA-256"):
        load_public_denoiser(folder)


class _Trap:
    """Unpickling this would raise AssertionError."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _spring, ("unpickled",)


def _spring(message: str) -> None:
    raise AssertionError(message)


def test_a_pickle_is_refused_unread(folder: Path) -> None:
    _replace_weights(folder, pickle.dumps(_Trap()))
    with pytest.raises(ModelFileError, match="not a safetensors file"):
        load_public_denoiser(folder)


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin", "../weights.safetensors", ""])
def test_only_a_safetensors_file_in_the_folder_is_read(folder: Path, name: str) -> None:
    _edit_card(folder, weights=name)
    with pytest.raises(ModelFileError, match=r"\.safetensors"):
        load_public_denoiser(folder)


@pytest.mark.parametrize("name", ["card.json", "weights.safetensors"])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=name):
        load_public_denoiser(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"name": "x"}', "\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
def test_a_malformed_card_is_refused(folder: Path, text: str) -> None:
    (folder / "card.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match="card"):
        load_public_denoiser(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [12, 12]},
        {"shape": [0, 12, 1]},
        {"sigma_data": 0.0},
        {"sigma_data": "wide"},
        {"classes": []},
        {"weights": 5},
        {"surprise": 1},
        {"network": {"channels": [8, 16], "surprise": 1}},
    ],
)
def test_a_card_out_of_range_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    _edit_card(folder, **changes)
    with pytest.raises(ModelFileError, match="card"):
        load_public_denoiser(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [16, 16, 1]},
        {"classes": ["a", "b"]},
        {"parameters": 1},
        {"network": {"channels": [8, 24], "attention_head_dim": 8, "norm_groups": 4}},
        {"network": {"channels": [8, 16], "patch": 0}},
    ],
)
def test_weights_of_another_network_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    _edit_card(folder, **changes)
    with pytest.raises(ModelFileError):
        load_public_denoiser(folder)


def test_weights_without_class_means_are_refused(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "weights.safetensors")
    del tensors[CLASS_MEANS_KEY]
    _replace_weights(folder, safetensors.torch.save(tensors))
    with pytest.raises(ModelFileError, match="class means"):
        load_public_denoiser(folder)


# --- the shipped model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def glyphs_28() -> PublicDenoiser:
    return load_public_denoiser(GLYPHS_28)


def _nearest_mean_accuracy(images: Tensor, labels: Tensor, means: Tensor) -> float:
    distance = (images[:, None] - means).square().flatten(2).sum(dim=2)
    return float((distance.argmin(dim=1) == labels).double().mean())


def _draw(model: PublicDenoiser, labels: Tensor, seed: int) -> Tensor:
    start = torch.randn((len(labels), 1, 28, 28), generator=torch.Generator().manual_seed(seed))
    levels = refinement_levels(20.0, 0.01, steps=8, rho=7.0)
    return heun(model.denoiser, 20.0 * start, levels, labels)


def test_the_card_of_glyphs_28(glyphs_28: PublicDenoiser) -> None:
    card = glyphs_28.card
    assert card.name == "glyphs-28"
    assert card.shape == (28, 28, 1)
    assert card.classes == tuple("0123456789")
    assert card.value_range == (-1.0, 1.0)
    assert (GLYPHS_28 / card.weights).stat().st_size <= 8_000_000
    assert glyphs_28.class_means.shape == (10, 1, 28, 28)
    assert glyphs_28.class_means.abs().max() <= 1.0


def test_glyphs_28_was_trained_on_what_the_module_renders(glyphs_28: PublicDenoiser) -> None:
    data = glyphs_28.card.training_data
    assert data.mix == asdict(GlyphMix())
    images, labels = render_glyphs(1200, data.seed, GlyphMix())
    pixels = torch.from_numpy(images).double().div(127.5).sub(1)[:, None]
    assert pixels.std() == pytest.approx(glyphs_28.card.sigma_data, rel=0.02)
    means = torch.stack([pixels[labels == k].mean(dim=0) for k in range(10)])
    # 120 images a class leave an error of 0.033 a pixel; half and half would be off by 0.050.
    assert (means - glyphs_28.class_means).square().mean().sqrt() < 0.042


def test_glyphs_28_draws_the_class_it_is_asked_for(glyphs_28: PublicDenoiser) -> None:
    labels = torch.arange(10).repeat(5)
    images = _draw(glyphs_28, labels, seed=0)
    # Glyphs themselves reach about 0.87 by this crude rule; chance is 0.1.
    assert _nearest_mean_accuracy(images, labels, glyphs_28.class_means) > 0.65
    # Clean: pixels near black or near white, few between, and as much ink as the training data.
    assert ((images < -0.8) | (images > 0.8)).double().mean() > 0.85
    assert images.mean() == pytest.approx(float(glyphs_28.class_means.mean()), abs=0.06)


def test_random_weights_fail_that_check(glyphs_28: PublicDenoiser) -> None:
    torch.manual_seed(0)
    card = glyphs_28.card
    untrained = EdmDenoiser(card.network, card.shape, 10, card.sigma_data).eval()
    labels = torch.arange(10).repeat(2)
    fake = PublicDenoiser(card=card, denoiser=untrained, class_means=glyphs_28.class_means)
    images = _draw(fake, labels, seed=0)
    assert _nearest_mean_accuracy(images, labels, glyphs_28.class_means) < 0.4


def test_glyphs_28_images_differ_within_a_class(glyphs_28: PublicDenoiser) -> None:
    images = _draw(glyphs_28, torch.full((16,), 4), seed=1)
    assert images.std(dim=0).max() > 0.5


def test_batch_size_changes_glyphs_28_by_rounding_only(glyphs_28: PublicDenoiser) -> None:
    labels = torch.arange(10)
    start = torch.randn((10, 1, 28, 28), generator=torch.Generator().manual_seed(2))
    levels = refinement_levels(1.0, 0.01, steps=4, rho=7.0)
    whole = heun(glyphs_28.denoiser, start, levels, labels)
    parts = heun(glyphs_28.denoiser, start, levels, labels, max_batch=3)
    torch.testing.assert_close(parts, whole, rtol=0, atol=2e-3)


def test_glyphs_28_lowers_the_error_at_every_level(glyphs_28: PublicDenoiser) -> None:
    """On a class mean plus noise, the estimate is closer to a clean image than the input is."""
    labels = torch.arange(10)
    gaussian = torch.randn((10, 1, 28, 28), generator=torch.Generator().manual_seed(4))
    clean = _draw(glyphs_28, labels, seed=5).clamp(-1, 1)
    with torch.no_grad():
        for t in (0.2, 0.5, 1.0, 2.0, 5.0, 10.0):
            estimate = glyphs_28.denoiser(clean + t * gaussian, t, labels)
            error = float((estimate - clean).square().mean())
            # Never worse than the better of doing nothing and a constant image.
            assert error < 0.8 * min(t**2, float(clean.var()))


# --- training --------------------------------------------------------------------------------


def test_training_stopped_and_resumed_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.train_public.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("models.train_public.Trainer.preview", lambda _: None)

    def run(out: str, work: str, *more: str) -> int:
        fixed = ["--steps", "3", "--glyphs", "40", "--seed", "7"]
        return train(["--out", str(tmp_path / out), "--work", str(tmp_path / work), *fixed, *more])

    assert run("whole", "a") == 0
    assert run("halves", "b", "--minutes", "0") == 3
    assert not (tmp_path / "halves").exists()
    assert run("halves", "b") == 0
    for name in ("card.json", "denoiser.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    assert (tmp_path / "whole" / "loss.csv").read_text().startswith("step,mean_loss,learning_rate")
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 0
    data = load_public_denoiser(tmp_path / "whole").card.training_data
    assert [(package.name, package.version) for package in data.packages] == [
        (package.name, package.version) for package in font_packages()
    ]
    with pytest.raises(ValueError, match="other settings"):
        run("other", "b", "--steps", "4")


def test_the_card_is_read_without_torch(tmp_path: Path) -> None:
    """`card.json` is plain JSON: a process without torch can show it."""
    shutil.copy(GLYPHS_28 / "card.json", tmp_path)
    code = (
        "import json, sys; card = json.load(open('card.json', encoding='utf-8'));"
        "assert 'torch' not in sys.modules; print(card['name'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "glyphs-28"
