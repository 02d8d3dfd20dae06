"""Text from elsewhere stays in its cell."""

from infra.markdown import facts, plain, table


def test_a_cell_cannot_leave_its_table() -> None:
    made = table(["book", "tokens"], [["A | B\n\n# C", "1"], ["<script>alert(1)</script>", "**2**"]])
    assert made == [
        "| book | tokens |",
        "| --- | --- |",
        "| A \\| B # C | 1 |",
        "| &lt;script>alert(1)&lt;/script> | **2** |",
    ]


def test_plain_text_makes_no_link_and_no_picture() -> None:
    assert plain("![x](http://a/b.png) [y](javascript:z)") == r"!\[x](http://a/b.png) \[y](javascript:z)"
    assert plain(r"a \[x](y)") == r"a \\\[x](y)", "a backslash escapes nothing either"


def test_facts_are_three_lines_or_as_many_as_they_are() -> None:
    rows = [("What", "tiny"), ("Speed", "1 <b>"), ("Loss", "2"), ("Next", "`go`")]
    assert facts(rows).split("  \n") == ["**What:** tiny", "**Speed:** 1 &lt;b> · **Loss:** 2", "**Next:** `go`"]
    assert facts(rows, apart=True).count("  \n") == 3
    assert [facts(rows[:number]).count("  \n") for number in (1, 2, 3)] == [0, 1, 2]
