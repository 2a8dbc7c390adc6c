"""The rendered digits: reproducible, in the stated frame, and of the right class."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models import glyphs
from models.glyphs import (
    SIDE,
    GlyphMix,
    GlyphPackageError,
    font_packages,
    render_glyph,
    render_glyphs,
)

HERSHEY_ONLY = GlyphMix(hershey=1.0, fonts=0.0)
FONTS_ONLY = GlyphMix(hershey=0.0, fonts=1.0)


@pytest.fixture(
    params=[GlyphMix(), HERSHEY_ONLY, FONTS_ONLY], ids=lambda mix: f"{mix.hershey}-{mix.fonts}"
)
def mix(request: pytest.FixtureRequest) -> GlyphMix:
    chosen: GlyphMix = request.param
    return chosen


def test_a_glyph_depends_on_seed_and_index_only(mix: GlyphMix) -> None:
    images, labels = render_glyphs(40, seed=5, mix=mix)
    again, _ = render_glyphs(40, seed=5, mix=mix)
    np.testing.assert_array_equal(images, again)
    for index in (39, 0, 17):
        alone = render_glyph(int(labels[index]), seed=5, index=index, mix=mix)
        np.testing.assert_array_equal(alone, images[index])
    other, _ = render_glyphs(40, seed=6, mix=mix)
    assert (other != images).any(axis=(1, 2)).all()


def test_images_have_the_stated_frame(mix: GlyphMix) -> None:
    images, labels = render_glyphs(200, seed=1, mix=mix)
    assert images.shape == (200, SIDE, SIDE)
    assert images.dtype == np.uint8
    assert (np.bincount(labels) == 20).all()
    axis = np.arange(SIDE)
    for image in images:
        ink = image > 76
        rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
        longest = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1
        assert 16 <= longest <= 22
        mass = image / image.sum()
        centre = (mass.sum(axis=1) @ axis, mass.sum(axis=0) @ axis)
        assert abs(centre[0] - 13.5) < 1.2
        assert abs(centre[1] - 13.5) < 1.2
        assert image[0].max() < 30


def test_classes_can_be_told_apart() -> None:
    """The nearest class mean of a first half names most of a second half."""
    images, labels = render_glyphs(600, seed=2, mix=GlyphMix())
    pixels: NDArray[np.float64] = images.reshape(600, -1).astype(np.float64)
    means = np.stack([pixels[:300][labels[:300] == k].mean(axis=0) for k in range(10)])
    distance = ((pixels[300:, None, :] - means) ** 2).sum(axis=2)
    assert (distance.argmin(axis=1) == labels[300:]).mean() > 0.7


def test_images_of_a_class_differ() -> None:
    images, labels = render_glyphs(300, seed=3, mix=GlyphMix())
    for k in range(10):
        spread = images[labels == k].astype(np.float64).std(axis=0)
        assert spread.max() > 60


def test_progress_reaches_the_end() -> None:
    seen: list[int] = []
    render_glyphs(20, seed=0, mix=GlyphMix(), progress=seen.append)
    assert seen[-1] == 20
    assert seen == sorted(seen)


@pytest.mark.parametrize("shares", [(0.5, 0.6), (1.2, -0.2)])
def test_shares_must_be_a_distribution(shares: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        GlyphMix(*shares)


@pytest.mark.parametrize("label", [-1, 10])
def test_an_unknown_label_is_refused(label: int) -> None:
    with pytest.raises(ValueError, match="label"):
        render_glyph(label, seed=0, index=0, mix=GlyphMix())


@pytest.mark.parametrize(
    ("module", "distribution", "mix"),
    [
        ("HersheyFonts", "Hershey-Fonts", HERSHEY_ONLY),
        ("rendercv_fonts", "rendercv-fonts", FONTS_ONLY),
        ("pymupdf_fonts", "pymupdf-fonts", FONTS_ONLY),
        ("matplotlib", "matplotlib", FONTS_ONLY),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, distribution: str, mix: GlyphMix
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == module:
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    for kept in (glyphs._hershey_strokes, glyphs._font_mask, glyphs._font_file):
        kept.cache_clear()
    with pytest.raises(GlyphPackageError, match=f"{distribution} is not installed.*`glyphs`"):
        render_glyphs(200, seed=0, mix=mix)


def test_the_card_cannot_leave_out_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [package.name for package in font_packages()] == [
        "Hershey-Fonts",
        "rendercv-fonts",
        "pymupdf-fonts",
        "matplotlib",
    ]

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(GlyphPackageError, match=r"not installed.*`glyphs`"):
        font_packages()
