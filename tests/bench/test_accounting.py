"""The small parts of the accountant's bench: its rows, its cells, and how it asks peers."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from accounting.bounds import Bracket
from accounting.mechanisms import (
    ApproximateDPTerm,
    GaussianTerm,
    dominating_terms,
    mechanism_digest,
    mechanism_from_json,
)
from bench import accounting, peers
from bench.mechanisms import (
    FETA_PRO,
    ROWS,
    block,
    distinct,
    in_words,
    nudged,
    random_question,
    random_release,
    sampled,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "accounting.csv"
OWN = Bracket(0.9, 1.1, 1e-5, "remove", "contour")


def test_the_blocks_are_the_papers() -> None:
    with GOLDEN.open(newline="") as source:
        published = {row["case"]: row for row in csv.DictReader(source)}
    rows = {row.key: row for row in ROWS}
    for key, case in (
        ("55", "cifar10-55-B25"),
        ("62", "cifar10-62-B25"),
        ("65", "cifar10-65-B25"),
        ("67", "cifar10-67-B25"),
        ("70", "cifar10-70-B25"),
        ("celeba", "celeba64-55-B25"),
    ):
        ((term,),) = dominating_terms(mechanism_from_json(rows[key].mechanism))
        assert isinstance(term, GaussianTerm)
        expected = published[case]
        assert term.mu == pytest.approx(float(expected["mu_bar"]), abs=1e-6)
        assert term.sampling_probability == int(expected["B"]) / int(expected["n"])
        assert term.count == int(expected["outputs"])
        assert rows[key].delta == float(expected["delta"])
    # The clip norm follows the batch, so the larger batch moves the rate alone.
    ((wide,),) = dominating_terms(mechanism_from_json(rows["70-200"].mechanism))
    assert isinstance(wide, GaussianTerm)
    assert wide.mu == pytest.approx(3.898772, abs=1e-6)
    assert wide.sampling_probability == 0.004


def test_every_row_is_one_that_peers_can_be_asked() -> None:
    keys = [row.key for row in ROWS]
    assert len(set(keys)) == len(keys)
    for row in ROWS:
        (terms,) = dominating_terms(mechanism_from_json(row.mechanism))
        assert len(peers.terms_json(terms)) == len(terms)
    assert len(peers.terms_json(dominating_terms(mechanism_from_json(distinct(1000)))[0])) == 1000


@pytest.mark.parametrize("mechanism", [block(65, 25), FETA_PRO, distinct(5)])
def test_a_nudge_asks_another_question_with_the_same_answer(mechanism: dict[str, object]) -> None:
    here, there = (mechanism_from_json(nudged(mechanism, k)) for k in (0, 1))
    assert mechanism_digest(here) == mechanism_digest(mechanism_from_json(mechanism))
    assert mechanism_digest(here) != mechanism_digest(there)
    for one, other in zip(dominating_terms(here)[0], dominating_terms(there)[0], strict=True):
        assert isinstance(one, GaussianTerm)
        assert isinstance(other, GaussianTerm)
        assert other.mu == pytest.approx(one.mu, rel=3e-9)
        assert other.mu != one.mu


@pytest.mark.parametrize("draw", [random_question, random_release])
def test_random_mechanisms_are_valid_and_come_again(draw: object) -> None:
    assert draw is random_question or draw is random_release
    first, second = (
        [draw(generator) for _ in range(200)]
        for generator in (np.random.default_rng(7), np.random.default_rng(7))
    )
    assert first == second
    for mechanism, delta in first:
        mechanism_from_json(mechanism)
        assert 1e-12 <= delta <= 1e-3
    assert len({str(m) for m, _ in first}) == 200


def test_a_random_mechanism_in_words() -> None:
    one = sampled(0.01, 1.5, 7)
    both = {"kind": "composition", "parts": [{"mechanism": one, "count": 1}] * 2}
    assert in_words(both) == "7 × (q 0.01, σ 1.5) + 7 × (q 0.01, σ 1.5)"


def test_an_end_that_contradicts_the_bracket_stands_out() -> None:
    assert accounting.ends(0.5, 1.5, OWN) == "0.500000 … 1.50000"
    assert accounting.ends(None, 0.8, OWN) == "*– … 0.800000*"
    assert accounting.ends(1.2, 1.5, OWN).startswith("*")


def test_cells_of_a_peer_that_gave_up() -> None:
    gave_up = peers.Answer(failure="out of time")
    assert accounting.cells_of_peer(gave_up, OWN) == ["out of time", "–", "–"]
    assert accounting.cells_of_peer(None, OWN)[0] == "not asked"
    upper = peers.Answer(upper=2.0, seconds=3.0, megabytes=4.0)
    assert accounting.cells_of_pld(gave_up, upper, OWN) == ["– … 2.00000", "3.00", "4.00"]
    assert accounting.cells_of_pld(upper, gave_up, OWN)[0] == "did not finish: out of time"


def test_the_ratio_is_of_times_in_the_same_run() -> None:
    own = accounting.Own(OWN, 10.0, OWN, 5.0)
    answer = peers.Answer(upper=2.0, seconds=30.0, megabytes=4.0)
    found = accounting.Found(ROWS[2], own, {"dp_accounting 1e-05 upper": answer})
    assert accounting.ratio(found, 1e-5) == 3000.0
    assert accounting.ratio(found, 1e-4) is None
    targets = accounting.target_table([found], {}, [], [])
    assert "3,000 times | at least 1,000 times | yes" in targets


def test_failures_are_short() -> None:
    assert peers.failure_of("memory") == "out of memory"
    assert peers.failure_of("ModuleNotFoundError: No module named 'opacus'") == "not installed"
    assert peers.failure_of("ValueError: too | wide. And more") == "raised ValueError: too / wide"
    with pytest.raises(ValueError, match="sampled Gaussians"):
        peers.terms_json([ApproximateDPTerm(0, 0, 1)])  # type: ignore[arg-type]


def test_dp_accounting_is_asked_under_limits() -> None:
    terms: list[dict[str, object]] = [{"q": 0.01, "mu": 1.0, "count": 10}]
    ends = {}
    for pessimistic in (True, False):
        answer = peers.ask(
            sys.executable,
            "dp_accounting_pld",
            terms,
            1e-5,
            seconds=60.0,
            megabytes=4096,
            interval=1e-3,
            pessimistic=pessimistic,
        )
        assert not answer.failure
        assert answer.seconds is not None
        assert answer.megabytes is not None
        ends[pessimistic] = answer
    lower, upper = ends[False].lower, ends[True].upper
    assert lower is not None
    assert upper is not None
    assert 0.0 < lower <= upper < 2.0
    too_small = peers.ask(
        sys.executable,
        "dp_accounting_pld",
        [{"q": 0.3, "mu": 1.0, "count": 100_000}],
        1e-5,
        seconds=0.2,
        megabytes=4096,
        interval=1e-5,
    )
    assert too_small == peers.Answer(failure="out of time")


def test_a_peer_that_is_not_there_says_so() -> None:
    answer = peers.ask("/bin/false", "opacus_prv", [], 1e-5, seconds=5.0, megabytes=4096)
    assert answer == peers.Answer(failure="process ended")


def test_the_command_line_knows_its_rows_and_peers() -> None:
    parsed = accounting.parse(["--rows", "65,feta", "--peers", "", "--quick"])
    assert parsed.rows == ("65", "feta")
    assert parsed.peers == ()
    assert parsed.repeats == 5
    with pytest.raises(SystemExit):
        accounting.parse(["--rows", "66"])
