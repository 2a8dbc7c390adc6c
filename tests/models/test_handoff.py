"""Re-noising and the public sampler, against answers known in closed form."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from models.denoisers import Denoiser
from models.handoff import heun, refine, renoise
from models.schedules import refinement_levels


class GaussianDenoiser:
    """Posterior mean where clean pixels are N(mean[label], spread^2).

    The probability-flow solution is then x(t) = mean + (x(T) - mean) * sqrt((spread^2 + t^2) /
    (spread^2 + T^2)).
    """

    def __init__(self, means: Tensor, spread: float) -> None:
        self.means = means
        self.spread = spread
        self.largest_batch = 0
        self.calls = 0

    def __call__(self, x: Tensor, t: Tensor | float, labels: Tensor | None) -> Tensor:
        self.calls += 1
        self.largest_batch = max(self.largest_batch, len(x))
        assert labels is not None
        mean = self.means[labels].view(-1, 1, 1, 1)
        level = torch.as_tensor(t, dtype=x.dtype).reshape(-1, 1, 1, 1)
        return mean + (x - mean) * self.spread**2 / (self.spread**2 + level**2)

    def solution(self, x: Tensor, start: float, end: float, labels: Tensor) -> Tensor:
        mean = self.means[labels].view(-1, 1, 1, 1)
        ratio = (self.spread**2 + end**2) / (self.spread**2 + start**2)
        return mean + (x - mean) * math.sqrt(ratio)


@pytest.fixture
def problem() -> tuple[GaussianDenoiser, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    denoiser = GaussianDenoiser(torch.linspace(-1, 1, 4, dtype=torch.float64), spread=0.5)
    labels = torch.arange(7) % 4
    x = 5.0 * torch.randn((7, 1, 6, 6), generator=generator, dtype=torch.float64)
    return denoiser, x, labels


def test_the_fake_is_a_denoiser(problem: tuple[GaussianDenoiser, Tensor, Tensor]) -> None:
    denoiser: Denoiser = problem[0]
    assert denoiser(problem[1], 1.0, problem[2]).shape == problem[1].shape


def test_heun_reaches_the_exact_solution(
    problem: tuple[GaussianDenoiser, Tensor, Tensor],
) -> None:
    denoiser, x, labels = problem
    levels = refinement_levels(5.0, 0.002, steps=200, rho=7.0)
    exact = denoiser.solution(x, 5.0, 0.0, labels)
    assert (heun(denoiser, x, levels, labels) - exact).abs().max() < 2e-4


def test_heun_is_of_second_order(problem: tuple[GaussianDenoiser, Tensor, Tensor]) -> None:
    """Halving the steps of a smooth problem divides the error by four."""
    denoiser, x, labels = problem
    exact = denoiser.solution(x, 5.0, 0.5, labels)
    errors = []
    for steps in (20, 40, 80, 160):
        # The last level is above 0, so that every step is a Heun step.
        levels = torch.linspace(5.0, 0.5, steps + 1, dtype=torch.float64)
        errors.append(float((heun(denoiser, x, levels, labels) - exact).abs().max()))
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert orders[-1] == pytest.approx(2.0, abs=0.1)


def test_twenty_steps_are_thirty_nine_evaluations(
    problem: tuple[GaussianDenoiser, Tensor, Tensor],
) -> None:
    denoiser, x, labels = problem
    heun(denoiser, x, refinement_levels(5.0, 0.01, steps=20, rho=7.0), labels)
    assert denoiser.calls == 39


def test_one_step_is_the_denoiser_itself(
    problem: tuple[GaussianDenoiser, Tensor, Tensor],
) -> None:
    """Euler from t to 0 lands on D(x; t)."""
    denoiser, x, labels = problem
    levels = refinement_levels(5.0, 0.01, steps=1, rho=7.0)
    torch.testing.assert_close(heun(denoiser, x, levels, labels), denoiser(x, 5.0, labels))


def test_batches_are_bounded_and_change_nothing(
    problem: tuple[GaussianDenoiser, Tensor, Tensor],
) -> None:
    denoiser, x, labels = problem
    levels = refinement_levels(5.0, 0.01, steps=5, rho=7.0)
    whole = heun(denoiser, x, levels, labels)
    denoiser.largest_batch = 0
    seen: list[tuple[int, int]] = []
    parts = heun(
        denoiser, x, levels, labels, max_batch=3, progress=lambda done, of: seen.append((done, of))
    )
    assert denoiser.largest_batch == 3
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    assert seen == [(k, 15) for k in range(1, 16)]


def test_no_images_give_no_images(problem: tuple[GaussianDenoiser, Tensor, Tensor]) -> None:
    denoiser, x, labels = problem
    levels = refinement_levels(5.0, 0.01, steps=5, rho=7.0)
    assert heun(denoiser, x[:0], levels, labels[:0]).shape == (0, 1, 6, 6)


def test_heun_refuses_what_is_not_a_run(
    problem: tuple[GaussianDenoiser, Tensor, Tensor],
) -> None:
    denoiser, x, labels = problem
    good = refinement_levels(5.0, 0.01, steps=3, rho=7.0)
    for bad in ([], [1.0, 2.0], [1.0, 1.0], [1.0, -0.5], [math.inf, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="levels"):
            heun(denoiser, x, torch.tensor(bad), labels)
    with pytest.raises(ValueError, match="labels"):
        heun(denoiser, x, good, labels[:3])
    with pytest.raises(ValueError, match="max_batch"):
        heun(denoiser, x, good, labels, max_batch=0)


def test_renoise_adds_the_missing_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((40, 1, 50, 50), 3.0, dtype=torch.float64)
    gaussian = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    added = renoise(x, t0=2.0, t1=5.0, gaussian=gaussian) - x
    # 100,000 draws: the standard deviation is known to 0.22 %, six of which are 1.4 %.
    assert float(added.std()) == pytest.approx(math.sqrt(21.0), rel=0.014)
    torch.testing.assert_close(added, math.sqrt(21.0) * gaussian)


def test_a_depth_of_zero_adds_nothing() -> None:
    x = torch.ones(2, 1, 4, 4)
    assert torch.equal(renoise(x, 1.7, 1.7, torch.full_like(x, math.nan)), x)


@pytest.mark.parametrize(("t0", "t1"), [(2.0, 1.0), (-1.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_renoise_refuses_levels_that_fall(t0: float, t1: float) -> None:
    x = torch.ones(2, 1, 4, 4)
    with pytest.raises(ValueError, match="t0"):
        renoise(x, t0, t1, torch.zeros_like(x))


def test_renoise_refuses_gaussians_of_another_shape() -> None:
    with pytest.raises(ValueError, match="gaussian"):
        renoise(torch.ones(2, 1, 4, 4), 1.0, 2.0, torch.zeros(1, 1, 4, 4))


def test_refine_is_renoise_then_heun(problem: tuple[GaussianDenoiser, Tensor, Tensor]) -> None:
    denoiser, x, labels = problem
    gaussian = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    levels = refinement_levels(6.0, 0.01, steps=6, rho=7.0)
    result = refine(denoiser, x, 5.0, levels, labels, gaussian, max_batch=2)
    start = x + math.sqrt(11.0) * gaussian
    torch.testing.assert_close(result, heun(denoiser, start, levels, labels))


def test_refinement_levels_fall_from_t1_to_zero() -> None:
    levels = refinement_levels(8.0, 0.01, steps=20, rho=7.0)
    assert levels.dtype == torch.float64
    assert levels.shape == (21,)
    assert levels[0] == 8.0
    assert float(levels[-2]) == pytest.approx(0.01)
    assert levels[-1] == 0
    assert (levels.diff() < 0).all()
    assert refinement_levels(8.0, 0.01, steps=1, rho=7.0).tolist() == [8.0, 0.0]


@pytest.mark.parametrize(
    ("t1", "sigma_min", "steps", "rho"),
    [
        (8.0, 0.01, 0, 7.0),
        (0.01, 0.01, 5, 7.0),
        (8.0, 0.0, 5, 7.0),
        (math.inf, 0.01, 5, 7.0),
        (8.0, 0.01, 5, 0.0),
        (8.0, 0.01, 5, math.nan),
    ],
)
def test_refinement_levels_refuse_a_grid_that_does_not_fall(
    t1: float, sigma_min: float, steps: int, rho: float
) -> None:
    with pytest.raises(ValueError, match=r"steps|sigma_min|rho"):
        refinement_levels(t1, sigma_min, steps, rho)
