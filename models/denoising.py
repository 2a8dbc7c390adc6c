"""The private denoising block: weights, clipping, subsampling, steps.

For each output, from x ~ N(0, t_0^2 I) through the block's levels t_0 > ... > t_m,

    x <- (1 - 2 dt/t) x + (2 dt/t) E + sqrt(2 t dt) xi,      dt = t - t',
    E   = c + 1/(beta * divisor) * sum_{u in S} clip(v_u, C),
    v_u = sum_{r in u} w(x, x_r, t) (x_r - c)

(first paper, equations 1 and 6 and algorithm 1, with a public divisor). S holds *units*, v_u sums
over a unit's records and is clipped once; c is public, has coefficient exactly 1 whatever S is, and
is zero for the weights that are not centred. beta stands in E alone, outside the clip, and not in
w: there it divides what one unit can move E by, C/(beta * divisor), which is the sensitivity that
:class:`accounting.mechanisms.DenoisingBlock` charges. In w it would stand a second time.

Every number with a privacy meaning (C, beta, divisor, rates, levels, counts, how S is drawn) is
read from the mechanism that was charged. Nothing here fails, stops or grows because of what the
records hold: a non-finite record counts as zero, a missing class gives an empty sum, and memory is
bounded by constants whatever |S| is.

**Clipped sums are exact.** Each clipped contribution is rounded toward zero to a multiple of a
power of two g = 2^floor(log2 C) * 2^-32 and summed in 64-bit integers. So one unit moves the sum by
a vector of norm at most C in exact arithmetic, and the sum does not depend on the order of the
records, on blocks, shards, threads or the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from accounting.errors import InvalidRequest
from accounting.mechanisms import DenoisingBlock, WeightKind, require_chargeable
from models.noise import KeyedNoise, NoiseStream

# Purposes of the streams: one for S, one for x_0 and then each step's xi, in step order.
SELECTION: Final = "denoising_block.selection"
BLOCK_NOISE: Final = "denoising_block.noise"

# Outputs advanced together, and the most values of gathered records held at a time (8 bytes each,
# in about eight temporaries). Neither changes any result.
CHUNK_OUTPUTS: Final = 128
BLOCK_VALUES: Final = 1 << 19
# Blocks of a kept S that stay gathered from step to step; a larger S is drawn and gathered anew.
HELD_BLOCKS: Final = 16

# A coordinate of a clipped vector is at most 2^33 g, so 2^30 units cannot overflow an int64; a
# mechanism's public sizes end at 10^9. The rounding moves a contribution by under sqrt(d) 2^-32 C.
_GRID_BITS: Final = 32

# Clipping aims at C (1 - 2^-46). A norm computed here is off by at most 32 half-ulps: one for each
# square, one for each level of the summing tree (at most 30), one or two for the root; scaling a
# row adds a few more. 2^-46 is 128 half-ulps.
_CLIP_MARGIN: Final = 2.0**-46

FloatArray = NDArray[np.float32] | NDArray[np.float64]
IntArray = NDArray[np.int64]


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------


class Weighted(NamedTuple):
    """R weighted vectors v_r = exp(log_weight_r) * base_r, before the clip."""

    log_weight: Tensor  # [R]
    base: Tensor  # [R, d]


WeightFunction = Callable[[Tensor, Tensor, Tensor, float], Weighted]
"""``weight(state, records, centre, level)``: the one contract of every weight.

state [R, d] is the output's current x, already released; records [R, d]; centre [R, d] is public;
level is t. Row r of the result may depend on row r of the arguments and on nothing else, so it
reads one record, the released state and public data. Non-finite rows are allowed: they count as
zero. The clip is not the weight's business.
"""


def uniform(state: Tensor, records: Tensor, centre: Tensor, level: float) -> Weighted:  # noqa: ARG001
    """w = 1 on the record itself: E is the clipped mean of S."""
    return Weighted(records.new_zeros(records.shape[0]), records)


def centred(state: Tensor, records: Tensor, centre: Tensor, level: float) -> Weighted:  # noqa: ARG001
    """w = 1 on the record's offset from the public centre: C is spent on what is not public."""
    return Weighted(records.new_zeros(records.shape[0]), records - centre)


def density(state: Tensor, records: Tensor, centre: Tensor, level: float) -> Weighted:  # noqa: ARG001
    """The paper's weight, w = N(x; x_r, t^2 I), in logarithms (equation 4).

        log w = -|x - x_r|^2 / (2 t^2) - (d/2) log(2 pi t^2)

    At a record's typical distance |x - x_r|^2 = d t^2 this is -(d/2) log(2 pi e t^2): far below
    zero while t > 0.242 and far above, that is always clipped, below it.
    """
    d = records.shape[1]
    scaled = (state - records).div_(level)
    constant = 0.5 * d * (math.log(2.0 * math.pi) + 2.0 * math.log(level))
    return Weighted(_row_sums(scaled.square_()).mul_(-0.5).sub_(constant), records)


@dataclass(frozen=True)
class Weight:
    """A weight function and what the block may assume of it.

    Attributes:
        function: computes the weighted vectors.
        reads_state: whether w depends on x or t; if not, a kept S has one sum for all steps.
        has_centre: whether the record's offset from c is weighted, and c is added back to E.
    """

    function: WeightFunction
    reads_state: bool
    has_centre: bool


WEIGHTS: Final[Mapping[WeightKind, Weight]] = {
    "uniform": Weight(uniform, reads_state=False, has_centre=False),
    "centred": Weight(centred, reads_state=False, has_centre=True),
    "density": Weight(density, reads_state=True, has_centre=False),
}


# --------------------------------------------------------------------------------------------------
# Units
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitTable:
    """Records grouped by unit; a unit is named by its place in the order of unit ids.

    Attributes:
        records: (n, d) floats, never copied as a whole.
        rows: record rows ordered by unit.
        starts: unit u holds rows[starts[u]:starts[u + 1]].
        members: the units of each label; of the label None, all units.
    """

    records: FloatArray
    rows: IntArray
    starts: IntArray
    members: Mapping[int | None, IntArray]

    def units_of(self, label: int | None) -> IntArray:
        """The units that outputs of this label draw from; an absent class has none."""
        return self.members.get(label, np.empty(0, dtype=np.int64))


def group_units(
    records: FloatArray, labels: ArrayLike | None = None, unit_index: ArrayLike | None = None
) -> UnitTable:
    """Groups records into units, and units into classes.

    A unit has one label. Ingest sees to it; should a unit span several all the same, it counts for
    the smallest of them and its other records are left out, which looks at that unit alone and so
    keeps every unit inside one class.

    Args:
        records: shape (n, ...), float32 or float64, scaled to [-1, 1]; flattened in C order.
        labels: class of each record, shape (n,), or None for unconditional work.
        unit_index: unit id of each record, shape (n,); None makes each record its own unit.

    Raises:
        InvalidRequest: shapes or types do not fit together. No value is looked at.
    """
    if records.dtype not in (np.float32, np.float64):
        raise InvalidRequest("records", "must be float32 or float64, scaled to [-1, 1]")
    n = records.shape[0]
    flat = records.reshape(n, math.prod(records.shape[1:]))
    ids = np.arange(n) if unit_index is None else np.asarray(unit_index)
    if ids.shape != (n,):
        raise InvalidRequest("units", "must hold one unit id for each record")
    known, unit_of_row = np.unique(ids, return_inverse=True)
    kept = np.ones(n, dtype=np.bool_)
    unit_label = np.full(known.size, np.iinfo(np.int64).max)
    if labels is not None:
        row_label = np.asarray(labels)
        if row_label.shape != (n,) or not np.issubdtype(row_label.dtype, np.integer):
            raise InvalidRequest("labels", "must hold one integer for each record")
        row_label = row_label.astype(np.int64)
        np.minimum.at(unit_label, unit_of_row, row_label)
        kept = row_label == unit_label[unit_of_row]
    order = np.argsort(unit_of_row, kind="stable")
    rows = order[kept[order]].astype(np.int64)
    starts = np.zeros(known.size + 1, dtype=np.int64)
    np.cumsum(np.bincount(unit_of_row[kept], minlength=known.size), out=starts[1:])
    members: dict[int | None, IntArray] = {None: np.arange(known.size, dtype=np.int64)}
    if labels is not None and known.size:
        by_label = np.argsort(unit_label, kind="stable").astype(np.int64)
        values, first = np.unique(unit_label[by_label], return_index=True)
        for value, units in zip(values.tolist(), np.split(by_label, first[1:]), strict=True):
            members[value] = units
    return UnitTable(flat, rows, starts, members)


class _Block(NamedTuple):
    """Whole units of one or several outputs, gathered for one pass of arithmetic."""

    owner: Tensor  # [K] place of the output each unit was drawn for
    records: Tensor  # [R, d] float64
    unit_of_row: Tensor  # [R] in 0..K-1
    rank: NDArray[np.int64] | None  # [R] place of a record within its unit; None: one record each


def _blocks(
    table: UnitTable, selected: Iterable[tuple[int, IntArray]], device: torch.device
) -> Iterator[_Block]:
    """Packs (owner, units) pairs into blocks of at most BLOCK_VALUES values, never cutting a unit.

    A unit larger than that makes a block by itself; ingest bounds a unit's records publicly.
    """
    limit = max(1, BLOCK_VALUES // max(1, table.records.shape[1]))
    pending: list[tuple[int, IntArray]] = []
    room = limit
    for owner, units in selected:
        ends = np.cumsum(table.starts[units + 1] - table.starts[units])
        first = 0
        while first < units.size:
            used = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, used + room, side="right"))
            if last == first:  # the next unit does not fit
                if pending:
                    yield _gather(table, pending, device)
                    pending, room = [], limit
                    continue
                last = first + 1
            pending.append((owner, units[first:last]))
            room -= int(ends[last - 1]) - used
            first = last
    if pending:
        yield _gather(table, pending, device)


def _gather(
    table: UnitTable, pending: Sequence[tuple[int, IntArray]], device: torch.device
) -> _Block:
    units = np.concatenate([u for _, u in pending])
    owner = np.repeat([o for o, _ in pending], [u.size for _, u in pending])
    lengths = table.starts[units + 1] - table.starts[units]
    unit_of_row = np.repeat(np.arange(units.size), lengths)
    rank = np.arange(unit_of_row.size) - (np.cumsum(lengths) - lengths)[unit_of_row]
    rows = table.rows[table.starts[units][unit_of_row] + rank]
    gathered = np.asarray(table.records[rows], dtype=np.float64)
    return _Block(
        torch.from_numpy(owner).to(device),
        torch.from_numpy(gathered).to(device),
        torch.from_numpy(unit_of_row).to(device),
        None if bool((lengths == 1).all()) else rank,
    )


# --------------------------------------------------------------------------------------------------
# Clipped sums
# --------------------------------------------------------------------------------------------------


def clipped_sums(
    weight: WeightFunction,
    table: UnitTable,
    selected: Iterable[tuple[int, IntArray]],
    state: Tensor,
    centre: Tensor,
    level: float,
    clip_norm: float,
) -> Tensor:
    """sum_{u in S} clip(v_u, C) of each output: the only place where private values are read.

    Args:
        weight: how records are weighted.
        table: the units.
        selected: for outputs by their row in ``state``, the units of S; read once, in order.
        state: (N, d) float64, each output's x, already released.
        centre: (N, d) float64, each output's public c.
        level: t.
        clip_norm: C.

    Returns:
        (N, d) float64. A unit changes its output's row by a vector of norm at most C, exactly.
    """
    return _sum_blocks(
        weight, _blocks(table, selected, state.device), state, centre, level, clip_norm
    )


def _sum_blocks(
    weight: WeightFunction,
    blocks: Iterable[_Block],
    state: Tensor,
    centre: Tensor,
    level: float,
    clip_norm: float,
) -> Tensor:
    grid = math.ldexp(1.0, math.frexp(clip_norm)[1] - 1 - _GRID_BITS)
    total = torch.zeros(state.shape, dtype=torch.int64, device=state.device)
    for block in blocks:
        owner_of_row = block.owner if block.rank is None else block.owner[block.unit_of_row]
        weighted = weight(state[owner_of_row], block.records, centre[owner_of_row], level)
        clipped = _clip(weighted, block, clip_norm)
        total.index_add_(0, block.owner, clipped.div_(grid).trunc_().to(torch.int64))
    return total.to(torch.float64).mul_(grid)


def _clip(weighted: Weighted, block: _Block, clip_norm: float) -> Tensor:
    """clip(sum over a unit's records of exp(log_weight) * base, C), [K, d], in logarithms.

    A record is split into a direction and the logarithm of its weighted norm, a unit into those of
    its sum, and exp is taken of what is below log C only, so nothing overflows, and what underflows
    was too small to matter.
    """
    direction, log_norm = _split(weighted.base, weighted.log_weight)
    if block.rank is not None:
        direction, log_norm = _sum_records(direction, log_norm, block)
    bound = clip_norm * (1.0 - _CLIP_MARGIN)
    norm = log_norm.clamp(max=math.log(bound)).exp_().clamp_(max=bound)
    return direction.mul_(torch.where(log_norm < math.log(bound), norm, bound)[:, None])


def _split(base: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Unit directions [R, d] and log norms [R] of exp(log_weight) * base; of zero, -inf.

    A row that is not finite, or whose weight is not, counts as zero: whatever one record holds, it
    can only lose its own say.
    """
    largest = torch.linalg.vector_norm(base, ord=math.inf, dim=1)  # NaN if any is NaN
    usable = torch.isfinite(largest) & (log_weight < math.inf)  # False for NaN
    largest = torch.where(usable, largest, 0.0)
    # Dividing by the largest entry first keeps the squares inside double precision.
    scaled = base / torch.where(largest > 0.0, largest, 1.0)[:, None]
    if not bool(usable.all()):
        scaled[~usable] = 0.0
    norm = _row_sums(scaled.square()).sqrt_()  # in [1, sqrt d], or 0
    scaled.div_(norm.clamp(min=1.0)[:, None])
    log_norm = torch.where(usable, largest.log() + norm.log() + log_weight, -math.inf)
    return scaled, log_norm


def _sum_records(direction: Tensor, log_norm: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    """Sums the records of each unit: directions [K, d] and log norms [K] of the sums.

    The k-th records of all units are added in one go, so each unit's sum is taken in the order of
    its records on every device.
    """
    assert block.rank is not None  # noqa: S101 - for the type checker; the caller has looked
    units = block.owner.shape[0]
    peak = torch.full((units,), -math.inf, dtype=torch.float64, device=direction.device)
    peak.scatter_reduce_(0, block.unit_of_row, log_norm, "amax")
    shift = torch.where(torch.isfinite(peak), peak, 0.0)
    share = (log_norm - shift[block.unit_of_row]).exp_()  # in [0, 1]
    total = torch.zeros((units, direction.shape[1]), dtype=torch.float64, device=direction.device)
    for k in range(int(block.rank.max(initial=-1)) + 1):
        rows = torch.from_numpy(np.flatnonzero(block.rank == k)).to(direction.device)
        total[block.unit_of_row[rows]] += direction[rows] * share[rows, None]
    return _split(total, peak)


def _row_sums(values: Tensor) -> Tensor:
    """Sums over the last axis by halving, in place: [R, d] -> [R].

    Library reductions choose their order by shape and thread count; this one is the same for a row
    whatever stands beside it, and its rounding is at most one half-ulp a level.
    """
    width = values.shape[1]
    if width == 0:
        return values.new_zeros(values.shape[0])
    while width > 1:
        half = width // 2
        values[:, :half] += values[:, width - half : width]
        width -= half
    return values[:, 0].clone()


# --------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------


def empirical_denoiser(sums: Tensor, centre: Tensor, beta: float, divisor: int) -> Tensor:
    """E = c + sum / (beta * divisor), [N, d]."""
    return sums.div(beta * divisor).add_(centre)


def take_step(x: Tensor, e: Tensor, xi: Tensor, t: float, next_t: float) -> Tensor:
    """x at level ``next_t`` from x at level ``t``, [N, d] float64 (equation 1).

    x <- (1 - 2 dt/t) x + (2 dt/t) E + sqrt(2 t dt) xi,    dt = t - next_t
    """
    dt = t - next_t
    pull = 2.0 * dt / t
    # Plain products and sums: a fused multiply-add would round by where a value lies in memory.
    return x.mul(1.0 - pull).add_(e.mul(pull)).add_(xi.mul(math.sqrt(2.0 * t * dt)))


# --------------------------------------------------------------------------------------------------
# The block
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputSpec:
    """One output of a job: its place in the whole job, and its class."""

    index: int
    label: int | None = None


@dataclass(frozen=True)
class Outputs:
    """What the block hands over.

    Attributes:
        x: (N, d) float64, in the order asked for, at noise level ``level``.
        level: the standard deviation of the noise level t_m at which the public part takes over.
        specs: what each row is.
    """

    x: NDArray[np.float64]
    level: float
    specs: tuple[OutputSpec, ...]


def planned_outputs(block: DenoisingBlock) -> tuple[OutputSpec, ...]:
    """The outputs that the mechanism was charged for: classes in its order, indexes from 0."""
    if block.classes is None:
        return tuple(OutputSpec(i) for i in range(block.outputs or 0))
    labels = [share.label for share in block.classes for _ in range(share.outputs)]
    return tuple(OutputSpec(i, label) for i, label in enumerate(labels))


def run_block(
    block: DenoisingBlock,
    records: FloatArray,
    labels: ArrayLike | None,
    unit_index: ArrayLike | None,
    centre: ArrayLike | Mapping[int, ArrayLike] | None,
    outputs: Sequence[OutputSpec],
    noise: KeyedNoise,
    progress: Callable[[int], None] | None = None,
    *,
    device: str | torch.device = "cpu",
) -> Outputs:
    """Draws all outputs of a charged block.

    The joint law of the result is what ``block`` says and its accountants bound: between datasets
    that differ by adding or removing one unit (for fixed-size sampling, that both hold at least
    ``public_size`` units), for whoever does not hold the seed, up to floating-point Gaussians.

    Args:
        block: the frozen mechanism that was charged.
        records: private; shape (n, ...), float32 or float64, scaled to [-1, 1], d values each.
        labels: private; class of each record, (n,), needed if the block has classes.
        unit_index: private; unit id of each record, (n,), or None: each record is its own unit.
        centre: public; for the centred weight, d values for all outputs or a mapping from label
            to d values. None for other weights.
        outputs: exactly ``planned_outputs(block)``, in any order.
        noise: the job's keyed noise.
        progress: called with the number of outputs done so far (a public number) after each chunk;
            what it raises ends the run.
        device: where the arithmetic runs.

    Raises:
        InvalidMechanism: the mechanism may not be charged for.
        InvalidRequest: ``outputs`` is not what was charged, or shapes do not fit. Never because of
            a private value.
        FloatingPointError: the noised state left double precision.
    """
    if len(outputs) != len(planned_outputs(block)):
        raise InvalidRequest("outputs", "must be the outputs that the mechanism was charged for")
    return run_shard(
        block, records, labels, unit_index, centre, outputs, noise, progress, device=device
    )


def run_shard(
    block: DenoisingBlock,
    records: FloatArray,
    labels: ArrayLike | None,
    unit_index: ArrayLike | None,
    centre: ArrayLike | Mapping[int, ArrayLike] | None,
    outputs: Sequence[OutputSpec],
    noise: KeyedNoise,
    progress: Callable[[int], None] | None = None,
    *,
    device: str | torch.device = "cpu",
) -> Outputs:
    """Draws some of a charged block's outputs: the same values as :func:`run_block` gives them.

    ``outputs`` are distinct members of ``planned_outputs(block)``; the rest is as in run_block.
    """
    require_chargeable(block)
    _check_outputs(block, outputs)
    where = torch.device(device)
    d = block.feature_dimension
    if d is None or math.prod(records.shape[1:]) != d:
        raise InvalidRequest("records", "must hold feature_dimension values each")
    if block.classes is not None and labels is None:
        raise InvalidRequest("labels", "are needed by a class-conditional block")
    # Without classes labels have no say, so a unit may span several.
    table = group_units(records, None if block.classes is None else labels, unit_index)
    sampler = _Sampler(block, table, _Centres(block, centre, d), noise, where)
    x = np.empty((len(outputs), d), dtype=np.float64)
    for first in range(0, len(outputs), CHUNK_OUTPUTS):
        chunk = outputs[first : first + CHUNK_OUTPUTS]
        x[first : first + len(chunk)] = sampler.run(chunk)
        if progress is not None:
            progress(first + len(chunk))
    # Looks at the noised state only; with a charged mechanism's ranges it does not happen.
    if not np.isfinite(x).all():
        raise FloatingPointError("the block's state left double precision")
    return Outputs(x, block.handoff_level, tuple(outputs))


def _check_outputs(block: DenoisingBlock, outputs: Sequence[OutputSpec]) -> None:
    """An output that was not charged for would be released free."""
    planned = planned_outputs(block)
    seen: set[int] = set()
    for spec in outputs:
        if not 0 <= spec.index < len(planned) or planned[spec.index] != spec:
            raise InvalidRequest("outputs", "must be outputs that the mechanism was charged for")
        if spec.index in seen:
            raise InvalidRequest("outputs", "names an output twice")
        seen.add(spec.index)


class _Centres:
    """The public c of each label."""

    def __init__(
        self, block: DenoisingBlock, centre: ArrayLike | Mapping[int, ArrayLike] | None, d: int
    ) -> None:
        self._zero = np.zeros(d)
        self._all: NDArray[np.float64] | None = None
        self._by_label: dict[int | None, NDArray[np.float64]] = {}
        if not _weight_of(block).has_centre:
            if centre is not None:
                raise InvalidRequest("centre", "has a meaning only for the centred weight")
            self._all = self._zero
        elif centre is None:
            raise InvalidRequest("centre", "is needed by the centred weight")
        elif isinstance(centre, Mapping):
            for share in block.classes or ():
                if share.label not in centre:
                    raise InvalidRequest("centre", f"lacks the label {share.label}")
                self._by_label[share.label] = self._checked(centre[share.label], d)
            if block.classes is None:
                raise InvalidRequest("centre", "must be one vector for a block without classes")
        else:
            self._all = self._checked(centre, d)

    @staticmethod
    def _checked(values: ArrayLike, d: int) -> NDArray[np.float64]:
        flat = np.asarray(values, dtype=np.float64).reshape(-1)
        if flat.shape != (d,) or not np.isfinite(flat).all():
            raise InvalidRequest("centre", "must hold feature_dimension finite values")
        return flat

    def of(self, label: int | None) -> NDArray[np.float64]:
        return self._by_label[label] if self._all is None else self._all


def _weight_of(block: DenoisingBlock) -> Weight:
    if block.weight is None:
        raise InvalidRequest("weight", "is required to run a block")
    return WEIGHTS[block.weight]


class _Sampler:
    """One run's public facts and private table; advances chunks of outputs."""

    def __init__(
        self,
        block: DenoisingBlock,
        table: UnitTable,
        centres: _Centres,
        noise: KeyedNoise,
        device: torch.device,
    ) -> None:
        self._block = block
        self._table = table
        self._centres = centres
        self._noise = noise
        self._device = device
        self._weight = _weight_of(block)
        self._rates: dict[int | None, float] = (
            {None: block.sampling_probability}
            if block.classes is None
            else {share.label: share.sampling_probability for share in block.classes}
        )
        self._whole: dict[int | None, Tensor] = {}  # sums over all units of a label

    def run(self, chunk: Sequence[OutputSpec]) -> NDArray[np.float64]:
        """x of a few outputs at the hand-off level, [N, d]."""
        block, weight = self._block, self._weight
        levels, betas = block.levels(), block.betas()
        c = self._to_device(np.stack([self._centres.of(spec.label) for spec in chunk]))
        noise = [self._noise.stream(BLOCK_NOISE, spec.index) for spec in chunk]

        def normals() -> Tensor:
            return self._to_device(np.stack([stream.normals(c.shape[1]) for stream in noise]))

        x = normals().mul_(levels[0])
        fresh = block.subsampling == "per_step"
        # Streams kept open give a new S at each pass; opened anew, they give the same S again.
        running = self._selection_streams(chunk) if fresh else None
        sums: Tensor | None = None
        held: list[_Block] | None = None
        for i in range(block.block_steps):
            if block.subsampling == "full_batch" and not weight.reads_state:
                sums = sums if sums is not None else self._whole_sums(chunk)
            elif sums is None or fresh or weight.reads_state:
                blocks: Iterable[_Block]
                if held is None:
                    selected = self._select(chunk, running or self._selection_streams(chunk))
                    made = _blocks(self._table, selected, self._device)
                    start = list(islice(made, HELD_BLOCKS + 1))
                    if not fresh and len(start) <= HELD_BLOCKS:
                        held = start  # the same S at the next step: gathered once
                    blocks = chain(start, made)
                else:
                    blocks = held
                sums = _sum_blocks(weight.function, blocks, x, c, levels[i], block.clip_norm)
            e = empirical_denoiser(sums, c, betas[i], block.divisor)
            x = take_step(x, e, normals(), levels[i], levels[i + 1])
        result: NDArray[np.float64] = x.cpu().numpy()
        return result

    def _selection_streams(self, chunk: Sequence[OutputSpec]) -> list[NoiseStream]:
        return [self._noise.stream(SELECTION, spec.index) for spec in chunk]

    def _select(
        self, chunk: Sequence[OutputSpec], streams: Sequence[NoiseStream]
    ) -> Iterator[tuple[int, IntArray]]:
        """S of each output, one at a time, drawn as the mechanism says."""
        block = self._block
        for k, (spec, stream) in enumerate(zip(chunk, streams, strict=True)):
            units = self._table.units_of(spec.label)
            if block.subsampling == "full_batch":
                yield k, units
            elif block.sampling == "fixed_size":
                yield k, units[stream.subset(units.size, block.divisor)]
            else:
                yield k, units[stream.mask(units.size, self._rates[spec.label])]

    def _whole_sums(self, chunk: Sequence[OutputSpec]) -> Tensor:
        """The sums of a full batch under a weight that does not read x: one for each label."""
        for label in {spec.label for spec in chunk} - self._whole.keys():
            c = self._to_device(np.stack([self._centres.of(label)]))
            everything = [(0, self._table.units_of(label))]
            self._whole[label] = clipped_sums(
                self._weight.function,
                self._table,
                everything,
                torch.zeros_like(c),
                c,
                self._block.levels()[0],
                self._block.clip_norm,
            )[0]
        return torch.stack([self._whole[spec.label] for spec in chunk])

    def _to_device(self, values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
