"""Other methods: the published columns, the diagnostics, and other people's code under limits."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest

from accounting import bounds, cumulants, gaussian_dp, mechanism_from_json, pld_pool, reference
from accounting.bounds import Limits
from accounting.errors import InvalidRequest
from accounting.mechanisms import ApproximateDPTerm, GaussianTerm, LaplaceTerm, Term
from accounting.pld_pool import POOL, OutOfLimits
from accounting.reference import Comparison, Unsupported, attack_success_bound

GOLDEN = Path(__file__).parent.parent / "golden"
CHEAP = reference.METHODS[:7]


def rows(name: str) -> list[dict[str, str]]:
    with (GOLDEN / name).open(newline="") as source:
        return list(csv.DictReader(source))


BLOCKS = {r["case"]: r for r in rows("accounting.csv")}
PUBLISHED = rows("other_methods.csv")
EDGEWORTH = {case: r["paper_edgeworth"] for case, r in BLOCKS.items()}


def published(quantity: str) -> list[Any]:
    return [
        pytest.param(r, id=f"{r['case']}-{r['delta']}")
        for r in PUBLISHED
        if r["quantity"] == quantity
    ]


def block(case: str, *, with_replacement: bool = False) -> tuple[GaussianTerm]:
    r = BLOCKS[case]
    q = int(r["B"]) / int(r["n"])
    if with_replacement:
        q = -math.expm1(int(r["B"]) * math.log1p(-1 / int(r["n"])))
    return (GaussianTerm(q, float(r["mu_bar"]), int(r["outputs"])),)


def unit(printed: str) -> float:
    """One unit of the last printed digit."""
    return float(10 ** -len(printed.partition(".")[2]))


def subsampled(q: float, noise_multiplier: float, count: int) -> Any:
    return mechanism_from_json(
        {
            "kind": "subsampled_gaussian",
            "sampling_probability": q,
            "noise_multiplier": noise_multiplier,
            "count": count,
        }
    )


def by_method(found: list[Comparison]) -> dict[str, Comparison]:
    return {row.method: row for row in found}


# -- Renyi -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published("rdp_integer_orders_2_64"))
def test_the_papers_renyi_column(row: dict[str, str]) -> None:
    terms, delta = block(row["case"]), float(row["delta"])
    upper, order = reference.renyi_over(terms, delta, reference.INTEGER_ORDERS)
    assert upper == pytest.approx(float(row["value"]), abs=unit(row["value"]))
    assert order in reference.INTEGER_ORDERS
    assert cumulants.best_epsilon(terms, delta)[0] <= upper


@pytest.mark.parametrize("row", published("rdp_default_orders"))
def test_the_default_orders(row: dict[str, str]) -> None:
    """The measured value is dp_accounting's own; certified costs at the same orders give less."""
    terms, delta = block(row["case"]), float(row["delta"])
    (term,) = terms
    m = subsampled(term.sampling_probability, 1.0 / term.mu, term.count)
    found = by_method(
        reference.compare(m, delta, methods=["dp_accounting_rdp", "renyi_default_orders"])
    )
    theirs, ours = found["dp_accounting_rdp"], found["renyi_default_orders"]
    assert theirs.upper is not None
    assert ours.upper is not None
    assert theirs.upper == pytest.approx(float(row["value"]), abs=unit(row["value"]))
    assert not theirs.certified
    assert 0.985 * theirs.upper < ours.upper <= theirs.upper
    assert ours.certified
    assert ours.details["order"] == theirs.details["order"]


def test_a_delta_below_the_declared_mass_has_no_renyi_bound() -> None:
    terms = (ApproximateDPTerm(Decimal("0.1"), Decimal("1e-5"), 1),)
    assert reference.renyi_over(terms, 1e-6, (2.0,)) == (math.inf, math.inf)


# -- central limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published("gdp_clt"))
def test_the_papers_clt_column(row: dict[str, str]) -> None:
    printed, delta = float(row["value"]), float(row["delta"])
    found = reference.clt(block(row["case"]), delta).epsilon
    assert abs(found - printed) <= 1e-3 * printed + 0.5 * unit(row["value"])
    # mu_bar has six decimals, which e^{mu^2} multiplies
    exact = reference.clt(block(row["case"], with_replacement=True), delta)
    assert exact.epsilon == pytest.approx(printed, rel=2e-5, abs=0.5 * unit(row["value"]))


def test_the_clt_knows_where_its_limit_is_far() -> None:
    valid = {p: reference.clt(block(f"cifar10-{p}-B25"), 1e-5).valid for p in (55, 62, 65, 67, 70)}
    assert valid == {55: True, 62: True, 65: False, 67: False, 70: False}
    one = reference.clt((GaussianTerm(0.01, 1.0, 1),), 1e-5)
    assert "largest_share_p" in one.reason
    exact = reference.clt((GaussianTerm(1.0, 0.5, 4),), 1e-5)
    assert exact.valid
    assert exact.mu == 1.0
    with pytest.raises(Unsupported):
        reference.clt((GaussianTerm(0.1, 40.0, 1),), 1e-5)
    with pytest.raises(Unsupported):
        reference.clt((LaplaceTerm(1.0, 1),), 1e-5)


# -- Edgeworth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EDGEWORTH)
def test_the_papers_edgeworth_column(case: str) -> None:
    printed, delta = EDGEWORTH[case], float(BLOCKS[case]["delta"])
    drawn = reference.edgeworth(block(case), delta)
    replaced = reference.edgeworth(block(case, with_replacement=True), delta)
    # the two inclusion probabilities differ by q/2, and epsilon grows about as fast
    assert drawn.epsilon == pytest.approx(replaced.epsilon, rel=2.5e-3)
    if printed == "invalid":
        assert not drawn.valid
        assert not replaced.valid
    else:
        assert drawn.valid, drawn.reason
        assert replaced.valid, replaced.reason
        # mu_bar has six decimals, which move epsilon by up to 3e-6 of itself
        tolerance = 0.5 * unit(printed) + 3e-6 * float(printed)
        assert abs(replaced.epsilon - float(printed)) <= tolerance
        assert drawn.direction == "remove"


@pytest.mark.parametrize(
    ("case", "name", "printed"),
    [
        ("celeba64-65-B25", "excess_kurtosis_q", "3.32"),
        ("celeba64-65-B50", "excess_kurtosis_q", "1.48"),
        ("celeba64-67-B25", "excess_kurtosis_q", "3.46"),
        ("celeba64-67-B50", "excess_kurtosis_q", "1.28"),
        ("celeba64-70-B25", "excess_kurtosis_p", "2.26"),
        ("celeba64-70-B50", "excess_kurtosis_p", "1.15"),
    ],
)
def test_the_paper_names_the_flag_that_fails(case: str, name: str, printed: str) -> None:
    found = reference.edgeworth(block(case, with_replacement=True), 1e-6)
    flag = next(f for f in found.flags if f.name == name)
    assert not flag.passed
    assert flag.value == pytest.approx(float(printed), abs=0.5 * unit(printed))
    assert name in found.reason


def test_the_standardised_cumulants_alone_mark_the_papers_invalid_rows() -> None:
    for case, printed in EDGEWORTH.items():
        found = reference.edgeworth(block(case), float(BLOCKS[case]["delta"]))
        sizes = [f for f in found.flags if f.name.startswith(("skewness", "excess"))]
        assert all(f.passed for f in sizes) == (printed != "invalid")


def test_table_3_is_unstable_at_beta_a_quarter() -> None:
    mu = 4.0 * float(BLOCKS["cifar10-65-B50-beta1"]["mu_bar"])
    found = reference.edgeworth((GaussianTerm(1e-3, mu, 50_000),), 1e-5)
    assert not found.valid
    assert "skewness_p is 14" in found.reason


def test_every_diagnostic_is_a_named_flag() -> None:
    found = reference.edgeworth(block("cifar10-62-B25"), 1e-5)
    sides = ("variance", "largest_share", "skewness", "excess_kurtosis", "decrease", "clipping")
    assert {f.name for f in found.flags} == {f"{s}_{d}" for s in sides for d in "pq"} | {
        "least_delta"
    }
    for f in found.flags:
        assert set(f.to_json()) == {"name", "value", "threshold", "passed"}


def test_each_flag_can_fail() -> None:
    failed = set()
    for terms in (
        (GaussianTerm(0.01, 1.0, 1),),
        (GaussianTerm(0.5, 1e-170, 1),),
        (LaplaceTerm(0.5, 100),),
    ):
        found = reference.edgeworth(terms, 1e-5)
        failed |= {f.name.rpartition("_")[0] or f.name for f in found.flags if not f.passed}
        assert not found.valid
        assert math.isfinite(found.epsilon)
    assert failed == {
        "variance", "largest_share", "skewness", "excess_kurtosis", "decrease", "clipping", "least",
    }  # fmt: skip


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12, 1e-20])
def test_unsampled_gaussians_need_no_series(delta: float) -> None:
    terms = (GaussianTerm(1.0, 0.03, 1000), GaussianTerm(1.0, 1.0, 1))
    found = reference.edgeworth(terms, delta)
    low, high = reference.gaussian_exact(terms, delta)
    assert found.epsilon == pytest.approx(low, rel=1e-9)
    assert low <= high
    assert found.valid
    assert found.direction == "both"


def test_compositions_of_different_terms() -> None:
    """Cumulants add: splitting a term changes nothing, and neither does the order."""
    whole = reference.edgeworth((GaussianTerm(0.01, 1.0, 1000),), 1e-5)
    split = reference.edgeworth((GaussianTerm(0.01, 1.0, 400), GaussianTerm(0.01, 1.0, 600)), 1e-5)
    assert split.epsilon == pytest.approx(whole.epsilon, rel=1e-12)
    run: tuple[Term, ...] = (
        GaussianTerm(1 / 14, 1 / 14.78, 2100),
        GaussianTerm(1.0, 1 / 26.6, 1),
        GaussianTerm(0.1091, 0.05, 5),
    )
    mixed = reference.edgeworth(run, 1e-5)
    assert mixed.valid
    assert mixed.epsilon == pytest.approx(0.8282, abs=1e-4)
    assert reference.edgeworth(run[::-1], 1e-5).epsilon == pytest.approx(mixed.epsilon, rel=1e-12)


def test_what_edgeworth_can_not_do_it_says() -> None:
    for term in (
        ApproximateDPTerm(Decimal("0.5"), Decimal(0), 100),
        GaussianTerm(0.5, 1e4, 1),
        LaplaceTerm(60.0, 1),
    ):
        with pytest.raises(Unsupported):
            reference.edgeworth((term,), 1e-5)


def test_an_estimate_of_nothing_is_zero() -> None:
    assert reference.edgeworth((GaussianTerm(1e-3, 1e-3, 1),), 1e-3).epsilon == 0.0


# -- cumulants -------------------------------------------------------------------------------------


def decimal_cumulants(q: str, mu: str, *, under_q: bool) -> tuple[float, ...]:
    """The trapezoid rule with 50 digits, a finer lattice and a wider range."""
    with localcontext() as context:
        context.prec = 50
        q_, mu_ = Decimal(q), Decimal(mu)
        h = Decimal("0.1") / max(mu_, Decimal(1))
        z, end = Decimal(-15), mu_ + 15
        nodes, total = [], Decimal(0)
        while z < end:
            u = 1 - q_ + q_ * (mu_ * (z - mu_ / 2)).exp()
            weight = (-z * z / 2).exp() * (u if under_q else 1)
            nodes.append((weight, u.ln()))
            total += weight
            z += h
        mean = sum(w * x for w, x in nodes) / total
        second, third, fourth = (
            sum(w * (x - mean) ** k for w, x in nodes) / total for k in (2, 3, 4)
        )
        return tuple(float(x) for x in (mean, second, third, fourth - 3 * second**2))


@pytest.mark.parametrize(
    ("q", "mu"), [("0.0005", "0.694642"), ("0.004", "3.898772"), ("1e-7", "0.1"), ("0.9", "8")]
)
@pytest.mark.parametrize("under_q", [False, True])
def test_cumulants_against_fifty_digits(q: str, mu: str, under_q: bool) -> None:
    exact = decimal_cumulants(q, mu, under_q=under_q)
    c = reference.loss_cumulants(GaussianTerm(float(q), float(mu), 1))[under_q]
    # the mean cancels down to the square of q, and counts only beside the standard deviation
    assert c.mean == pytest.approx(exact[0], rel=1e-10, abs=1e-12 * math.sqrt(exact[1]))
    for found, right in zip((c.variance, c.third, c.fourth), exact[1:], strict=True):
        assert found == pytest.approx(right, rel=1e-9)


def test_the_cumulants_of_a_laplace_loss() -> None:
    """E_P[L^2] = lam^2 (1 + e^-lam)/2 + (1/2) int_0^lam (2y - lam)^2 e^-y dy, y = lam x."""
    for lam in (0.05, 0.5, 20.0):
        p, q = reference.loss_cumulants(LaplaceTerm(lam, 1))
        mean = lam + math.expm1(-lam)
        assert q.mean == pytest.approx(mean, rel=1e-9)
        e = math.exp(-lam)
        y0, y1, y2 = 1 - e, 1 - e * (1 + lam), 2 - e * (2 + 2 * lam + lam * lam)
        second = 0.5 * (lam * lam * (1 + e) + 4 * y2 - 4 * lam * y1 + lam * lam * y0)
        assert p.variance == pytest.approx(second - mean * mean, rel=1e-9)
        assert (p.mean, p.variance, p.third) == (-q.mean, q.variance, -q.third)


# -- membership ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published("attack_success_bound"))
def test_the_papers_attack_success(row: dict[str, str]) -> None:
    epsilon = float(row["case"].removeprefix("asr-eps"))
    found = attack_success_bound(epsilon, float(row["delta"]))
    assert found == pytest.approx(float(row["value"]), abs=0.5 * unit(row["value"]))


def test_attack_success_at_any_prior() -> None:
    """Against the best of many tests on the region that (epsilon, delta) allows."""
    for epsilon, delta in ((0.1, 0.0), (1.0, 1e-5), (3.0, 0.1)):
        assert attack_success_bound(epsilon, delta) == pytest.approx(
            (math.exp(epsilon) + delta) / (1.0 + math.exp(epsilon)), rel=1e-14
        )
        for prior in (0.001, 0.3, 0.5, 0.9):
            best = 0.0
            for i in range(10_001):
                a = i / 10_000
                b = max(
                    0.0, 1 - delta - math.exp(epsilon) * a, math.exp(-epsilon) * (1 - delta - a)
                )
                best = max(best, 1 - (1 - prior) * a - prior * b)
            bound = attack_success_bound(epsilon, delta, prior)
            assert best <= bound <= best + 1e-4


def test_attack_success_does_not_overflow() -> None:
    assert attack_success_bound(1e6, 1e-5) == attack_success_bound(math.inf, 0.0) == 1.0
    assert attack_success_bound(0.0, 0.0) == pytest.approx(0.5, rel=1e-15)
    assert attack_success_bound(0.0, 1.0) == 1.0
    for bad in ((-1.0, 0.0, 0.5), (math.nan, 0.0, 0.5), (1.0, 1.1, 0.5), (1.0, 0.0, 1.0)):
        with pytest.raises(InvalidRequest):
            attack_success_bound(*bad)


# -- dp_accounting's distributions -----------------------------------------------------------------


def test_dp_accountings_bracket_at_a_given_interval() -> None:
    terms = (GaussianTerm(0.01, 1.0, 100),)
    coarse, fine = (
        [
            reference.dp_accounting_pld(terms, 1e-5, pessimistic=p, interval=h).epsilon
            for p in (False, True)
        ]
        for h in (1e-1, 1e-2)
    )
    assert coarse[0] < fine[0] < fine[1] < coarse[1]
    own = bounds.epsilon(subsampled(0.01, 1.0, 100), 1e-5)
    assert fine[0] <= own.upper
    assert own.lower <= fine[1]


@pytest.mark.parametrize(
    ("mu", "count", "interval", "delta"),
    [(1.0, 1, 1e-3, 1e-8), (0.01, 50_000, 1e-4, 1e-10)],
)
def test_the_slack_covers_what_the_transforms_lose(
    mu: float, count: int, interval: float, delta: float
) -> None:
    """Gaussians against their exact curve; a sampling rate this near 1 is composed one by one."""
    terms = (GaussianTerm(math.nextafter(1.0, 0.0), mu, count),)
    low, high = gaussian_dp.epsilon_bounds(gaussian_dp.total_mu([(mu, count)]), delta)
    above = reference.dp_accounting_pld(terms, delta, pessimistic=True, interval=interval)
    below = reference.dp_accounting_pld(terms, delta, pessimistic=False, interval=interval)
    assert below.allowing_for_rounding <= high
    assert above.allowing_for_rounding >= low


def test_laplace_by_dp_accounting() -> None:
    """One release has epsilon = its inverse scale plus 2 log(1 - delta), in closed form."""
    terms = (LaplaceTerm(1.0, 1),)
    exact = 1.0 + 2.0 * math.log1p(-1e-2)
    above = reference.dp_accounting_pld(terms, 1e-2, pessimistic=True)
    below = reference.dp_accounting_pld(terms, 1e-2, pessimistic=False)
    assert exact - 2e-3 < below.epsilon <= exact <= above.epsilon < exact + 1e-4


def test_a_report_of_zero_is_right() -> None:
    row = next(r for r in rows("public_reports.csv") if r["case"] == "zero-is-right")
    m = subsampled(float(row["q"]), float(row["noise_multiplier"]), int(row["count"]))
    names = ["dp_accounting_pld", "edgeworth"]
    found = by_method(reference.compare(m, float(row["delta"]), interval=1e-3, methods=names))
    assert (found["dp_accounting_pld"].lower, found["dp_accounting_pld"].upper) == (0.0, 0.0)
    assert not found["edgeworth"].valid  # one output, mostly not drawn


# -- limits ----------------------------------------------------------------------------------------


def test_time_really_cuts_off() -> None:
    POOL.close()
    m = subsampled(4e-3, 0.25, 50_000)
    found = reference.compare(
        m, 1e-5, limits=Limits(0.2, 4096), methods=["dp_accounting_pld", "dp_accounting_rdp"]
    )
    for row in found:
        assert row.lower is row.upper is row.estimate is None
        assert not row.valid
        assert row.reason == "did not finish: out of time"
        assert row.milliseconds > 100.0
    assert POOL.idle_pids() == ()


def test_memory_really_cuts_off() -> None:
    POOL.close()
    m = subsampled(4e-3, 0.25, 50_000)
    (found,) = reference.compare(
        m, 1e-5, limits=Limits(60.0, 1), interval=1e-4, methods=["dp_accounting_pld"]
    )
    assert found.reason == "did not finish: out of memory"
    assert found.upper is None


def test_a_question_cut_off_changes_no_later_answer() -> None:
    terms = (GaussianTerm(0.01, 1.0, 10),)

    def ask(seconds: float, interval: float = 1e-2) -> reference.PldEpsilon:
        return reference.dp_accounting_pld(
            terms, 1e-5, pessimistic=True, interval=interval, limits=Limits(seconds, 4096)
        )

    first = ask(60.0)
    with pytest.raises(OutOfLimits):
        ask(0.05, 1e-6)
    assert ask(60.0) == first


def test_what_can_not_be_discretised_is_not_tried() -> None:
    m = subsampled(0.5, 1e-3, 10)
    (found,) = reference.compare(m, 1e-5, methods=["dp_accounting_pld"])
    assert "too wide" in found.reason
    assert found.milliseconds < 1000.0


def test_what_a_library_raises_is_the_reason() -> None:
    for question in (
        {"method": "dp_accounting_rdp", "terms": [{"q": 0.1}], "delta": 1e-5},
        {"method": "nobody", "terms": []},
        {"method": "dp_accounting_pld", "terms": []},
    ):
        with pytest.raises(OutOfLimits, match="Error"):
            POOL.ask(question, seconds=30.0, megabytes=4096)
    assert reference.dp_accounting_pld(
        (GaussianTerm(0.5, 0.1, 1),), 1e-5, pessimistic=True, interval=1e-2
    )


def test_the_kept_process_is_for_distributions_only() -> None:
    terms = (GaussianTerm(0.5, 0.1, 1),)
    reference.dp_accounting_pld(terms, 1e-5, pessimistic=True, interval=1e-2)
    kept = pld_pool.POOL.idle_pids()
    assert len(kept) == 1
    reference.compare(subsampled(0.1, 1.0, 1), 1e-5, methods=["dp_accounting_rdp"])
    assert pld_pool.POOL.idle_pids() == kept


def run_in_another_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(reference.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


# What starts the kept process and leaves it waiting.
ASK = (
    "import os\n"
    "from accounting import reference\n"
    "from accounting.mechanisms import GaussianTerm\n"
    "from accounting.pld_pool import POOL\n"
    "def ask():\n"
    "    terms = (GaussianTerm(0.5, 0.1, 1),)\n"
    "    return reference.dp_accounting_pld(terms, 1e-5, pessimistic=True, interval=1e-2)\n"
    "first = ask()\n"
)


def ask() -> reference.PldEpsilon:
    terms = (GaussianTerm(0.5, 0.1, 1),)
    return reference.dp_accounting_pld(terms, 1e-5, pessimistic=True, interval=1e-2)


def test_a_killed_process_is_replaced() -> None:
    first = ask()
    (pid,) = POOL.idle_pids()
    os.kill(pid, signal.SIGKILL)
    # Its question fails, and the next one, at a coarser interval, has a new process.
    terms = (GaussianTerm(0.5, 0.1, 1),)
    coarser = reference.dp_accounting_pld(terms, 1e-5, pessimistic=True)
    assert coarser.epsilon == pytest.approx(first.epsilon, abs=0.1)
    assert pid not in POOL.idle_pids()
    assert ask() == first


def test_the_process_ends_with_its_owner() -> None:
    code = ASK + "print(POOL.idle_pids()[0], flush=True)\nos._exit(0)\n"  # no clean-up of any kind
    pid = int(run_in_another_process(code))
    deadline = time.monotonic() + 10.0
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and not yet collected by the machine's first process


def test_a_fork_leaves_the_process_to_its_owner() -> None:
    run_in_another_process(
        ASK + "child = os.fork()\n"
        "assert bool(POOL.idle_pids()) == (child != 0)\n"
        "same = ask() == first\n"
        "if child == 0:\n"
        "    POOL.close()\n"
        "    os._exit(0 if same else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert same and ask() == first\n"
    )


def test_questions_from_several_threads() -> None:
    answers: list[reference.PldEpsilon] = []
    threads = [threading.Thread(target=lambda: answers.append(ask())) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(answers) == 3
    assert set(map(repr, answers)) == {repr(ask())}
    assert len(POOL.idle_pids()) == 1


# -- side by side ----------------------------------------------------------------------------------


def test_one_row_a_method_with_the_products_own_first() -> None:
    m = subsampled(0.01, 1.0, 100)
    found = reference.compare(m, 1e-5)
    assert tuple(row.method for row in found) == reference.METHODS
    rows_ = by_method(found)
    own = rows_["epsilond"]
    assert own.certified
    assert own.lower is not None
    assert own.upper is not None
    assert own.details["attack_success_bound"] == attack_success_bound(own.upper, 1e-5)
    assert {row.method for row in found if row.certified} == {
        "epsilond", "renyi_best_order", "renyi_default_orders", "renyi_integer_orders",
    }  # fmt: skip
    for row in found:
        if row.upper is not None:
            assert row.upper >= own.lower
        if row.lower is not None:
            assert row.lower <= own.upper
        assert row.milliseconds > 0.0
    assert not rows_["gaussian_exact"].valid
    for name, package in (("opacus_prv", "opacus"), ("microsoft_prv", "prv_accountant")):
        row = rows_[name]
        if importlib.util.find_spec(package) is None:
            assert row.reason == f"{package} is not installed"
            assert not row.valid
        else:
            assert row.upper == pytest.approx(own.upper, abs=0.03)

    written = json.loads(json.dumps([row.to_json() for row in found], allow_nan=False))
    for one in written:
        assert set(one) == {
            "method", "lower", "upper", "estimate", "certified", "valid", "reason",
            "milliseconds", "details",
        }  # fmt: skip
    edgeworth = next(one for one in written if one["method"] == "edgeworth")
    assert len(edgeworth["details"]["flags"]) == 13


def test_nothing_sampled_is_exact() -> None:
    m = mechanism_from_json({"kind": "gaussian", "noise_multiplier": 2.0, "count": 3})
    found = by_method(reference.compare(m, 1e-5, methods=CHEAP))
    exact, own = found["gaussian_exact"], found["epsilond"]
    assert exact.certified
    assert (exact.lower, exact.upper) == (own.lower, own.upper)
    assert found["clt"].estimate == pytest.approx(own.upper, rel=1e-9)


def test_infinity_is_written_as_a_word() -> None:
    m = mechanism_from_json({"kind": "approximate_dp", "epsilon": 0.5, "delta": 1e-6, "count": 2})
    found = by_method(reference.compare(m, 1e-7, methods=CHEAP))
    assert found["renyi_best_order"].upper == math.inf
    written = json.loads(json.dumps(found["renyi_best_order"].to_json(), allow_nan=False))
    assert written["upper"] == "inf"
    assert not found["edgeworth"].valid
    assert "two values" in found["edgeworth"].reason
    assert not found["clt"].valid


def test_a_peer_without_such_a_part_says_so() -> None:
    m = mechanism_from_json({"kind": "approximate_dp", "epsilon": 0.5, "delta": 0, "count": 2})
    (found,) = reference.compare(m, 1e-5, methods=["dp_accounting_rdp"])
    assert found.reason == "has nothing for an (epsilon, delta) part"
    assert not found.valid


def test_a_class_conditional_row_is_its_worst_class() -> None:
    def conditional(classes: list[dict[str, float]]) -> Any:
        return mechanism_from_json(
            {
                "kind": "denoising_block",
                "schedule": {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80, "rho": 7,
                             "steps": 39},
                "block_steps": 22,
                "subsample_size": 3,
                "clip_norm": 4.0,
                "classes": classes,
            }
        )  # fmt: skip

    many = {"label": 0, "outputs": 3000, "sampling_probability": 0.002}
    dense = {"label": 1, "outputs": 1000, "sampling_probability": 0.02}
    names = ["renyi_integer_orders", "edgeworth", "clt"]
    both = by_method(reference.compare(conditional([many, dense]), 1e-5, methods=names))
    alone = [
        by_method(reference.compare(conditional([c]), 1e-5, methods=names)) for c in (many, dense)
    ]
    for name in names:
        assert both[name].valid == all(a[name].valid for a in alone)
        for end in ("upper", "estimate"):
            values = [getattr(a[name], end) for a in alone]
            assert getattr(both[name], end) == (None if None in values else max(values))


def test_bad_questions_are_refused() -> None:
    m = subsampled(0.1, 1.0, 1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"delta": 0.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"delta": True}, "delta"),
        ({"delta": 1e-5, "interval": 0.0}, "interval"),
        ({"delta": 1e-5, "interval": math.inf}, "interval"),
        ({"delta": 1e-5, "methods": ["moments"]}, "methods"),
    ]
    for given, field in bad:
        with pytest.raises(InvalidRequest) as caught:
            reference.compare(m, **given)
        assert caught.value.field == field
