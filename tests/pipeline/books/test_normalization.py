"""Line ends are unified, and no visible character is lost."""

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.books.normalization import count_characters, join_lines, normalize, trim

LETTERS = st.characters(exclude_categories=["Cs", "Cc", "Cf"])


@settings(max_examples=500)
@given(st.lists(st.text(LETTERS)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_line_ends_are_unified_and_lines_kept(lines: list[str], end: str) -> None:
    assert normalize(end.join(lines).encode()).text.decode() == "\n".join(lines)


@settings(max_examples=500)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_only_control_characters_and_soft_hyphens_are_removed_and_counted(text: str) -> None:
    normalized = normalize(("\n" + text).encode())
    cleaned = normalized.text.decode()[1:]
    assert not [c for c in cleaned if unicodedata.category(c) == "Cc" and c not in "\t\n"]
    meant = "".join(c.encode("latin-1").decode("cp1252", "ignore") if "\x80" <= c <= "\x9f" else c for c in text)
    visible = [c for c in meant if unicodedata.category(c) != "Cc" and c not in "\u00ad\ufeff"]
    assert [c for c in cleaned if c not in "\t\n"] == [c for c in visible if c not in "\t\n"]
    assert normalize(cleaned.encode()).text.decode() == cleaned
    assert count_characters(cleaned.encode()) == len(cleaned)
    assert normalized.removed.get("soft hyphens", 0) == text.count("\u00ad")
    assert normalized.removed.get("byte order marks", 0) == text.count("\ufeff")
    controls = sum(unicodedata.category(c) == "Cc" and c not in "\t\n\r\v\f" for c in text)
    assert normalized.removed.get("control characters", 0) == controls - normalized.repaired


def test_c1_controls_are_the_characters_of_windows_that_they_were() -> None:
    text = "I don\x92t know\x97perhaps she won\x92t. \x93Yes,\x94 he said\x85and paid \x805.\x85\x81Then he left.\n"
    normalized = normalize(text.encode())
    assert normalized.text.decode() == "I don’t know—perhaps she won’t. “Yes,” he said…and paid €5.…Then he left.\n"
    assert (normalized.repaired, normalized.removed) == (8, {"control characters": 1})
    mainframe = normalize("A line.\x85Another line.\x85".encode())
    assert mainframe.text == b"A line.\nAnother line.\n"


@given(st.text(" \n\tab"))
def test_blank_ends_become_one_line_end(text: str) -> None:
    assert trim(text.encode()).decode() == (text.strip() + "\n" if text.strip() else "")


def test_wrapped_prose_is_joined_and_verse_kept() -> None:
    prose = "It was a bright cold day in April, and the clocks were\nstriking thirteen.\n\nNext.\n"
    verse = "Tiger, tiger, burning bright\nIn the forests of the night\n"
    assert join_lines(prose.encode()).decode() == prose.replace("were\nstriking", "were striking")
    assert join_lines(verse.encode()).decode() == verse


def test_mixed_line_ends_are_unified() -> None:
    assert normalize(b"a\r\nb\rc\nd\x0be\x0cf\r\r\ng").text == b"a\nb\nc\nd\ne\nf\n\ng"


def test_lists_quotations_and_tables_are_not_joined() -> None:
    for second in ("- an item", "* a star", "  indented", "[a note", "| a cell", "= a sum", "+ more"):
        text = f"It was a bright cold day in April, and the clocks were\n{second}\n"
        assert join_lines(text.encode()).decode() == text
