"""Public training images: labelled digits drawn by this module, 28x28, white on black.

Two sources are mixed.

* `hershey`: the engraving alphabets of Hershey-Fonts, polylines drawn with a round pen.
* `fonts`: typefaces from rendercv-fonts, pymupdf-fonts and matplotlib.

Both are slanted, bent and given another weight at random. Neither contains handwriting, digitised
or imitated: the faces that are used are named below, script, brush and pixel typefaces are not
among them, and the figures of Hershey's script alphabet are slanted roman ones. A private data set
of handwritten digits is therefore disjoint from this data by construction, which is what a
certificate of the hybrid sampler assumes.

The frame is the usual one of 28x28 digit sets: the digit's longest side fits a 20x20 box and its
centre of mass sits at the centre of the image.

Every image depends on `(seed, index, mix)` only, so a set can be rendered in any order or in
parts. The font packages are imported when a glyph needs them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Floats = NDArray[np.float64]
Curve = tuple[tuple[float, float], ...]
"""Corners (x right, y down) of a polyline."""

SIDE: Final = 28
BOX: Final = 20.0
CLASSES: Final = tuple("0123456789")


class GlyphPackageError(ImportError):
    """A font package that the requested mix needs is not installed."""


@dataclass(frozen=True)
class FontPackage:
    """A distribution the `hershey` or `fonts` source reads, for the model card."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class GlyphMix:
    """Shares of the two sources, each in [0, 1], adding up to 1."""

    hershey: float = 0.25
    fonts: float = 0.75

    def __post_init__(self) -> None:
        shares = (self.hershey, self.fonts)
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise ValueError(f"shares must be at least 0 and add up to 1, got {shares}")


_LICENCES: Final = {
    "Hershey-Fonts": "MIT (package); Hershey fonts free to use",
    "rendercv-fonts": (
        "MIT (package); SIL OFL 1.1, Apache-2.0, Ubuntu, XCharter and Fontin licences (faces)"
    ),
    "pymupdf-fonts": "SIL OFL 1.1 (FiraGO)",
    "matplotlib": "PSF-based (package); DejaVu, STIX and BaKoMa licences (faces)",
}

# Distinct digit shapes only: most names of the package share one of these alphabets' digits.
_HERSHEY_FACES: Final = ("futural", "futural", "futural", "timesr", "scripts", "futuram")

_RENDERCV_FACES: Final = (
    ("EB Garamond", "EBGaramond-Regular.ttf"),
    ("Fontin", "Fontin-Italic.otf"),
    ("Fontin", "Fontin-Regular.otf"),
    ("Gentium Book Plus", "GentiumBookPlus-Italic.ttf"),
    ("Gentium Book Plus", "GentiumBookPlus-Regular.ttf"),
    ("Lato", "Lato-Italic.ttf"),
    ("Lato", "Lato-Regular.ttf"),
    ("Mukta", "Mukta-Regular.ttf"),
    ("Noto Sans", "NotoSans-Italic.ttf"),
    ("Noto Sans", "NotoSans-Regular.ttf"),
    ("Noto Sans", "NotoSansJP-Regular.ttf"),
    ("Open Sans", "OpenSans-Italic.ttf"),
    ("Open Sans", "OpenSans-Regular.ttf"),
    ("Open Sauce Sans", "OpenSauceSans-Regular.ttf"),
    ("Poppins", "Poppins-Italic.ttf"),
    ("Poppins", "Poppins-Regular.ttf"),
    ("Raleway", "Raleway-Italic.ttf"),
    ("Roboto", "Roboto-Bold.ttf"),
    ("Roboto", "Roboto-Italic.ttf"),
    ("Roboto", "Roboto-Regular.ttf"),
    ("Source Sans 3", "SourceSans3-Italic.ttf"),
    ("Source Sans 3", "SourceSans3-Regular.ttf"),
    ("Ubuntu", "Ubuntu-Italic.ttf"),
    ("Ubuntu", "Ubuntu-Regular.ttf"),
    ("XCharter", "XCharter-Italic.otf"),
    ("XCharter", "XCharter-Regular.otf"),
)
_PYMUPDF_FACES: Final = ("FiraGO_Regular", "FiraGO_Italic", "FiraGO_Bold")
_MATPLOTLIB_FACES: Final = (
    "DejaVuSans.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSerif-Italic.ttf",
    "STIXGeneralItalic.ttf",
    "cmr10.ttf",
    "cmss10.ttf",
    "cmti10.ttf",
)


def font_packages() -> tuple[FontPackage, ...]:
    """The distributions that the two sources read, with their installed versions.

    Raises `GlyphPackageError` if one is missing.
    """
    return tuple(
        FontPackage(name=name, version=_installed_version(name), licence=licence)
        for name, licence in _LICENCES.items()
    )


def render_glyph(label: int, seed: int, index: int, mix: GlyphMix) -> NDArray[np.uint8]:
    """One digit as uint8 [28, 28], 0 for the ground and up to 255 for ink.

    Raises `ValueError` for a label outside 0..9, `GlyphPackageError` if the source drawn for this
    index needs a package that is missing.
    """
    if not 0 <= label < len(CLASSES):
        raise ValueError(f"label must be in 0..9, got {label}")
    rng = np.random.default_rng((seed, index))
    if rng.random() < mix.hershey:
        ink = _draw_pen(_hershey_path(label, rng), rng)
    else:
        ink = _draw_font(label, rng)
    blur = rng.uniform(-0.4, 0.5)
    if blur > 0.2:
        ink = np.asarray(ndimage.gaussian_filter(ink, blur), dtype=np.float64)
    ink = np.clip(ink * rng.uniform(0.92, 1.08), 0.0, 1.0)
    return np.asarray(np.rint(ink * 255), dtype=np.uint8)


def render_glyphs(
    count: int,
    seed: int,
    mix: GlyphMix,
    progress: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """`count` digits as uint8 [count, 28, 28] and their labels as int64 [count].

    Image i has label i mod 10, so any multiple of ten is class-balanced. `progress` is called
    with the number of images done, about a hundred times.
    """
    images = np.zeros((count, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int64) % len(CLASSES)
    every = max(1, count // 100)
    for index in range(count):
        images[index] = render_glyph(int(labels[index]), seed, index, mix)
        if progress is not None and (index + 1) % every == 0:
            progress(index + 1)
    return images, labels


# --- pen paths -------------------------------------------------------------------------------


def _hershey_path(label: int, rng: np.random.Generator) -> list[Floats]:
    face = _HERSHEY_FACES[rng.integers(len(_HERSHEY_FACES))]
    strokes = [np.asarray(stroke, dtype=np.float64) for stroke in _hershey_strokes(face)[label]]
    points = np.concatenate(strokes)
    low, high = points.min(axis=0), points.max(axis=0)
    height = float(high[1] - low[1])
    path = [_densify((stroke - low) / height) for stroke in strokes]
    return _bend(path, rng, width=math.exp(rng.normal(0.0, 0.2)), slant=rng.normal(0.1, 0.22))


@cache
def _hershey_strokes(face: str) -> tuple[tuple[Curve, ...], ...]:
    """The strokes of "0".."9" in a Hershey alphabet, in the font's own units (y down)."""
    fonts = _import("HersheyFonts", "Hershey-Fonts").HersheyFonts()
    fonts.load_default_font(face)
    return tuple(
        tuple(
            tuple((float(x), float(y)) for x, y in stroke)
            for stroke in fonts.strokes_for_text(digit)
        )
        for digit in CLASSES
    )


# --- geometry --------------------------------------------------------------------------------


def _densify(points: Floats, step: float = 0.08) -> Floats:
    """The polyline [n, 2] with extra points, so that bending it gives a curve."""
    parts = []
    for start, end in itertools.pairwise(points):
        count = max(1, math.ceil(float(np.linalg.norm(end - start)) / step))
        parts.append(start + (end - start) * np.arange(count)[:, None] / count)
    return np.concatenate([*parts, points[-1:]])


def _bend(
    path: Sequence[Floats], rng: np.random.Generator, width: float, slant: float
) -> list[Floats]:
    """Bends by smooth random waves, then applies width, slant and a small rotation."""
    # Waves of half a period to one period over the digit: local proportions change, strokes do
    # not shake.
    phases = rng.uniform(0, 2 * math.pi, (2, 3))
    sizes = rng.normal(0.0, 0.025, (2, 3))
    turn = rng.normal(0.0, 0.1)
    cosine, sine = math.cos(turn), math.sin(turn)
    bent = []
    for points in path:
        x, y = points[:, 0], points[:, 1]
        waves = [
            sizes[axis, 0] * np.sin(math.pi * y + phases[axis, 0])
            + sizes[axis, 1] * np.sin(math.pi * x + phases[axis, 1])
            + sizes[axis, 2] * np.sin(2 * math.pi * y + phases[axis, 2])
            for axis in range(2)
        ]
        across = width * (x + waves[0]) - slant * (y - 0.5)
        down = y + waves[1]
        bent.append(
            np.stack([cosine * across - sine * down, sine * across + cosine * down], axis=1)
        )
    return bent


def _draw_pen(path: Sequence[Floats], rng: np.random.Generator) -> Floats:
    """Draws pen paths with a round pen of random width; float [28, 28] in [0, 1]."""
    radius = float(np.clip(1.35 * math.exp(rng.normal(0.0, 0.28)), 0.7, 2.4))
    softness = rng.uniform(0.8, 1.3)
    points = np.concatenate(path)
    low, high = points.min(axis=0), points.max(axis=0)
    room = rng.uniform(18.8, BOX) - 2 * radius
    scale = room / max(float((high - low).max()), 1e-6)
    starts = np.concatenate([part[:-1] for part in path]) * scale
    ends = np.concatenate([part[1:] for part in path]) * scale
    # Centre of mass from the pen path: each piece weighs its length.
    lengths = np.linalg.norm(ends - starts, axis=1)
    centre = ((starts + ends) / 2 * lengths[:, None]).sum(axis=0) / max(lengths.sum(), 1e-9)
    middle = (SIDE - 1) / 2
    starts, ends = starts - centre + middle, ends - centre + middle
    # The pen presses harder here and lighter there.
    along = np.linspace(0, 1, len(starts))
    press = 1 + rng.normal(0.0, 0.1) * np.sin(2 * math.pi * (along + rng.random()))
    return _ink(starts, ends, radius * press, softness)


def _ink(starts: Floats, ends: Floats, radii: Floats, softness: float) -> Floats:
    """Coverage of capsules [k, 2] to [k, 2] with the given radii, in pixels, as [28, 28]."""
    axis = np.arange(SIDE, dtype=np.float64)
    span = ends - starts
    squared = np.maximum((span**2).sum(axis=1), 1e-12)
    # [28 rows, 28 columns, k pieces]; the row and the column terms are separate until `part`.
    across = axis[None, :, None] - starts[:, 0]
    down = axis[:, None, None] - starts[:, 1]
    part = np.clip(across * (span[:, 0] / squared) + down * (span[:, 1] / squared), 0.0, 1.0)
    distance = np.hypot(across - part * span[:, 0], down - part * span[:, 1])
    inside: Floats = (radii - distance).max(axis=2)
    return np.clip(inside / softness + 0.5, 0.0, 1.0)


# --- typefaces -------------------------------------------------------------------------------


def _draw_font(label: int, rng: np.random.Generator) -> Floats:
    """Renders a typeface's digit, bends it and changes its weight; float [28, 28] in [0, 1]."""
    mask = _font_mask(int(rng.integers(_font_count())), label)
    size = mask.shape[0]
    # The output pixel (row, column) reads the mask at a slanted, rotated, waved place.
    axis = np.linspace(-1.0, 1.0, size)
    x, y = np.meshgrid(axis, axis)
    width = math.exp(rng.normal(0.0, 0.18))
    slant, turn = rng.normal(0.08, 0.2), rng.normal(0.0, 0.1)
    across = (math.cos(turn) * x + math.sin(turn) * y) * width
    down = -math.sin(turn) * x + math.cos(turn) * y
    across = across + slant * down
    for field in range(2):
        wave = rng.normal(0.0, 0.05) * np.sin(3 * y * rng.uniform(0.6, 1.4) + rng.uniform(0, 6))
        wave += rng.normal(0.0, 0.05) * np.sin(3 * x * rng.uniform(0.6, 1.4) + rng.uniform(0, 6))
        if field == 0:
            across = across + wave
        else:
            down = down + wave
    places = np.stack([(down + 1) / 2 * (size - 1), (across + 1) / 2 * (size - 1)])
    bent = np.asarray(ndimage.map_coordinates(mask, places, order=1), dtype=np.float64)
    # A blurred mask crossed at another level is a lighter or bolder weight of the face.
    soft = np.asarray(ndimage.gaussian_filter(bent, 2.0), dtype=np.float64)
    bold = 1 / (1 + np.exp(-(soft - rng.uniform(0.2, 0.5)) / 0.06))
    return _fit(bold, rng.uniform(18.8, BOX))


def _fit(mask: Floats, box: float) -> Floats:
    """Shrinks the inked part to `box` pixels and puts its centre of mass at the image centre."""
    rows = np.flatnonzero(mask.max(axis=1) > 0.3)
    columns = np.flatnonzero(mask.max(axis=0) > 0.3)
    if len(rows) == 0 or len(columns) == 0:
        return np.zeros((SIDE, SIDE))
    scale = max(rows[-1] - rows[0], columns[-1] - columns[0], 1) / box
    smooth = np.asarray(ndimage.gaussian_filter(mask, 0.4 * scale), dtype=np.float64)
    row, column = (float(value) for value in ndimage.center_of_mass(smooth))
    axis = (np.arange(SIDE) - (SIDE - 1) / 2) * scale
    places = np.stack(np.meshgrid(row + axis, column + axis, indexing="ij"))
    return np.asarray(ndimage.map_coordinates(smooth, places, order=1), dtype=np.float64)


@cache
def _font_count() -> int:
    return len(_RENDERCV_FACES) + len(_PYMUPDF_FACES) + len(_MATPLOTLIB_FACES)


@cache
def _font_mask(face: int, label: int) -> Floats:
    """A face's digit, 64 pixels tall, centred in a 96x96 mask of values in [0, 1]."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(io.BytesIO(_font_file(face)), 84)
    digit = CLASSES[label]
    left, top, right, bottom = font.getbbox(digit)
    picture = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)), 0)
    ImageDraw.Draw(picture).text((-left, -top), digit, fill=255, font=font)
    scale = 64 / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    canvas = Image.new("L", (96, 96), 0)
    canvas.paste(picture, ((96 - size[0]) // 2, (96 - size[1]) // 2))
    return np.asarray(canvas, dtype=np.float64) / 255


@cache
def _font_file(face: int) -> bytes:
    if face < len(_RENDERCV_FACES):
        family, name = _RENDERCV_FACES[face]
        return (_package_folder("rendercv_fonts", "rendercv-fonts") / family / name).read_bytes()
    face -= len(_RENDERCV_FACES)
    if face < len(_PYMUPDF_FACES):
        module = _import(f"pymupdf_fonts.{_PYMUPDF_FACES[face]}", "pymupdf-fonts")
        return bytes(module.fontbuffer)
    face -= len(_PYMUPDF_FACES)
    folder = _package_folder("matplotlib", "matplotlib") / "mpl-data" / "fonts" / "ttf"
    return (folder / _MATPLOTLIB_FACES[face]).read_bytes()


def _package_folder(module: str, distribution: str) -> Path:
    location = _import(module, distribution).__file__
    if location is None:
        raise GlyphPackageError(f"{distribution} has no folder on disk")
    return Path(location).parent


def _import(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GlyphPackageError(_missing(distribution)) from error


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise GlyphPackageError(_missing(distribution)) from error


def _missing(distribution: str) -> str:
    return f"{distribution} is not installed: install the `glyphs` extra"
