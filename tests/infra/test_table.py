"""Tables fit the width that they are given, with every number whole."""

import pytest

from infra.console import console
from infra.table import GAP, tables

HEADING = ("rung", "tokens/s", "step", "GB", "[loss]")
LINES = [("baseline", "1,000", "", "10.00", "3.250"), ("[fast] one", "123,456,789", "1.50x ±7%", "9.00", "3.249")]


@pytest.mark.parametrize(("width", "parts"), [(200, 1), (46, 2), (30, 3), (5, 4)])
def test_columns_that_do_not_fit_follow_below(capsys: pytest.CaptureFixture[str], width: int, parts: int) -> None:
    made = list(tables(HEADING, LINES, "A title", width))
    assert len(made) == parts
    for table in made:
        console.print(table)
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()]
    assert lines[0] == "A title"
    assert printed.count("A title") == 1
    for cell in (*HEADING[1:], *LINES[0][1:], *LINES[1][1:]):
        assert printed.count(cell) == 1 if cell else True, cell
    assert printed.count("[fast] one") == printed.count("baseline") == parts
    if width > 20:
        assert max(map(len, lines)) <= width


def test_a_part_is_never_wider_than_it_may_be_and_all_are_about_equally_wide() -> None:
    for width in range(24, 60):  # the first column and the widest other one need 24
        assert all(made.width and made.width - GAP <= width for made in tables(HEADING, LINES, "", width))
    heading = ("rung", *(f"number {each}" for each in range(5)))
    most = len("rung") + 4 * (GAP + len("number 0"))
    parts = list(tables(heading, [heading], "", most))
    assert [len(made.columns) - 1 for made in parts] == [3, 2], "and not 4 and 1"


def test_numbers_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = tables(HEADING[:2], [line[:2] for line in LINES], "", 80)
    console.print(table)
    heading, *lines = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert heading == "rung           tokens/s"
    assert lines == ["baseline          1,000", "[fast] one  123,456,789"]
