"""Editions of one work are found, each with the most similar one."""

import random

from pipeline.job.similarity import find_near_duplicates, find_similar, make_signature


def text(seed: int, words: int = 2000) -> list[str]:
    chance = random.Random(seed)
    return [f"word{chance.randrange(5000)}" for _ in range(words)]


def signed(words: list[str]) -> list[int]:
    return make_signature(" ".join(words).encode())


def test_case_and_line_ends_do_not_matter() -> None:
    words = text(1)
    assert signed(words) == make_signature("\n".join(words).upper().encode())
    assert signed(words) != signed(words[:1000])
    assert len(make_signature(b"few words")) == len(make_signature(b"")) == len(signed(words))


def test_editions_are_compared_beyond_their_beginning() -> None:
    front = text(1, 50)
    books = {"a": signed(front + text(2)), "b": signed(front + text(3))}
    assert find_near_duplicates(books) == {}


def test_a_book_duplicates_the_most_similar_one_that_is_kept() -> None:
    first, other = text(1), text(2)
    books = {
        "c": signed([*first, "the", "end"]),
        "a": signed(first),
        "b": signed(first[:1500] + text(4, 500)),  # some 0.6 of all shingles are a's
        "d": signed(other),
        "e": signed(other[:-300]),
        "f": signed(text(3)),
    }
    found = find_near_duplicates(dict(sorted(books.items())))
    assert {book: original for book, (original, _) in found.items() if book != "b"} == {"c": "a", "e": "d"}
    assert found["c"][1] > 0.9
    assert 0.6 <= found["e"][1] < 1


def test_books_with_something_in_common_are_not_the_same_work() -> None:
    words = text(1)
    assert find_near_duplicates({"a": signed(words), "b": signed(words[:1000] + text(2, 1000))}) == {}


def test_what_was_found_to_be_a_duplicate_is_no_original() -> None:
    """The third resembles only the second, which is left out itself: without the third its text would be lost."""
    books = {"a": [0] * 128, "b": [0] * 88 + [1] * 40, "c": [0] * 68 + [2] * 20 + [1] * 40}
    assert find_near_duplicates(books) == {"b": ("a", 88 / 128)}


def test_editions_of_other_texts_are_found() -> None:
    first, other = text(1), text(2)
    books = {"edition": signed([*first, "the", "end"]), "another": signed(text(3))}
    assert find_similar(books, [signed(other), signed(first)]) == {"edition"}
    assert find_similar(books, []) == set()
