"""Text from elsewhere stays in its cell."""

from infra.markdown import table


def test_a_cell_cannot_leave_its_table() -> None:
    made = table(["book", "tokens"], [["A | B\n\n# C", "1"], ["<script>alert(1)</script>", "**2**"]])
    assert made == [
        "| book | tokens |",
        "| --- | --- |",
        "| A \\| B # C | 1 |",
        "| &lt;script>alert(1)&lt;/script> | **2** |",
    ]


def test_a_table_without_a_heading_has_empty_cells() -> None:
    assert table(["", ""], [["model", "tiny"]]) == ["|  |  |", "| --- | --- |", "| model | tiny |"]
