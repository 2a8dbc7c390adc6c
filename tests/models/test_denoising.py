"""The private block: its law, its contract with the mechanism, and what must not show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accounting.errors import InvalidMechanism, InvalidRequest
from accounting.mechanisms import ClassShare, DenoisingBlock, EdmSchedule
from models import denoising
from models.denoising import (
    BLOCK_NOISE,
    SELECTION,
    WEIGHTS,
    Outputs,
    OutputSpec,
    clipped_sums,
    density,
    group_units,
    planned_outputs,
    run_block,
    run_shard,
)
from models.noise import KeyedNoise, NoiseStream, inclusion_threshold

NOISE = KeyedNoise(bytes(range(1, 33)))
D = 6


def make_block(**changes: Any) -> DenoisingBlock:
    """A small unconditional block of five steps, centred, with one field or another changed."""
    fields: dict[str, Any] = {
        "schedule": EdmSchedule(sigma_min=0.05, sigma_max=3.0, steps=9),
        "block_steps": 5,
        "clip_norm": 1.25,
        "beta": 0.75,
        "subsample_size": 4,
        "public_size": 20,
        "outputs": 12,
        "weight": "centred",
        "centre": "a public mean",
        "feature_dimension": D,
    }
    fields |= changes
    if fields["weight"] != "centred":
        fields["centre"] = None
    return DenoisingBlock(**fields)


CLASSES = (ClassShare(3, 5, 0.5), ClassShare(0, 4, 0.25), ClassShare(7, 3, 1.0))


def make_records(n: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, (n, D)).astype(np.float32)


def run(
    block: DenoisingBlock, records: Any, labels: Any = None, units: Any = None, **kw: Any
) -> Outputs:
    centre = np.linspace(-0.3, 0.4, D) if block.weight == "centred" else None
    kw.setdefault("outputs", planned_outputs(block))
    return run_block(block, records, labels, units, kw.pop("centre", centre), noise=NOISE, **kw)


# -- a slow reference ------------------------------------------------------------------------------


def reference_selection(
    block: DenoisingBlock, stream: NoiseStream, units: Sequence[int], q: float
) -> list[int]:
    if block.subsampling == "full_batch":
        return list(units)
    if block.sampling == "fixed_size":
        return [units[i] for i in stream.subset(len(units), block.divisor).tolist()]
    words = stream.words(len(units)).tolist()
    return [u for u, w in zip(units, words, strict=True) if w < inclusion_threshold(q)]


def reference_weight(
    kind: str | None, x: Any, record: Any, c: Any, t: float
) -> NDArray[np.float64]:
    """w(x, x_r, t) (x_r - c), as the formulas stand, without a logarithm."""
    if kind == "uniform":
        return np.asarray(record)
    if kind == "centred":
        return np.asarray(record - c)
    d = record.size
    w = math.exp(-float(((x - record) ** 2).sum()) / (2 * t * t)) / (2 * math.pi * t * t) ** (d / 2)
    return np.asarray(w * record)


def reference(
    block: DenoisingBlock,
    records: NDArray[Any],
    labels: NDArray[np.int64] | None,
    units: NDArray[np.int64] | None,
    centre: NDArray[np.float64],
) -> NDArray[np.float64]:
    """One output, one step, one unit at a time, with the same draws."""
    flat = records.astype(np.float64).reshape(len(records), -1)
    d = flat.shape[1]
    ids = np.arange(len(flat)) if units is None else units
    levels = block.levels()
    out = []
    for spec in planned_outputs(block):
        own = flat if spec.label is None else flat[labels == spec.label]
        own_ids = ids if spec.label is None else ids[labels == spec.label]
        names = sorted(set(own_ids.tolist()))
        if block.classes is None:
            q = block.sampling_probability
        else:
            q = {s.label: s.sampling_probability for s in block.classes}[spec.label or 0]
        noise, picks = NOISE.stream(BLOCK_NOISE, spec.index), NOISE.stream(SELECTION, spec.index)
        x = levels[0] * noise.normals(d)
        chosen = reference_selection(block, picks, names, q)
        for i in range(block.block_steps):
            t, dt = levels[i], levels[i] - levels[i + 1]
            if i > 0 and block.subsampling == "per_step":
                chosen = reference_selection(block, picks, names, q)
            total = np.zeros(d)
            for unit in chosen:
                v = np.zeros(d)
                for record in own[own_ids == unit]:
                    v = v + reference_weight(block.weight, x, record, centre, t)
                total += v / max(1.0, float(np.linalg.norm(v)) / block.clip_norm)
            e = centre + total / (block.betas()[i] * block.divisor)
            xi = noise.normals(d)
            x = (1 - 2 * dt / t) * x + (2 * dt / t) * e + math.sqrt(2 * t * dt) * xi
        out.append(x)
    return np.array(out)


MODES: list[dict[str, Any]] = [
    {},
    {"sampling": "fixed_size"},
    {"subsampling": "per_step"},
    {"subsampling": "per_step", "sampling": "fixed_size"},
    {"subsampling": "full_batch", "subsample_size": None},
    {"classes": CLASSES, "outputs": None, "public_size": None},
    {"classes": CLASSES, "outputs": None, "public_size": None, "subsampling": "per_step"},
    {"beta": (0.5, 1.0, 2.0, 1.5, 0.75)},
]


@pytest.mark.parametrize("several", [False, True], ids=["records", "units"])
@pytest.mark.parametrize("weight", ["uniform", "centred", "density"])
@pytest.mark.parametrize(
    "mode", MODES, ids=lambda m: "-".join(map(str, m.values()))[:40] or "plain"
)
def test_it_follows_the_recursion(mode: dict[str, Any], weight: str, several: bool) -> None:
    block = make_block(weight=weight, **mode)
    records = make_records(23)
    units = np.random.default_rng(5).integers(100, 111, 23) if several else None
    labels = np.array([0, 3, 5])[(np.arange(23) if units is None else units) % 3]
    centre = np.linspace(-0.3, 0.4, D) if weight == "centred" else np.zeros(D)
    expected = reference(block, records, labels, units, centre)
    found = run(block, records, labels, units)
    # A contribution is rounded to 2^-32 of C; the density weight then reads the x that this moved.
    np.testing.assert_allclose(found.x, expected, rtol=0, atol=3e-8)
    assert found.level == block.handoff_level == block.levels()[-1]


@pytest.mark.parametrize(("weight", "clip_norm"), [("uniform", 0.5), ("centred", 5.0)])
def test_its_moments_are_the_closed_form(weight: str, clip_norm: float) -> None:
    """With one record always in S the block is linear: x_m is Gaussian with known moments."""
    n_out = 6_000
    block = make_block(
        weight=weight, clip_norm=clip_norm, subsample_size=1, public_size=1, outputs=n_out
    )
    record = np.array([[0.9, -0.4, 0.1, 0.0, 0.7, -0.8]])
    c = np.linspace(-0.3, 0.4, D) if weight == "centred" else np.zeros(D)
    v = record[0] - c
    e = c + v / max(1.0, float(np.linalg.norm(v)) / clip_norm) / 0.75
    mean, variance = np.zeros(D), block.levels()[0] ** 2
    for t, u in zip(block.levels(), block.levels()[1:], strict=False):
        keep = 1 - 2 * (t - u) / t
        mean = keep * mean + (1 - keep) * e
        variance = keep**2 * variance + 2 * t * (t - u)
    x = run(block, record).x
    assert (np.abs(x.mean(axis=0) - mean) < 5 * math.sqrt(variance / n_out)).all()
    assert (np.abs(x.var(axis=0) / variance - 1) < 5 * math.sqrt(2 / n_out)).all()
    correlations = np.corrcoef(x.T) - np.eye(D)
    assert np.abs(correlations).max() < 5 / math.sqrt(n_out)


def test_no_records_leave_noise_about_the_centre() -> None:
    """E = c exactly when S is empty: the closed form with c alone."""
    block = make_block(outputs=2_000)
    for records in (np.empty((0, D)), np.full((30, D), np.nan)):
        x = run(block, records).x
        mean, variance = np.zeros(D), block.levels()[0] ** 2
        for t, u in zip(block.levels(), block.levels()[1:], strict=False):
            keep = 1 - 2 * (t - u) / t
            mean = keep * mean + (1 - keep) * np.linspace(-0.3, 0.4, D)
            variance = keep**2 * variance + 2 * t * (t - u)
        assert (np.abs(x.mean(axis=0) - mean) < 5 * math.sqrt(variance / 2_000)).all()


# -- what must not matter --------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["uniform", "centred", "density"])
@pytest.mark.parametrize(
    "mode", MODES[:6], ids=lambda m: "-".join(map(str, m.values()))[:40] or "plain"
)
def test_shards_and_sizes_of_work_change_no_bit(
    mode: dict[str, Any], weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(weight=weight, **mode)
    records, labels = make_records(23), np.arange(23) % 4
    units = np.arange(23) // 4 * 4 + labels
    centre = np.linspace(-0.3, 0.4, D) if weight == "centred" else None
    planned = planned_outputs(block)
    whole = run(block, records, labels, units).x
    for parts in ((planned[:5], planned[5:]), tuple((spec,) for spec in reversed(planned))):
        for part in parts:
            shard = run_shard(block, records, labels, units, centre, part, NOISE).x
            assert np.array_equal(shard, whole[[spec.index for spec in part]])
    monkeypatch.setattr(denoising, "CHUNK_OUTPUTS", 5)
    monkeypatch.setattr(denoising, "BLOCK_VALUES", 3 * D)
    monkeypatch.setattr(denoising, "HELD_BLOCKS", 2)
    assert np.array_equal(run(block, records, labels, units).x, whole)


def test_threads_change_no_bit() -> None:
    block = make_block(weight="density", outputs=64, feature_dimension=700, clip_norm=0.5)
    records = np.random.default_rng(0).uniform(-0.01, 0.01, (20, 700))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(block, records).x
        torch.set_num_threads(2)
        two = run(block, records).x
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(one, two)


def test_a_rows_sum_is_the_same_bits_in_any_company() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 70_001)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = denoising._row_sums(values.clone())
        torch.set_num_threads(2)
        alone = torch.cat([denoising._row_sums(values[r : r + 1].clone()) for r in range(3)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    exact = [math.fsum(row) for row in values.tolist()]
    np.testing.assert_allclose(together.numpy(), exact, rtol=0, atol=1e-11)
    assert denoising._row_sums(torch.zeros((2, 0))).tolist() == [0.0, 0.0]


def test_the_order_of_records_changes_no_bit_of_a_sum() -> None:
    """Sums are exact, so a full batch does not show in which order its records lie."""
    block = make_block(subsampling="full_batch", subsample_size=None, weight="density")
    records = make_records(200)
    shuffled = records[np.random.default_rng(1).permutation(200)]
    assert np.array_equal(run(block, records).x, run(block, shuffled).x)


def test_a_block_of_work_holds_whole_units_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoising, "BLOCK_VALUES", 10 * D)
    units = np.repeat(np.arange(40), np.random.default_rng(2).integers(1, 6, 40))
    units = np.concatenate([units, np.full(17, 40)])  # one unit larger than a block
    table = group_units(make_records(units.size), None, units)
    selected = [(k, np.arange(41)) for k in range(3)]
    blocks = list(denoising._blocks(table, selected, torch.device("cpu")))
    for block in blocks:
        rows = block.records.shape[0]
        assert rows <= 10 or (rows == 17 and block.owner.shape[0] == 1)
        assert torch.equal(torch.unique(block.unit_of_row), torch.arange(block.owner.shape[0]))
    assert sum(block.records.shape[0] for block in blocks) == 3 * units.size
    assert sum(block.owner.shape[0] for block in blocks) == 3 * 41


def test_float32_and_float64_records_agree() -> None:
    block, records = make_block(), make_records(20)
    assert np.array_equal(run(block, records).x, run(block, records.astype(np.float64)).x)


def test_images_are_flattened() -> None:
    block, records = make_block(), make_records(20)
    assert np.array_equal(run(block, records).x, run(block, records.reshape(20, 1, 2, 3)).x)


def test_an_input_is_never_written_to() -> None:
    block, records = make_block(weight="density"), make_records(20)
    records[3] = np.inf
    records.flags.writeable = False
    before = records.copy()
    run(block, records)
    assert np.array_equal(records, before)
    centre = np.linspace(-1, 1, D)
    centre.flags.writeable = False
    for subsampling in ("output_wise", "full_batch"):
        size = None if subsampling == "full_batch" else 4
        centred = make_block(subsampling=subsampling, subsample_size=size)
        run(centred, records, centre=centre)
    assert np.array_equal(records, before)


# -- failure is an output --------------------------------------------------------------------------


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("weight", ["uniform", "centred", "density"])
@pytest.mark.parametrize("bad", BAD)
def test_a_non_finite_record_counts_as_zero(weight: str, bad: float) -> None:
    """Exactly: under uniform a zero record, under centred one that lies on the centre."""
    block = make_block(weight=weight, subsampling="full_batch", subsample_size=None)
    records = make_records(20).astype(np.float64)
    broken, without = records.copy(), np.delete(records, 7, axis=0)
    broken[7, 2] = bad
    assert np.array_equal(run(block, broken).x, run(block, without).x)


def test_a_non_finite_record_leaves_the_rest_of_its_unit() -> None:
    block = make_block(subsampling="full_batch", subsample_size=None)
    records = make_records(20).astype(np.float64)
    units = np.arange(20) // 2
    broken = records.copy()
    broken[7, 2] = math.nan
    without, fewer = np.delete(records, 7, axis=0), np.delete(units, 7)
    assert np.array_equal(run(block, broken, None, units).x, run(block, without, None, fewer).x)


@pytest.mark.parametrize("weight", ["uniform", "centred", "density"])
@pytest.mark.parametrize("size", [5e-324, 1e-300, 1e-160, 1e160, 1.7e308])
@pytest.mark.parametrize("clip_norm", [1e-90, 1.25, 1e90])
def test_extreme_magnitudes_stay_finite(weight: str, size: float, clip_norm: float) -> None:
    block = make_block(weight=weight, clip_norm=clip_norm)
    records = np.random.default_rng(3).choice([-1.0, 0.0, 1.0], (20, D)) * size
    units = np.arange(20) // 3
    for ids in (None, units):
        assert np.isfinite(run(block, records, None, ids).x).all()


def test_a_huge_record_is_clipped_to_its_direction() -> None:
    records = np.zeros((1, D))
    records[0, 1] = -1.7e308
    table, x = group_units(records), torch.zeros((1, D), dtype=torch.float64)
    sums = clipped_sums(denoising.uniform, table, [(0, np.array([0]))], x, x, 1.0, 2.0)
    np.testing.assert_allclose(sums.numpy(), [[0, -2.0, 0, 0, 0, 0]], rtol=1e-9)


def test_density_is_clipped_where_it_overflows_and_vanishes_where_it_underflows() -> None:
    """d = 3,000: log w is +9,000 near a record at t = 0.02, and -10^8 far from it."""
    d = 3000
    record = np.full((1, d), 0.01)
    near, far = torch.full((1, d), 0.01, dtype=torch.float64), torch.full((1, d), 5.0).double()
    c = torch.zeros((1, d), dtype=torch.float64)
    chosen = [(0, np.array([0]))]
    clipped = clipped_sums(density, group_units(record), chosen, near, c, 0.02, 1.5)
    assert float(clipped.norm()) == pytest.approx(1.5, rel=1e-6)
    assert float(clipped.norm()) <= 1.5
    nothing = clipped_sums(density, group_units(record), chosen, far, c, 0.02, 1.5)
    assert float(nothing.abs().max()) == 0.0


def test_density_is_the_gaussian_density() -> None:
    rng = np.random.default_rng(4)
    x, records = rng.normal(size=(50, D)), rng.uniform(-1, 1, (50, D))
    for t in (0.2, 1.0, 4.0):
        expected = np.exp(-((x - records) ** 2).sum(axis=1) / (2 * t * t))
        expected /= (2 * math.pi * t * t) ** (D / 2)
        found = density(torch.from_numpy(x), torch.from_numpy(records), torch.zeros(50, D), t)
        np.testing.assert_allclose(found.log_weight.exp().numpy(), expected, rtol=1e-12)
        assert np.array_equal(found.base.numpy(), records)


def test_beta_stands_outside_the_clip_alone() -> None:
    """What a clipped unit adds to E is C/(beta * divisor), so doubling beta halves it exactly."""
    moved = []
    for beta in (0.5, 1.0, 2.0):
        block = make_block(weight="density", beta=beta, outputs=1, subsample_size=20, block_steps=1)
        record = np.full((1, D), 0.3)
        shift = run(block, record).x - run(block, np.empty((0, D))).x
        moved.append(shift[0])
    np.testing.assert_allclose(moved[0], 2 * moved[1], rtol=1e-6)
    np.testing.assert_allclose(moved[1], 2 * moved[2], rtol=1e-6)


# -- classes and units -----------------------------------------------------------------------------


def test_a_class_draws_from_its_own_units_only() -> None:
    """Changing every record of the other classes changes no bit of a class's outputs."""
    block = make_block(classes=CLASSES, outputs=None, public_size=None)
    records, labels = make_records(40), np.arange(40) % 8
    other = records.copy()
    other[labels != 3] = 0.0
    kept = [spec.index for spec in planned_outputs(block) if spec.label == 3]
    a, b = run(block, records, labels).x, run(block, other, labels).x
    assert np.array_equal(a[kept], b[kept])
    rest = np.setdiff1d(np.arange(12), kept)
    assert not np.array_equal(a[rest], b[rest])


def test_a_class_without_units_is_drawn_like_any_other() -> None:
    block = make_block(classes=CLASSES, outputs=None, public_size=None)
    records, labels = make_records(40), np.zeros(40, dtype=np.int64)
    found = run(block, records, labels)
    assert np.isfinite(found.x).all()
    kept = [spec.index for spec in found.specs if spec.label == 3]
    assert np.array_equal(found.x[kept], run(block, records[:0], labels[:0]).x[kept])


def test_a_centre_for_each_class() -> None:
    """At clip norm tiny, what is left of E is the class's own centre."""
    block = make_block(classes=CLASSES, outputs=None, public_size=None, clip_norm=1e-90)
    records, labels = make_records(40), np.arange(40) % 8
    zero = run(block, records, labels, centre=np.zeros(D)).x
    centres = {3: np.full(D, 1.0), 0: np.full((2, 3), -2.0), 7: np.zeros(D), 99: np.ones(1)}
    moved = run(block, records, labels, centre=centres).x - zero
    pull = 1.0
    for t, u in zip(block.levels(), block.levels()[1:], strict=False):
        pull *= 1 - 2 * (t - u) / t
    expected = {3: 1 - pull, 0: -2 * (1 - pull), 7: 0.0}
    for spec in planned_outputs(block):
        assert spec.label is not None
        np.testing.assert_allclose(moved[spec.index], expected[spec.label], atol=1e-12)


def test_a_unit_that_spans_classes_stays_in_one() -> None:
    records = make_records(5)
    table = group_units(records, [4, 2, 2, 4, 2], [8, 8, 8, 9, 9])
    assert table.units_of(2).tolist() == [0, 1]
    assert table.units_of(4).tolist() == []
    assert table.rows.tolist() == [1, 2, 4]
    assert table.starts.tolist() == [0, 2, 3]


def test_units_are_named_by_the_order_of_their_ids() -> None:
    table = group_units(make_records(5), [1, 0, 1, 0, 0], [30, 10, 30, 20, 20])
    assert table.rows.tolist() == [1, 3, 4, 0, 2]
    assert table.starts.tolist() == [0, 1, 3, 5]
    assert table.units_of(0).tolist() == [0, 1]
    assert table.units_of(1).tolist() == [2]
    assert table.units_of(None).tolist() == [0, 1, 2]
    assert table.units_of(77).tolist() == []


def test_without_classes_labels_have_no_say() -> None:
    block, records = make_block(), make_records(20)
    labels = np.arange(20) % 3
    units = np.arange(20) // 4
    assert np.array_equal(run(block, records, labels, units).x, run(block, records, None, units).x)


# -- S ---------------------------------------------------------------------------------------------


def counts_of_s(block: DenoisingBlock, n: int) -> NDArray[np.int64]:
    """|S| of each output, from one step over records that are all e_1, with C = beta = 1.

    Against the same draws without records, that step moves x by (2 dt/t) |S| / B along e_1.
    """
    records = np.zeros((n, D))
    records[:, 0] = 1.0
    one = replace(block, block_steps=1, beta=1.0, weight="uniform", centre=None, clip_norm=1.0)
    t, u = one.levels()
    with_records = run(one, records).x[:, 0]
    without = run(one, records[:0]).x[:, 0]
    sizes = (with_records - without) / (2 * (t - u) / t) * one.divisor
    rounded = np.rint(sizes)
    np.testing.assert_allclose(sizes, rounded, atol=1e-6)
    return rounded.astype(np.int64)


def test_poisson_sizes_have_the_mechanisms_rate() -> None:
    block = make_block(outputs=2000, subsample_size=5, public_size=50)
    for n in (50, 80):  # the rate does not follow the true n
        sizes = counts_of_s(block, n)
        q = 0.1
        assert abs(sizes.mean() - n * q) < 5 * math.sqrt(n * q * (1 - q) / 2000)
        assert abs(sizes.var() / (n * q * (1 - q)) - 1) < 5 * math.sqrt(2.5 / 2000)
        assert np.unique(sizes).size > 8


def test_fixed_size_takes_exactly_b_or_all_there_are() -> None:
    block = make_block(outputs=200, sampling="fixed_size", subsample_size=5, public_size=50)
    assert (counts_of_s(block, 50) == 5).all()
    assert (counts_of_s(block, 3) == 3).all()
    assert (counts_of_s(block, 0) == 0).all()


def test_a_full_batch_takes_all_whatever_was_declared() -> None:
    block = make_block(subsampling="full_batch", subsample_size=None, public_size=30)
    assert (counts_of_s(block, 50) == 50).all()
    assert (counts_of_s(block, 10) == 10).all()


def test_s_is_kept_output_wise_and_fresh_per_step() -> None:
    """The steps' clipped sums as the sampler sees them, caught on their way."""
    records = np.eye(D)[np.arange(40) % D] * (1 + np.arange(40))[:, None] / 100

    def sums_by_step(block: DenoisingBlock) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        original = denoising.empirical_denoiser

        def spy(sums: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(sums.clone())
            return original(sums, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(denoising, "empirical_denoiser", spy)
            run(block, records)
        return seen

    kept = sums_by_step(make_block(weight="uniform"))
    assert len(kept) == 5
    assert all(torch.equal(kept[0], later) for later in kept[1:])
    fresh = sums_by_step(make_block(weight="uniform", subsampling="per_step"))
    assert len(fresh) == 5
    # Two draws of S at q = 0.2 from 40 units coincide with probability below 1e-6 for each output.
    assert all(
        not torch.equal(a[k], b[k]) for a in fresh for b in fresh if a is not b for k in range(12)
    )
    assert torch.equal(fresh[0], kept[0])  # the first S is the same draw


# -- the contract with the mechanism ---------------------------------------------------------------


def test_planned_outputs_are_those_charged_for() -> None:
    assert planned_outputs(make_block(outputs=2)) == (OutputSpec(0), OutputSpec(1))
    block = make_block(
        classes=(ClassShare(3, 1, 0.5), ClassShare(0, 2, 0.5)), outputs=None, public_size=None
    )
    assert planned_outputs(block) == (OutputSpec(0, 3), OutputSpec(1, 0), OutputSpec(2, 0))


def test_other_outputs_are_refused() -> None:
    block = make_block(classes=CLASSES, outputs=None, public_size=None)
    records, labels, centre = make_records(20), np.arange(20) % 4, np.zeros(D)
    planned = planned_outputs(block)
    wrong: list[tuple[OutputSpec, ...]] = [
        (),
        planned[:-1],
        (*planned[:-1], OutputSpec(12, 7)),
        (*planned[:-1], OutputSpec(11, 0)),
        (*planned[:-1], OutputSpec(11)),
        (*planned[:-1], OutputSpec(-1, 7)),
        (*planned[:-1], planned[0]),
        (*planned, planned[0]),
    ]
    for outputs in wrong:
        with pytest.raises(InvalidRequest, match="outputs"):
            run_block(block, records, labels, None, centre, outputs, NOISE)
    for outputs in wrong[2:]:
        with pytest.raises(InvalidRequest, match="outputs"):
            run_shard(block, records, labels, None, centre, outputs, NOISE)


def test_what_may_not_be_charged_does_not_run() -> None:
    records = make_records(20)
    for changes, field in (
        ({"weight": None}, "weight"),
        ({"feature_dimension": None}, "feature_dimension"),
        ({"centre": None}, "centre"),
        (
            {"subsampling": "full_batch", "subsample_size": None, "sampling": "fixed_size"},
            "sampling",
        ),
    ):
        block = make_block(**changes)
        with pytest.raises(InvalidMechanism, match=field):
            run(block, records, centre=None)


def test_shapes_that_do_not_fit_are_refused() -> None:
    block = make_block()
    conditional = make_block(classes=CLASSES, outputs=None, public_size=None)
    good, centre = make_records(20), np.zeros(D)
    nan_centre = np.full(D, math.nan)
    cases: list[tuple[DenoisingBlock, Any, Any, Any, Any, str]] = [
        (block, good[:, :5], None, None, centre, "records"),
        (block, good.astype(np.uint8), None, None, centre, "records"),
        (block, good, None, np.arange(19), centre, "units"),
        (conditional, good, None, None, centre, "labels"),
        (conditional, good, np.arange(19), None, centre, "labels"),
        (conditional, good, np.zeros(20), None, centre, "labels"),
        (block, good, None, None, None, "centre"),
        (block, good, None, None, np.zeros(5), "centre"),
        (block, good, None, None, nan_centre, "centre"),
        (block, good, None, None, {0: centre}, "centre"),
        (conditional, good, np.arange(20), None, {3: centre, 0: centre}, "centre"),
        (make_block(weight="uniform"), good, None, None, centre, "centre"),
    ]
    for case, records, labels, units, c, field in cases:
        with pytest.raises(InvalidRequest) as caught:
            run_block(case, records, labels, units, c, planned_outputs(case), NOISE)
        assert caught.value.field == field


def test_every_weight_of_the_mechanism_is_here() -> None:
    assert set(WEIGHTS) == {"uniform", "centred", "density"}


def test_progress_counts_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoising, "CHUNK_OUTPUTS", 5)
    done: list[int] = []
    run(make_block(), make_records(20), progress=done.append)
    assert done == [5, 10, 12]

    class Stopped(Exception):
        pass

    def stop(_: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        run(make_block(), make_records(20), progress=stop)


def test_long_grids_are_cheap() -> None:
    """The levels are read once a chunk: reading 3,000 of them at each of 2,999 steps would show."""
    schedule = EdmSchedule(sigma_min=0.05, sigma_max=3.0, steps=3000)
    block = make_block(schedule=schedule, block_steps=2999, outputs=2)
    assert np.isfinite(run(block, make_records(20)).x).all()


def test_sums_are_multiples_of_the_grid() -> None:
    """What makes them exact: each is an integer times one power of two set by C alone."""
    records = make_records(50)
    x = torch.zeros((1, D), dtype=torch.float64)
    sums = clipped_sums(
        denoising.uniform, group_units(records), [(0, np.arange(50))], x, x, 1.0, 1.25
    )
    for value in sums[0].tolist():
        assert (Fraction(value) / Fraction(1, 2**32)).denominator == 1
