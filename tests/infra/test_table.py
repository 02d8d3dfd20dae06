"""Tables fit the width that they are given, with every number whole."""

import pytest

from infra.console import console
from infra.table import tables

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
