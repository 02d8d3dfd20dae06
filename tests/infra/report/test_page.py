"""A page's tables are easy to read."""

import re

from infra.report.page import Page


def test_columns_of_numbers_are_aligned_right() -> None:
    """Signs, brackets and a dash for nothing belong to numbers; one word makes it a column of words."""
    page = Page("Kind", "name")
    rows = [("first", "1,000", "+3", "(1.02x)", "4"), ("second", "20", "-4", "-", "four")]
    page.table(("name", "count", "change", "ratio", "mixed"), rows)
    (table,) = page.parts
    heading, *lines = table.split("<tr>")[1:]
    for line in (heading, *lines):
        assert [bool(kind) for kind in re.findall(r'<t[hd]( class="number")?>', line)] == [0, 1, 1, 1, 0]


def test_a_table_without_rows_or_heading_is_one() -> None:
    page = Page("Kind", "name")
    page.table((), [])
    page.table((), [("one", "2")])
    assert page.parts[0] == '<div class="wide"><table><tbody></tbody></table></div>'
    assert '<td>one</td><td class="number">2</td>' in page.parts[1]
