"""What an output knows of its texts is stored whole, and damage is never taken for having held nothing out."""

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.job.split_history import SplitHistory
from pipeline.shards import SPLIT_HISTORY_FILE

TEXTS = [f"{number:064x}" for number in range(4)]


@pytest.fixture
def history(place: StorageDir) -> SplitHistory:
    """Three texts: trained on, held out by its id, and held out against its id with a signature."""
    history = SplitHistory.read(place, 0.1)
    history.add("a", TEXTS[0], is_val=False, is_val_by_id=False, signature=[1] * 128)
    history.add("b", TEXTS[1], is_val=True, is_val_by_id=True, signature=None)
    history.add("c", TEXTS[2], is_val=True, is_val_by_id=False, signature=[2**32 - 1] * 128)
    return history


def test_a_history_is_read_as_it_was_written(place: StorageDir, history: SplitHistory) -> None:
    history.write(place)
    again = SplitHistory.read(place, 0.5)
    assert again == history
    content = place.read(SPLIT_HISTORY_FILE)
    again.write(place)
    assert place.read(SPLIT_HISTORY_FILE) == content
    assert list(again.signatures.values()) == [[2**32 - 1] * 128], "of what is held out"


def test_a_book_is_known_by_its_text_or_else_by_an_id_that_says_otherwise(history: SplitHistory) -> None:
    assert [history.was_held_out("new", text) for text in TEXTS] == [False, True, True, None]
    assert [history.was_held_out(book, TEXTS[3]) for book in "abc"] == [None, None, True]
    history.add("d", TEXTS[1], is_val=False, is_val_by_id=False, signature=None)
    assert history.was_held_out("d", TEXTS[1]), "what was held out once stays so"


def test_a_larger_share_keeps_what_is_held_out_and_a_smaller_one_nothing(history: SplitHistory) -> None:
    assert history.restrict_to(0.1) is history
    larger = history.restrict_to(0.2)
    assert [larger.was_held_out("new", text) for text in TEXTS] == [None, True, True, None]
    assert larger.was_held_out("c", TEXTS[3])
    smaller = history.restrict_to(0.05)
    assert [smaller.was_held_out("c", text) for text in TEXTS] == [None] * 4


@pytest.mark.parametrize("content", [b"", b"ARROW1", None])
def test_a_damaged_history_is_refused(place: StorageDir, history: SplitHistory, content: bytes | None) -> None:
    history.write(place)
    place.write(SPLIT_HISTORY_FILE, place.read(SPLIT_HISTORY_FILE)[:-9] if content is None else content)
    with pytest.raises(UserError, match=r"split_history\S* is damaged .*Restore it, or use another --out"):
        SplitHistory.read(place, 0.1)
