"""The clip and the measured sensitivity: what one unit can do, against what was charged for it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from accounting.mechanisms import DenoisingBlock, EdmSchedule, WeightKind
from models import denoising
from models.denoising import (
    WEIGHTS,
    UnitTable,
    clipped_sums,
    empirical_denoiser,
    group_units,
    take_step,
)

# Rounding of the measurement itself; the clip's own margin lies inside the bound.
SLACK = 1.0 + 1e-12
KINDS: list[WeightKind] = ["uniform", "centred", "density"]

any_float64 = st.floats(width=64)
any_float32 = st.floats(width=32)
magnitudes = st.sampled_from([0.0, 5e-324, 1e-310, 1e-200, 1e-30, 1e-3, 1.0, 1e8, 1e30, 1e200])


def sums_of(
    kind: WeightKind, table: UnitTable, units: Any, x: Any, c: Any, t: float, clip_norm: float
) -> NDArray[np.float64]:
    """The clipped sum of one output over the given units."""
    state, centre = torch.from_numpy(x[None, :].copy()), torch.from_numpy(c[None, :].copy())
    chosen = [(0, np.asarray(units, dtype=np.int64))]
    sums = clipped_sums(WEIGHTS[kind].function, table, chosen, state, centre, t, clip_norm)
    return np.asarray(sums[0].numpy())


def exact_norm_squared(values: NDArray[np.float64]) -> Fraction:
    return sum((Fraction(v) ** 2 for v in values.tolist()), Fraction(0))


# -- the contract of a weight ----------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), single=st.booleans())
def test_a_contribution_never_exceeds_c(
    data: st.DataObject, kind: WeightKind, single: bool
) -> None:
    """In exact rational arithmetic, for adversarial records, x, t and C, one record or several."""
    d = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, 4))
    elements, dtype = (any_float32, np.float32) if single else (any_float64, np.float64)
    records = data.draw(hnp.arrays(dtype, (count, d), elements=elements))
    if not single and data.draw(st.booleans()):
        spread = data.draw(hnp.arrays(np.float64, (count, d), elements=st.floats(-1, 1)))
        records = spread * np.array([data.draw(magnitudes) for _ in range(count)])[:, None]
    x = data.draw(hnp.arrays(np.float64, d, elements=st.floats(-1e200, 1e200)))
    if data.draw(st.booleans()) and np.isfinite(records[0]).all():
        x = records[0].astype(np.float64)  # where the density is largest
    c = data.draw(hnp.arrays(np.float64, d, elements=st.floats(-1e200, 1e200)))
    t = data.draw(st.sampled_from([1e-100, 1e-3, 0.2, 1.0, 80.0, 1e100]))
    clip_norm = data.draw(st.sampled_from([1e-100, 1e-3, 0.3, 1.0, 12.5, 1e100]))
    table = group_units(records, None, np.zeros(count, dtype=np.int64))
    found = sums_of(kind, table, [0], x, c, t, clip_norm)
    assert np.isfinite(found).all()
    assert exact_norm_squared(found) <= Fraction(clip_norm) ** 2


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_row_reads_its_own_record_only(data: st.DataObject, kind: WeightKind) -> None:
    """The contract: row r of the result is the same bits whatever the other rows hold."""
    d, count = data.draw(st.integers(1, 20)), data.draw(st.integers(2, 12))
    records = torch.from_numpy(data.draw(hnp.arrays(np.float64, (count, d), elements=any_float64)))
    finite = st.floats(-1e3, 1e3)
    state = torch.from_numpy(data.draw(hnp.arrays(np.float64, (count, d), elements=finite)))
    centre = torch.from_numpy(data.draw(hnp.arrays(np.float64, (count, d), elements=finite)))
    t = data.draw(st.sampled_from([0.002, 1.0, 80.0]))
    function = WEIGHTS[kind].function
    before = records.clone()
    together = function(state, records, centre, t)
    assert together.log_weight.shape == (count,)
    assert together.base.shape == (count, d)
    for r in range(count):
        alone = function(state[r : r + 1], records[r : r + 1], centre[r : r + 1], t)
        assert torch.equal(
            alone.log_weight.nan_to_num(), together.log_weight[r : r + 1].nan_to_num()
        )
        assert torch.equal(alone.base.nan_to_num(), together.base[r : r + 1].nan_to_num())
    assert torch.equal(records.nan_to_num(), before.nan_to_num())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_unit_adds_the_same_vector_whoever_else_is_there(
    data: st.DataObject, kind: WeightKind
) -> None:
    """Exactly: sum(S with u) - sum(S without u) = sum({u}), in integers times the grid."""
    n, d = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 6))
    records = data.draw(hnp.arrays(np.float64, (n, d), elements=any_float64))
    units = data.draw(hnp.arrays(np.int64, n, elements=st.integers(0, 4)))
    table = group_units(records, None, units)
    everyone = table.units_of(None)
    x, c = np.zeros(d), np.full(d, 0.25)
    u = data.draw(st.integers(0, everyone.size - 1))
    args = (x, c, 1.0, 1.5)
    whole = sums_of(kind, table, everyone, *args)
    rest = sums_of(kind, table, np.delete(everyone, u), *args)
    alone = sums_of(kind, table, [u], *args)
    for a, b, v in zip(whole.tolist(), rest.tolist(), alone.tolist(), strict=True):
        assert Fraction(a) - Fraction(b) == Fraction(v)


def test_the_clip_holds_before_its_result_is_rounded_down() -> None:
    """The rounding toward the grid is not what keeps a norm below C."""
    rng = np.random.default_rng(2)
    for d in (1, 2, 3, 17, 784):
        records = torch.from_numpy(
            rng.normal(size=(100, d)) * 10.0 ** rng.uniform(0, 300, (100, 1))
        )
        block = denoising._Block(torch.arange(100), records, torch.arange(100), None)
        for clip_norm in (0.3, 1.0, 12.5, 1e100):
            weighted = denoising.Weighted(torch.zeros(100, dtype=torch.float64), records.clone())
            clipped = denoising._clip(weighted, block, clip_norm).numpy()
            for row in clipped if d < 100 else clipped[:3]:
                assert exact_norm_squared(row) <= Fraction(clip_norm) ** 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("several", [False, True])
def test_a_weight_that_is_not_a_number_counts_as_zero(bad: float, several: bool) -> None:
    def broken(state: Any, records: Any, centre: Any, level: float) -> denoising.Weighted:
        log_weight = torch.zeros(records.shape[0], dtype=torch.float64)
        log_weight[1] = bad
        return denoising.Weighted(log_weight, records)

    records = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    table = group_units(records, None, [0, 0, 1] if several else None)
    x = torch.zeros((1, 2), dtype=torch.float64)
    everyone = [(0, table.units_of(None))]
    sums = clipped_sums(broken, table, everyone, x, x, 1.0, 10.0)
    np.testing.assert_allclose(sums.numpy(), [[0.6, 0.8]], rtol=1e-7)


def test_a_clipped_vector_keeps_its_direction_and_nearly_all_of_c() -> None:
    rng = np.random.default_rng(0)
    for d in (1, 2, 3, 784, 12_288):
        record = rng.uniform(-1, 1, (1, d)) * 50
        found = sums_of("uniform", group_units(record), [0], np.zeros(d), np.zeros(d), 1.0, 2.5)
        norm = math.sqrt(exact_norm_squared(found))
        assert 2.5 * (1 - 2**-32 * math.sqrt(d) * 2) <= norm <= 2.5
        cosine = float(found @ record[0]) / norm / float(np.linalg.norm(record))
        assert cosine > 1 - 1e-12


def test_a_vector_inside_the_clip_is_left_alone() -> None:
    rng = np.random.default_rng(1)
    record = rng.uniform(-1, 1, (1, 784)) * 0.01
    found = sums_of("uniform", group_units(record), [0], np.zeros(784), np.zeros(784), 1.0, 2.5)
    np.testing.assert_allclose(found, record[0], rtol=0, atol=2.0**-31)
    assert (np.abs(found) <= np.abs(record[0])).all()


def test_a_units_records_are_summed_before_they_are_clipped() -> None:
    """Opposite records of one unit cancel, equal ones are clipped once, not each."""
    v = np.array([3.0, 4.0])
    records = np.stack([v, -v, v, v])
    x = c = np.zeros(2)
    cancelled = sums_of("uniform", group_units(records[:2], None, [0, 0]), [0], x, c, 1.0, 1.0)
    assert np.array_equal(cancelled, np.zeros(2))
    once = sums_of("uniform", group_units(records, None, [0, 1, 0, 0]), [0], x, c, 1.0, 1.0)
    np.testing.assert_allclose(once, [0.6, 0.8], rtol=1e-9)
    small = sums_of("uniform", group_units(records / 100, None, [0, 1, 0, 0]), [0], x, c, 1.0, 1.0)
    np.testing.assert_allclose(small, [0.09, 0.12], atol=1e-9)


# -- measured sensitivity --------------------------------------------------------------------------


def make_block(kind: WeightKind, d: int, **changes: Any) -> DenoisingBlock:
    fields: dict[str, Any] = {
        "schedule": EdmSchedule(sigma_min=0.02, sigma_max=20.0, steps=8),
        "block_steps": 7,
        "clip_norm": 2.5,
        "beta": (0.5, 0.8, 1.0, 1.1, 0.3, 2.0, 0.7),
        "subsample_size": 3,
        "public_size": 30,
        "outputs": 1,
        "weight": kind,
        "centre": "zero" if kind == "centred" else None,
        "feature_dimension": d,
    }
    return DenoisingBlock(**(fields | changes))


def shift_over_noise(
    block: DenoisingBlock, i: int, sums: NDArray[np.float64], other: NDArray[np.float64]
) -> float:
    """|difference of step i's means| over its noise's standard deviation, as the code has it."""
    assert block.weight is not None
    t, next_t = block.levels()[i], block.levels()[i + 1]
    zero = torch.zeros((1, sums.size), dtype=torch.float64)
    means = [
        take_step(
            zero,
            empirical_denoiser(torch.from_numpy(s[None, :]), zero, block.betas()[i], block.divisor),
            zero,
            t,
            next_t,
        )
        for s in (sums, other)
    ]
    std = float(take_step(zero, zero, torch.ones_like(zero), t, next_t)[0, 0])
    return float(torch.linalg.vector_norm(means[0] - means[1])) / std


def adversarial_records(rng: np.random.Generator, n: int, d: int) -> NDArray[np.float64]:
    """Records of every size, some equal, some opposite, some not finite."""
    records = rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-12, 12, (n, 1))
    records[rng.random(n) < 0.2] = rng.normal(size=d)
    records[rng.random(n) < 0.1] *= -1.0
    records[rng.random(n) < 0.05] = rng.choice([np.nan, np.inf, -np.inf, 1e308])
    return np.asarray(records)


@pytest.mark.parametrize("several", [False, True], ids=["records", "units"])
@pytest.mark.parametrize("kind", KINDS)
def test_adding_or_removing_a_unit_moves_a_step_by_at_most_mu(
    kind: WeightKind, several: bool
) -> None:
    """500 random neighbouring pairs for each case, with S as unfavourable as it can be.

    Conditional on the unit's being in S, the two steps' means differ by its contribution alone.
    """
    rng = np.random.default_rng(KINDS.index(kind) + 10 * several)
    closest = 0.0
    for _ in range(500):
        n, d = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        block = make_block(kind, d, clip_norm=float(10.0 ** rng.uniform(-3, 3)))
        mus = block.step_mu()
        i = int(rng.integers(7))
        t = block.levels()[i]
        records = adversarial_records(rng, n, d)
        units = rng.integers(0, 4, n) if several else np.arange(n)
        table = group_units(records, None, units)
        everyone = table.units_of(None)
        x = np.nan_to_num(records[0], nan=0.0, posinf=0.0, neginf=0.0) + t * rng.normal(size=d)
        c = rng.normal(size=d)
        gone = int(rng.integers(everyone.size))
        sums = sums_of(kind, table, everyone, x, c, t, block.clip_norm)
        kept = records[units != np.unique(units)[gone]]
        smaller = group_units(kept, None, units[units != np.unique(units)[gone]])
        other = sums_of(kind, smaller, smaller.units_of(None), x, c, t, block.clip_norm)
        ratio = shift_over_noise(block, i, sums, other) / mus[i]
        assert ratio <= SLACK
        closest = max(closest, ratio)
    assert closest > 0.99  # some of them were worst cases


def test_a_worst_case_record_comes_within_a_percent_at_every_step() -> None:
    d = 5
    record = np.full((1, d), 40.0)
    table = group_units(record)
    for kind in KINDS:
        block = make_block(kind, d)
        for i, mu in enumerate(block.step_mu()):
            # At small t the density is clipped next to the record; at large t it needs a big one.
            t = block.levels()[i]
            reach = 1.0 if kind != "density" else max(1.0, (2 * math.pi * t * t) ** (d / 2))
            big = group_units(record * reach)
            x = record[0] * reach if kind == "density" else np.zeros(d)
            sums = sums_of(kind, big, [0], x, np.zeros(d), t, block.clip_norm)
            none = sums_of(kind, table, [], x, np.zeros(d), t, block.clip_norm)
            assert 0.99 * mu < shift_over_noise(block, i, sums, none) <= mu * SLACK


def test_replacing_a_unit_of_a_fixed_size_draw_moves_a_step_by_at_most_mu() -> None:
    """An added unit takes another's place in S: twice C, which is what the mechanism charges."""
    rng = np.random.default_rng(3)
    d = 4
    block = make_block("uniform", d, sampling="fixed_size")
    closest = 0.0
    for trial in range(1000):
        records = adversarial_records(rng, 5, d)
        if trial % 10 == 0:
            records[1] = -records[0]
        table = group_units(records)
        i = int(rng.integers(7))
        t = block.levels()[i]
        x = np.zeros(d)
        first = sums_of("uniform", table, [0, 2, 3], x, x, t, block.clip_norm)
        second = sums_of("uniform", table, [1, 2, 3], x, x, t, block.clip_norm)
        ratio = shift_over_noise(block, i, first, second) / block.step_mu()[i]
        assert ratio <= SLACK
        closest = max(closest, ratio)
    assert closest > 0.99


def test_a_full_batch_moves_by_at_most_mu_whatever_the_true_n() -> None:
    """The divisor is the public size, so twice as many records as declared add no sensitivity."""
    rng = np.random.default_rng(4)
    d = 4
    block = make_block("uniform", d, subsampling="full_batch", subsample_size=None, public_size=10)
    records = adversarial_records(rng, 20, d)
    records[7] = 1e6
    table = group_units(records)
    x = np.zeros(d)
    everyone = table.units_of(None)
    for i, mu in enumerate(block.step_mu()):
        t = block.levels()[i]
        sums = sums_of("uniform", table, everyone, x, x, t, block.clip_norm)
        other = sums_of("uniform", table, np.delete(everyone, 7), x, x, t, block.clip_norm)
        assert 0.99 * mu < shift_over_noise(block, i, sums, other) <= mu * SLACK
