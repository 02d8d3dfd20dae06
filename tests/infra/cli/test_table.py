"""Tables fit the width that they are given, with every number whole, and in Markdown text stays in its cell."""

import pytest

from infra.cli.console import console
from infra.cli.table import Report, Table, format_summary, split_table

HEADING = ("rung", "tokens/s", "step", "GB", "[loss]")
LINES = [("baseline", "1,000", "", "10.00", "3.250"), ("[fast] one", "123,456,789", "1.50x ±7%", "9.00", "3.249")]


@pytest.mark.parametrize(("width", "parts"), [(200, 1), (44, 2), (30, 3), (5, 4)])
def test_columns_that_do_not_fit_follow_below(capsys: pytest.CaptureFixture[str], width: int, parts: int) -> None:
    made = list(split_table(HEADING, LINES, "A title", width))
    assert len(made) == parts
    for table in made:
        console.print(table)
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()]
    assert lines[0] == "A title"
    assert printed.count("A title") == 1
    for cell in (*HEADING[1:], *LINES[0][1:], *LINES[1][1:]):
        assert printed.count(cell) == 1 if cell else True, cell
    assert printed.count("[fast]") == printed.count("baseline") == parts
    if width > 20:
        assert max(map(len, lines)) <= width


def test_text_is_wrapped_between_words_before_a_table_is_parted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [("1", "compile=whole, checkpointing=full", "1,000"), ("2", "as the control", "999")]
    (table,) = split_table(("", "knobs", "tokens/s"), lines, "", 33)
    console.print(table)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        "   knobs                 tokens/s", "1  compile=whole,           1,000", "   checkpointing=full",
        "2  as the control             999",
    ]  # fmt: skip


def test_a_word_that_does_not_fit_is_parted_and_the_first_column_never(capsys: pytest.CaptureFixture[str]) -> None:
    long = "/a/path/without/any/blank" * 5
    lines = [("micro-batch 8 x 2", "1,234", "winner"), ("micro-batch 16 x 1", "-", f"failed: see {long}")]
    for table in split_table(("candidate", "tokens/s", ""), lines, "", 80):
        console.print(table)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, printed)) <= 80
    assert "…" not in "".join(printed)
    assert long in "".join(line[12:].strip() for line in printed)
    assert sum("micro-batch" in line for line in printed) == 4


def test_a_cell_cannot_leave_its_table_and_makes_no_link() -> None:
    lines = [["A | B\n\n# C", "1"], ["<script>alert(1)</script>", r"![x](http://a/b.png) \[y](javascript:z)"]]
    assert Table("Books", ["book", "tokens"], lines).markdown().splitlines() == [
        "#### Books",
        "",
        "| book | tokens |",
        "| --- | --- |",
        "| A \\| B # C | 1 |",
        r"| &lt;script>alert(1)&lt;/script> | !\[x](http://a/b.png) \\\[y](javascript:z) |",
    ]


ROWS = [("What", "tiny"), ("Speed", "1 <b>"), ("Loss", "2"), ("Next", "`go`")]


def test_facts_are_three_lines_of_markdown_or_as_many_as_they_are() -> None:
    assert format_summary(ROWS).split("  \n") == [
        "**What:** tiny",
        "**Speed:** 1 &lt;b> · **Loss:** 2",
        "**Next:** `go`",
    ]
    assert [format_summary(ROWS[:number]).count("  \n") for number in (1, 2, 3)] == [0, 1, 2]


def test_a_report_is_told_alike_with_its_facts_first_on_a_page_and_last_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report(ROWS, ["- a [b] note", Table("", ("", ""), [("books", "66")])])
    report.show()
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == ["- a [b] note", "", "books  66", "", "What   tiny", "Speed  1 <b>", "Loss   2", "Next   go"]
    page = report.markdown()
    assert page.startswith(format_summary(ROWS))
    assert page.endswith("\n\n- a [b] note\n\n|  |  |\n| --- | --- |\n| books | 66 |\n")


def test_a_long_heading_of_numbers_is_wrapped_before_a_table_is_parted(capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = split_table(("rung", "peak memory (GB)", "speed vs control"), [("base", "10.00", "x1.234")], "", 24)
    console.print(table)
    printed = capsys.readouterr().out
    assert max(map(len, map(str.rstrip, printed.splitlines()))) <= 24
    assert {"rung", "peak", "memory", "(GB)", "speed", "vs", "control", "10.00", "x1.234"} <= set(printed.split())
    (wide,) = split_table(("rung", "peak memory (GB)"), [("base", "10.00")], "", 80)
    console.print(wide)
    assert "peak memory (GB)" in capsys.readouterr().out
