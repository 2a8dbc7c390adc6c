"""The mechanisms that the benches ask about, as JSON, and random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Json = dict[str, Any]

_NUDGED: Final = frozenset({"noise_multiplier", "clip_norm"})


@dataclass(frozen=True)
class Row:
    """A question: epsilon of a mechanism at delta. ``key`` names it on the command line."""

    key: str
    label: str
    mechanism: Json
    delta: float


def block(percent: int, batch: int, public_size: int = 50_000) -> Json:
    """The first paper's denoising block of 50,000 outputs; its clip norm is its batch."""
    return {
        "kind": "denoising_block",
        "schedule": {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80, "rho": 7, "steps": 39},
        "block_fraction": percent / 100,
        "subsampling": "output_wise",
        "sampling": "poisson",
        "subsample_size": batch,
        "public_size": public_size,
        "clip_norm": float(batch),
        "beta": 1.0,
        "outputs": 50_000,
    }


def sampled(q: float, noise_multiplier: float, count: int) -> Json:
    return {
        "kind": "subsampled_gaussian",
        "sampling_probability": q,
        "noise_multiplier": noise_multiplier,
        "count": count,
    }


def dp_sgd(q: float, noise_multiplier: float, steps: int) -> Json:
    return {
        "kind": "dp_sgd",
        "sampling_probability": q,
        "noise_multiplier": noise_multiplier,
        "steps": steps,
    }


FETA_PRO: Final[Json] = {
    "kind": "feta_pro",
    "public_size": 55_000,
    "spatial": {"rounds": 5, "sampling_probability": 0.1091, "noise_multiplier": 20.0},
    "frequency": {"noise_multiplier": 26.6},
    "dp_sgd": {"sampling_probability": 0.0714, "noise_multiplier": 14.78, "steps": 2100},
}


def distinct(parts: int) -> Json:
    """A composition of sampled Gaussians no two of which are alike, ten outputs each."""
    places = [(617 * i % parts) / parts for i in range(parts)]
    return {
        "kind": "composition",
        "parts": [
            {"mechanism": sampled(1e-3 * 10.0 ** (i / parts), 0.6 + 1.4 * x, 10), "count": 1}
            for i, x in enumerate(places)
        ],
    }


ROWS: Final = (
    Row("55", "55 % block, B 25", block(55, 25), 1e-5),
    Row("62", "62 % block, B 25", block(62, 25), 1e-5),
    Row("65", "65 % block, B 25", block(65, 25), 1e-5),
    Row("67", "67 % block, B 25", block(67, 25), 1e-5),
    Row("70", "70 % block, B 25", block(70, 25), 1e-5),
    Row("70-200", "70 % block, B 200", block(70, 200), 1e-5),
    Row("celeba", "CelebA, 55 % block, B 25", block(55, 25, 162_770), 1e-6),
    Row("65-12", "65 % block, B 25", block(65, 25), 1e-12),
    Row("65-20", "65 % block, B 25", block(65, 25), 1e-20),
    Row("sgd", "DP-SGD, q 1/14, σ 14.78, 2,100 steps", dp_sgd(1 / 14, 14.78, 2100), 1e-5),
    Row("counts", "q 0.0075, μ 4.3, 50 outputs", sampled(0.0075, 1 / 4.3, 50), 1e-5),
    Row("heavy", "q 0.05, σ 0.15, 500 outputs", sampled(0.05, 0.15, 500), 1e-6),
    Row("1000", "1,000 distinct sampled Gaussians", distinct(1000), 1e-5),
    Row("feta", "FETA-Pro, three stages", FETA_PRO, 1e-5),
)


def nudged(mechanism: Any, k: int) -> Any:
    """The same mechanism with its noise, or its clip norm, changed by k parts in 10^9.

    No answer to another question helps with this one, and it is the same to eight digits.
    """
    if isinstance(mechanism, list):
        return [nudged(part, k) for part in mechanism]
    if not isinstance(mechanism, dict):
        return mechanism
    return {
        name: value * (1.0 + 1e-9 * k) if name in _NUDGED else nudged(value, k)
        for name, value in mechanism.items()
    }


def _log_uniform(generator: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(generator.uniform(math.log(low), math.log(high))))


def random_release(generator: np.random.Generator) -> tuple[Json, float]:
    """A mechanism of a kind that releases are made of, and a delta in [1e-8, 1e-4].

    One in two is a denoising block, the others are DP-SGD and FETA-Pro alike.
    """

    def uniform(low: float, high: float) -> float:
        return _log_uniform(generator, low, high)

    delta = uniform(1e-8, 1e-4)
    kind = generator.random()
    if kind < 0.5:
        made = block(int(generator.integers(50, 71)), round(uniform(10, 300)))
        return made | {"outputs": round(uniform(1e3, 1e5))}, delta
    trained = dp_sgd(uniform(1e-3, 0.1), uniform(0.8, 20.0), round(uniform(100, 1e4)))
    if kind < 0.75:
        return trained, delta
    del trained["kind"]
    return FETA_PRO | {
        "spatial": FETA_PRO["spatial"] | {"noise_multiplier": uniform(5.0, 50.0)},
        "frequency": {"noise_multiplier": uniform(5.0, 50.0)},
        "dp_sgd": trained,
    }, delta


def random_question(generator: np.random.Generator) -> tuple[Json, float]:
    """A random mechanism, sensible or not, and a delta in [1e-12, 1e-3].

    Three in four are one sampled Gaussian, the others a composition of two to four. Rates are
    log-uniform in [1e-5, 1] (one in ten as far below 1), noise in [0.2, 50], outputs in [1, 1e5].
    """

    def one() -> Json:
        q = _log_uniform(generator, 1e-5, 1.0)
        if generator.random() < 0.1:
            q = 1.0 - q
        noise = _log_uniform(generator, 0.2, 50.0)
        return sampled(q, noise, round(_log_uniform(generator, 1.0, 1e5)))

    delta = _log_uniform(generator, 1e-12, 1e-3)
    if generator.random() < 0.75:
        return one(), delta
    parts = [{"mechanism": one(), "count": 1} for _ in range(generator.integers(2, 5))]
    return {"kind": "composition", "parts": parts}, delta


def in_words(mechanism: Json) -> str:
    """The numbers of a random mechanism of :func:`random_question`."""
    if mechanism["kind"] == "composition":
        return " + ".join(in_words(part["mechanism"]) for part in mechanism["parts"])
    q, noise = mechanism["sampling_probability"], mechanism["noise_multiplier"]
    return f"{mechanism['count']} × (q {q:.3g}, σ {noise:.3g})"
