"""The small parts of the service's bench: the open loop and its page."""

from __future__ import annotations

import asyncio

import httpx

from bench import latency
from bench.latency import Measured


def test_arrivals_are_fixed_beforehand() -> None:
    assert latency.arrivals(20.0, 0.25) == [0.0, 0.05, 0.1, 0.15, 0.2]


def test_a_stall_counts_for_those_that_wait_behind_it() -> None:
    one_at_a_time = asyncio.Lock()

    async def send(i: int) -> bool:
        async with one_at_a_time:
            await asyncio.sleep(0.3 if i == 0 else 0.0)
        return True

    found = asyncio.run(latency.open_loop(send, [0.0, 0.01, 0.02]))
    assert len(found.milliseconds) == 3
    assert found.failures == 0
    # All waited for the first: none is counted from when its turn came.
    assert min(found.milliseconds) >= 270.0


def test_wrong_answers_are_counted() -> None:
    async def send(i: int) -> bool:
        if i == 1:
            raise httpx.ReadError("gone")
        return i != 2

    found = asyncio.run(latency.open_loop(send, [0.0] * 4))
    assert found.failures == 2
    assert len(found.milliseconds) == 4


def test_fresh_questions_are_all_different() -> None:
    found = latency.fresh_questions(10, seed=3)
    assert found == latency.fresh_questions(10, seed=3)
    assert len({str(question) for question in found}) == 10


def test_the_page_sets_figures_beside_their_targets() -> None:
    found = {
        "nothing (/livez)": Measured([1.0]),
        "a known question": Measured([4.0, 4.5]),
        "a fresh question": Measured([20.0, 120.0], failures=1),
    }
    text = latency.page_of(latency.parse([]), found, [10.0])
    assert "| a known question, median | 4.00 ms | at most 5 ms | yes |" in text
    assert "| a fresh question, 99 % | 120 ms | at most 100 ms | **no** |" in text
