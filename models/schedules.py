"""Noise grids of the public sampler.

The private block's grid belongs to the mechanism that is charged for it and lives in
`accounting.mechanisms`; this module only lays out the public part that follows the hand-off.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accounting.mechanisms import karras_levels


def refinement_levels(t1: float, sigma_min: float, steps: int, rho: float) -> Tensor:
    """The levels t1 > ... > sigma_min > 0 that `steps` sampler steps go through.

    Args:
        t1: noise level (standard deviation, in pixel units) of the image to refine.
        sigma_min: last level above zero, less than `t1`; not reached when `steps` is 1.
        steps: number of steps, at least 1.
        rho: the grid's exponent; larger values spend more steps at small noise (7 in EDM).

    Returns:
        float64 [steps + 1], strictly falling, ending in 0.

    Raises:
        ValueError: the arguments do not make a falling grid.

    Source: Karras et al. 2022, equation 5.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not 0 < sigma_min < t1 < math.inf:
        raise ValueError(f"need 0 < sigma_min < t1, got sigma_min={sigma_min}, t1={t1}")
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive, got {rho}")
    return torch.tensor([*karras_levels(t1, sigma_min, rho, steps), 0.0], dtype=torch.float64)
