"""The rendered digits: reproducible, in the stated frame, and of the right class."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models import glyphs
from models.glyphs import (
    SIDE,
    STROKES_ONLY,
    GlyphMix,
    GlyphPackageError,
    font_packages,
    render_glyph,
    render_glyphs,
)


def _packages_installed() -> bool:
    try:
        font_packages()
    except GlyphPackageError:
        return False
    return True


# Without the font packages the same checks run on the strokes, which need none.
MIXES = (
    [STROKES_ONLY, GlyphMix(), GlyphMix(0.0, 1.0, 0.0), GlyphMix(0.0, 0.0, 1.0)]
    if _packages_installed()
    else [STROKES_ONLY]
)


@pytest.fixture(params=MIXES, ids=lambda mix: f"{mix.strokes}-{mix.hershey}-{mix.fonts}")
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
    images, labels = render_glyphs(1000, seed=2, mix=STROKES_ONLY)
    pixels: NDArray[np.float64] = images.reshape(1000, -1).astype(np.float64)
    means = np.stack([pixels[:500][labels[:500] == k].mean(axis=0) for k in range(10)])
    distance = ((pixels[500:, None, :] - means) ** 2).sum(axis=2)
    assert (distance.argmin(axis=1) == labels[500:]).mean() > 0.7


def test_images_of_a_class_differ() -> None:
    images, labels = render_glyphs(300, seed=3, mix=STROKES_ONLY)
    for k in range(10):
        spread = images[labels == k].astype(np.float64).std(axis=0)
        assert spread.max() > 60


def test_progress_reaches_the_end() -> None:
    seen: list[int] = []
    render_glyphs(20, seed=0, mix=STROKES_ONLY, progress=seen.append)
    assert seen[-1] == 20
    assert seen == sorted(seen)


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (1.2, -0.2, 0.0)])
def test_shares_must_be_a_distribution(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        GlyphMix(*shares)


@pytest.mark.parametrize("label", [-1, 10])
def test_an_unknown_label_is_refused(label: int) -> None:
    with pytest.raises(ValueError, match="label"):
        render_glyph(label, seed=0, index=0, mix=STROKES_ONLY)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_fonts(name: str, package: str | None = None) -> Any:
        if name == "HersheyFonts":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_fonts)
    glyphs._hershey_strokes.cache_clear()
    with pytest.raises(GlyphPackageError, match=r"Hershey-Fonts.*glyphs"):
        render_glyph(3, seed=0, index=0, mix=GlyphMix(0.0, 1.0, 0.0))


def test_strokes_need_no_font_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, package: str | None = None) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert render_glyph(8, seed=0, index=0, mix=STROKES_ONLY).max() > 200
