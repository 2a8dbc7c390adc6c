"""From a private block's output to a finished image: re-noise, then refine publicly.

Everything here is post-processing of a released array: it reads no private record and costs no
privacy. The functions are pure. The denoiser, the grid and the Gaussian numbers are arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from models.denoisers import Denoiser

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all), counted over every batch."""


def renoise(x: Tensor, t0: float, t1: float, gaussian: Tensor) -> Tensor:
    """Raises the noise of `x` from level t0 to level t1 >= t0.

    Args:
        x: images with noise of standard deviation `t0`, any shape.
        gaussian: independent standard normals of x's shape; unused when t1 equals t0.

    Returns:
        x + sqrt(t1^2 - t0^2) * gaussian. With t1 = t0 (a re-noising depth T of 0) that is `x`.

    Raises:
        ValueError: t1 < t0, a level that is negative or not finite, or shapes that differ.
    """
    if not 0 <= t0 <= t1 < math.inf:
        raise ValueError(f"need 0 <= t0 <= t1, got t0={t0}, t1={t1}")
    if gaussian.shape != x.shape:
        raise ValueError(f"gaussian is {tuple(gaussian.shape)}, x is {tuple(x.shape)}")
    if t1 == t0:
        return x
    # (t1 - t0)(t1 + t0) keeps its digits where t1^2 - t0^2 would cancel.
    return x + math.sqrt((t1 - t0) * (t1 + t0)) * gaussian


@torch.no_grad()
def heun(
    denoiser: Denoiser,
    x: Tensor,
    levels: Tensor,
    labels: Tensor | None,
    max_batch: int = 256,
    progress: Progress | None = None,
) -> Tensor:
    """Solves the probability-flow equation dx/dt = (x - D(x; t)) / t along `levels`.

    The deterministic sampler: Heun's second-order step, and Euler's for the last step to 0. Each
    image is solved alone, so `max_batch` bounds memory and changes the result by rounding only.

    Args:
        denoiser: posterior mean of the clean image.
        x: [B, C, H, W], images with noise of standard deviation levels[0].
        levels: [n + 1], strictly falling; the last one may be 0.
        labels: [B] class indices, or None for a denoiser without classes.
        max_batch: most images handed to the denoiser at once.
        progress: called after every step of every batch.

    Returns:
        [B, C, H, W], the images at level levels[-1].

    Raises:
        ValueError: the grid does not fall, labels do not match x, or max_batch is below 1.

    Source: Karras et al. 2022, algorithm 1 with sigma(t) = t and s(t) = 1.
    """
    grid = [float(level) for level in levels.tolist()]
    falls = all(later < earlier for earlier, later in itertools.pairwise(grid))
    if not grid or not falls or grid[-1] < 0 or not math.isfinite(grid[0]):
        raise ValueError(f"levels must fall strictly and stay at or above 0, got {grid}")
    if labels is not None and labels.shape != x.shape[:1]:
        raise ValueError(f"labels is {tuple(labels.shape)}, x is {tuple(x.shape)}")
    if max_batch < 1:
        raise ValueError(f"max_batch must be at least 1, got {max_batch}")
    steps = len(grid) - 1
    batches = math.ceil(len(x) / max_batch)
    finished = []
    for batch in range(batches):
        part = slice(batch * max_batch, (batch + 1) * max_batch)
        state = x[part]
        part_labels = None if labels is None else labels[part]
        for step, (t, t_next) in enumerate(itertools.pairwise(grid)):
            slope = (state - denoiser(state, t, part_labels)) / t
            moved = state + (t_next - t) * slope
            if t_next > 0:
                slope_next = (moved - denoiser(moved, t_next, part_labels)) / t_next
                moved = state + (t_next - t) * (slope + slope_next) / 2
            state = moved
            if progress is not None:
                progress(batch * steps + step + 1, batches * steps)
        finished.append(state)
    return torch.cat(finished) if finished else x.clone()


def refine(
    denoiser: Denoiser,
    x: Tensor,
    t0: float,
    levels: Tensor,
    labels: Tensor | None,
    gaussian: Tensor,
    max_batch: int = 256,
    progress: Progress | None = None,
) -> Tensor:
    """Re-noises `x` from t0 to levels[0], then runs `heun` down to levels[-1].

    Arguments, results and errors are those of `renoise` (with t1 = levels[0]) and `heun`.
    """
    start = renoise(x, t0, float(levels[0]), gaussian)
    return heun(denoiser, start, levels, labels, max_batch=max_batch, progress=progress)
