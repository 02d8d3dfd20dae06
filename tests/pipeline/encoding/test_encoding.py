"""Token ids are exactly those of tiktoken, whatever the text."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from pipeline.books.readers import FileRange, RawBook, read_books
from pipeline.books.sources import build_inventory
from pipeline.config import TokenizeConfig
from pipeline.encoding.chunks import CHUNK_BYTES
from pipeline.encoding.tokenizer import GPT2_RANKS, EncodingMismatch, gpt2

GPT2 = gpt2()
chunks, decode, encode, verify = GPT2.chunks, GPT2.decode, GPT2.encode, GPT2.verify

ODD_SPACES = "\t\n\v\f\r\x1c\x1d\x85\u00a0\u1680\u180e\u2000\u2028\u2029\u202f\u205f\u3000\u200b\ufeff "
texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(ODD_SPACES + "'sdtmlvre<|endoftext|>0123456789 \n"),
    )
)


@settings(max_examples=2000)
@given(texts)
def test_ids_equal_tiktoken_and_decode_to_the_text(text: str) -> None:
    ids = encode(text.encode())
    assert ids.tolist() == GPT2.tiktoken.encode_ordinary(text)
    assert decode(ids) == text


# What is a letter or digit since Unicode 17 and was unassigned before (UnicodeData.txt of 16.0 and 17.0 compared).
NEWEST = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip


def test_letters_of_a_newer_unicode_than_one_encoder_knows_have_the_ids_of_tiktoken() -> None:
    for first, last in NEWEST:
        for letter in map(chr, range(first, last + 1)):
            text = f"x{letter}x 1{letter}{letter}1 \u6000{letter}\u6000 !{letter}!"
            assert encode(text.encode()).tolist() == GPT2.tiktoken.encode_ordinary(text), hex(ord(letter))


def test_every_character_of_the_basic_plane_has_the_ids_of_tiktoken() -> None:
    for letter in map(chr, (*range(0xD800), *range(0xE000, 0x10000))):
        text = f"x{letter}x 1{letter} !{letter}!"
        assert encode(text.encode()).tolist() == GPT2.tiktoken.encode_ordinary(text), hex(ord(letter))


def test_the_sample_has_the_ids_of_tiktoken() -> None:
    books = list(read_books(FileRange(build_inventory(["sample"]).files[0], 0), TokenizeConfig()))
    assert len(books) == 66
    for book in books:
        assert isinstance(book, RawBook)
        assert np.array_equal(encode(book.data), encode(book.data, "tiktoken")), book.id


def test_a_special_token_in_a_book_is_ordinary_text() -> None:
    text = b"before<|endoftext|>after"
    assert 50256 not in encode(text)
    assert encode(text).tolist() == encode(text, "tiktoken").tolist()


PARTS = [
    "word", " ", "\n", "a b", "'s", "'", "é", "1 2", ".", "\t", "\u00a0", "\u2003", "\u3000", "\x1c", "мельник",
    "река.", "老磨坊主", "，", "。", "？「", "हिन्दी।", "ไทย", "བོད་", "မြန်မာ။", "ខ្មែរ។", "عربي،",
    "\U0001f600", "②", "\u0301",
]  # fmt: skip


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PARTS), max_size=200), st.integers(1, 40))
def test_text_may_be_encoded_in_chunks(parts: list[str], size: int) -> None:
    text = "".join(parts)
    pieces = list(chunks(text.encode(), size))
    assert b"".join(pieces) == text.encode()
    expected = GPT2.tiktoken.encode_ordinary(text)
    for encoder in ("gigatoken", "tiktoken"):
        assert [i for piece in pieces for i in encode(piece, encoder).tolist()] == expected


runs = st.lists(
    st.tuples(st.sampled_from("\n\n\u00a0\u00a0 \t\u3000\u2003\u2028x"), st.integers(1, 5) | st.integers(1, 130)),
    max_size=8,
)


@settings(max_examples=500)
@given(runs, st.integers(1, 80))
def test_runs_of_blanks_may_be_encoded_in_chunks(runs: list[tuple[str, int]], size: int) -> None:
    text = "".join(character * count for character, count in runs)
    pieces = list(chunks(text.encode(), size))
    assert b"".join(pieces) == text.encode()
    assert [i for piece in pieces for i in encode(piece, "tiktoken").tolist()] == GPT2.tiktoken.encode_ordinary(text)


@pytest.mark.parametrize("blank", [" ", "\n", "\u00a0", "\n\t"])
def test_a_million_blanks_in_a_row_are_encoded_and_verified(blank: str) -> None:
    text = f"word{blank * (1_200_000 // len(blank))}word".encode()
    with pytest.raises(ValueError, match="stack"):
        GPT2.tiktoken.encode_to_numpy(text.decode())
    ids = encode(text, "tiktoken")
    assert np.array_equal(ids, encode(text))
    assert verify("blanks", text, ids) < len(text)


def test_text_of_every_script_is_cut_near_the_size() -> None:
    for sentence in (
        "Старый мельник засмеялся, а внучка побежала к реке. ",
        "老磨坊主笑了，孙女跑向河边。太阳下山以后，大家坐在长桌旁。",
        "คนสีข้าวเฒ่าหัวเราะ หลานสาววิ่งไปที่แม่น้ำ ",
        "बूढ़ा चक्कीवाला हँसा। पोती नदी की ओर दौड़ी। ",
        "རྒད་པོ་དེས་གད་མོ་ཤོར།",
    ):
        text = (sentence * 200).encode()
        for size in (100, 101, 102, 1000):
            assert max(map(len, chunks(text, size))) < size + len(sentence.encode())


def test_the_fast_encoder_keeps_its_ids_and_its_memory_when_it_is_made_again() -> None:
    """In a process of its own, which learns four million words: they would take 312 MB, and 445 MB for a moment."""
    script = """
        import re
        from pathlib import Path
        import numpy as np
        from pipeline.encoding.tokenizer import gpt2
        encode, reference = gpt2().encode, lambda: gpt2().tiktoken
        sample = b"The miller's granddaughter ran to the river; nobody followed her."
        before, chance = encode(sample), np.random.default_rng(0)
        kilobytes = lambda name: int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
        small = kilobytes("VmRSS")
        for _ in range(64):
            words = chance.integers(97, 123, (62_500, 8), dtype=np.uint8)
            words[:, 7] = 32
            assert np.array_equal(encode(words.tobytes()), encode(words.tobytes()))
        assert np.array_equal(encode(sample), before)
        print(kilobytes("VmHWM") - small)
    """
    done = subprocess.run(
        [sys.executable, "-c", "import resource\n" + textwrap.dedent(script)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) < 300_000


def test_an_altered_rank_table_is_refused(tmp_path: Path) -> None:
    altered = tmp_path / "gpt2.tiktoken"
    altered.write_bytes(GPT2_RANKS.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"gpt2\.tiktoken is not GPT-2's"):
        gpt2(altered)


def test_a_text_longer_than_a_chunk_is_encoded_to_its_end() -> None:
    line = b"It was a quiet morning on the harbour road.\n"
    once = encode(line * 1000)
    ids = encode(line * (CHUNK_BYTES // len(line) // 1000 + 1) * 1000)
    assert np.array_equal(ids, np.tile(once, len(ids) // len(once)))


def test_the_beginning_of_a_long_book_and_all_of_a_short_one_are_verified() -> None:
    text = b"It was the best of times, it was the worst of times."
    ids = encode(text)
    assert verify("Dickens", text, ids) == len(text)
    with pytest.raises(EncodingMismatch, match=f"Dickens.*from token {len(ids)} on"):
        verify("Dickens", text, np.append(ids, ids[-1:]))
    with pytest.raises(EncodingMismatch, match=f"from token {len(ids) - 1} on"):
        verify("Dickens", text, ids[:-1])
    ids[-1] += 1
    assert verify("Dickens", text, ids, 20) == len("It was the best of times"), "up to the next place for a cut"
    ids[0] += 1
    with pytest.raises(EncodingMismatch, match="from token 0 on"):
        verify("Dickens", text, ids, 20)
