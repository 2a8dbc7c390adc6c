"""The page that the benches write, and the figures in its cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.page import figure, quantile, table, target_row, write_section


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    write_section(page, "one", "first\n")
    write_section(page, "two", "second")
    write_section(page, "one", r"third \1")
    text = page.read_text()
    assert text.startswith("# Benchmarks\n")
    assert "first" not in text
    assert text.index("third \\1") < text.index("second")
    assert text.count("<!-- begin one -->") == text.count("<!-- end one -->") == 1
    write_section(page, "one", r"third \1")
    assert page.read_text() == text


def test_a_table_refuses_a_row_of_another_length() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    with pytest.raises(ValueError, match="as long as"):
        table(["a", "b"], [["1"]])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234.567, "1,235"),
        (12.345, "12.3"),
        (0.98765, "0.988"),
        (9.9999, "10.00"),
        (1.5e-6, "1.50e-06"),
        (float("inf"), "inf"),
        (float("nan"), "undefined"),
    ],
)
def test_figures(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_a_missed_target_is_told() -> None:
    assert target_row("x", 5.0, 5.0, "ms") == ["x", "5.00 ms", "at most 5 ms", "yes"]
    assert target_row("x", 5.1, 5.0, "ms")[-1] == "**no**"
    assert target_row("x", 999.0, 1000.0, "times", most=False)[2:] == [
        "at least 1,000 times",
        "**no**",
    ]


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(x) for x in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
