"""A tokenizer of one's own: trained, read from either kind of file, and exact by the library it is written for."""

import base64
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline import inspect, tokenize, vocabulary
from pipeline.config import ReadingConfig, TokenizeConfig
from pipeline.encoding.formats import SPLIT_PATTERNS
from pipeline.encoding.tokenizer import EncoderName, Tokenizer, gpt2, load_from, read_tokenizer
from pipeline.inspect import InspectConfig, decode_passages
from pipeline.shards import TOKENIZER_FILE, TokenShards, read_manifest
from pipeline.stream import Stream
from pipeline.vocabulary import VocabularyConfig

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
ENCODERS: tuple[EncoderName, ...] = ("gigatoken", "tiktoken")


def ranks(tokens: list[bytes]) -> bytes:
    """A rank file."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer, trained on the sample."""
    out = tmp_path_factory.mktemp("tokenizer") / "own.json"
    assert vocabulary.main(VocabularyConfig(size=700, out=str(out))) == 0
    return out


@pytest.fixture(scope="module")
def kinds(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """The same tokens as both kinds of files, by every split pattern, and with the end of text as the first id."""
    folder = tmp_path_factory.mktemp("kinds")
    values = json.loads(trained.read_bytes())
    own = Tokenizer(trained.read_bytes(), "own")
    splits = [{"type": "Split", "pattern": {"Regex": LLAMA}, "behavior": "Isolated", "invert": False}]
    splits.append(values["pre_tokenizer"] | {"use_regex": False})
    files: dict[str, Any] = {
        "own.json": values,
        "llama.json": values | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": splits}},
        "first.json": values
        | {
            "added_tokens": [values["added_tokens"][0] | {"id": 0}],
            "model": values["model"]
            | {"vocab": {END: 0} | {token: n + 1 for token, n in values["model"]["vocab"].items() if token != END}},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    for pattern in SPLIT_PATTERNS:
        (folder / f"own.{pattern}.tiktoken").write_bytes(ranks(own.tokens[:-1]))
    found = {file.name: read_tokenizer(str(file)) for file in folder.iterdir()}
    for each in found.values():
        each.check_encoders("gigatoken")
    return found


texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("'sdtmlvreSDTMLVRE<|endoftext|>0123456789 \n\r\t\u00a0\u3000.,!/_éÉ\u0301日😀"),
    )
)


@settings(max_examples=300)
@given(texts, st.integers(1, 40))
def test_ids_are_those_of_its_library_also_in_chunks_and_decode_to_the_text(
    kinds: dict[str, Tokenizer], text: str, size: int
) -> None:
    for name, each in kinds.items():
        ids = each.encode(text.encode())
        assert ids.tolist() == each.encode_with_reference(text).tolist(), name
        assert each.decode(ids) == text, name
        assert each.lengths[ids].sum() == len(text.encode()), name
        assert each.end_of_text not in ids, name
        pieces = [each.encode_with_reference(piece.decode()) for piece in each.chunks(text.encode(), size)]
        assert np.concatenate(pieces).tolist() == ids.tolist(), name


@settings(max_examples=100)
@given(texts)
def test_a_rank_file_is_the_same_as_a_tokenizer_json(kinds: dict[str, Tokenizer], text: str) -> None:
    for pattern in SPLIT_PATTERNS:
        ranked = kinds[f"own.{pattern}.tiktoken"]
        exported = Tokenizer(ranked.tokenizer_json().encode(), pattern)
        assert (exported.tokens, exported.end_of_text) == (ranked.tokens, ranked.end_of_text)
        assert exported.encode_with_reference(text).tolist() == ranked.encode_with_reference(text).tolist(), pattern


def test_training_is_deterministic_and_within_its_sample(trained: Path, tmp_path: Path) -> None:
    config = VocabularyConfig(size=700, out=str(tmp_path / "again.json"))
    vocabulary.main(config)
    assert (tmp_path / "again.json").read_bytes() == trained.read_bytes()
    vocabulary.main(replace(config, sample=100_000, out=str(tmp_path / "less.json")))
    assert (tmp_path / "less.json").read_bytes() != trained.read_bytes()
    found = Tokenizer(trained.read_bytes(), "own")
    assert (len(found), found.end_of_text, found.dtype) == (700, 699, np.uint16)
    assert b" the" in found.tokens
    with pytest.raises(UserError, match=r"--out \S+ already exists"):
        vocabulary.main(config)
    with pytest.raises(UserError, match="--size"):
        vocabulary.main(replace(config, size=50_000, sample=10_000, out=str(tmp_path / "more.json")))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A tokenizer of all pairs of bytes, of which those of the last letters have ids above 65,535."""
    single = [bytes([byte]) for byte in range(256)]
    pairs = [first + second for first in single for second in single]
    pairs.sort(key=lambda pair: (pair.isalpha() and pair.islower(), pair))
    file = tmp_path / "pairs.gpt2.tiktoken"
    file.write_bytes(ranks(single + pairs))
    return file


def test_more_than_65_536_ids_take_four_bytes_from_book_to_batch(
    large: Path, tmp_path: Path, store: str, write_books: Callable[..., Path]
) -> None:
    books = write_books(tmp_path / "books", 3)
    config = TokenizeConfig((str(books),), out=str(tmp_path / "out"), tokenizer=str(large), tracking_uri=store)
    tokenize.main(config)
    place = StorageDir.of(tmp_path / "out")
    found = load_from(place, read_manifest(place).tokenizer_sha256)
    assert found
    assert len(found) == 256 + 65_536 + 1
    shards = TokenShards(tmp_path / "out")
    read = {}
    for shard in (shard for split in ("train", "val") for shard in shards.open(split)):
        assert shard.tokens.dtype == np.uint32
        for row, book in enumerate(shard.batch.column("book").to_pylist()):
            read[book] = shard.tokens[shard.offsets[row] : shard.offsets[row + 1]]
    assert len(read) == 3
    for book, ids in read.items():
        assert ids[-1] == found.end_of_text == 65_792
        assert found.decode(ids[:-1]) == (tmp_path / book).read_text()
    assert max(ids[:-1].max() for ids in read.values()) > 65_535
    assert all(text for _, text in decode_passages(place, shards.manifest, 3, 20))

    stream = Stream([str(books)], 0, ReadingConfig(tokenizer=str(large)))
    streamed = {book.book: book for book in stream.validation_books(10**9)}
    assert streamed
    for book in streamed.values():
        assert book.tokens.dtype == np.uint32
        assert book.tokens.tolist() == read[book.book].tolist()


def test_a_data_set_carries_its_vocabulary_and_refuses_another(
    trained: Path,
    kinds: dict[str, Tokenizer],
    tmp_path: Path,
    store: str,
    write_books: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = TokenizeConfig(
        (str(write_books(tmp_path / "books", 3)),), out=str(tmp_path / "out"), tokenizer=str(trained),
        tracking_uri=store,
    )  # fmt: skip
    tokenize.main(config)
    assert (tmp_path / "out" / TOKENIZER_FILE).read_bytes() == trained.read_bytes()
    before = read_manifest(tmp_path / "out")
    tokenize.main(replace(config, tokenizer=str(tmp_path / "out" / TOKENIZER_FILE)))
    assert read_manifest(tmp_path / "out") == before, "the same, wherever it is"
    file = tmp_path / "out" / TOKENIZER_FILE
    for content in (b"", trained.read_bytes()[:-9], None):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        assert inspect.main(InspectConfig(str(tmp_path / "out"), verify=True)) == 1
        assert TOKENIZER_FILE in capsys.readouterr().err
    file.write_bytes(trained.read_bytes())
    assert inspect.main(InspectConfig(str(tmp_path / "out"), verify=True)) == 0
    other = tmp_path / "first.json"
    other.write_bytes(kinds["first.json"].content)
    for changed in (None, str(other)):
        with pytest.raises(UserError, match=r"tokenizer: .*--overwrite"):
            tokenize.main(replace(config, tokenizer=changed))
    tokenize.main(replace(config, tokenizer=None, overwrite=True))
    assert not (tmp_path / "out" / TOKENIZER_FILE).exists()
    assert read_manifest(tmp_path / "out").tokenizer_sha256 == gpt2().sha256


def test_a_word_of_any_length_is_learned_from_in_parts_and_others_whole(tmp_path: Path) -> None:
    """Whole, these take more than a minute."""
    words = ("ACGT" * 40_000, "1234" * 10_000, "-=" * 20_000, "老磨坊" * 10_000)
    prose = "".join(f"On day {n} the miller laughed, and went down to the river.\n" for n in range(1_500))
    (tmp_path / "a.txt").write_text("\n".join((prose, *words, prose)))
    begin = time.monotonic()
    vocabulary.main(VocabularyConfig((str(tmp_path / "a.txt"),), size=340, out=str(tmp_path / "own.json")))
    assert time.monotonic() - begin < 20
    tokens = Tokenizer((tmp_path / "own.json").read_bytes(), "own").tokens
    assert {b"ACGTACGT", b" the"} <= set(tokens)


def test_no_file_is_opened_once_the_sample_is_full(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for number in range(6):
        lines = (f"On day {n} of book {number} the miller went on along the river.\n" for n in range(20_000))
        (books / f"{number}.txt").write_text("".join(lines))
    config = VocabularyConfig((str(books),), size=270, sample=1000, out=str(tmp_path / "own.json"))
    opened: set[str] = set()
    is_on = [True]  # a hook cannot be removed

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on[0] and event == "open" and str(arguments[0]).startswith(str(books)):
            opened.add(str(arguments[0]))

    sys.addaudithook(note)
    vocabulary.main(config)
    is_on[0] = False
    assert len(opened - {str(books)}) == 1


def refusal_of(content: bytes, name: str, encoder: EncoderName) -> str:
    """Why ``encoder`` cannot be used with a tokenizer of this content, in one sentence; empty where it can."""
    try:
        Tokenizer(content, f"--tokenizer {name}").check_encoders(encoder)
    except UserError as refused:
        sentence = str(refused)
    else:
        return ""
    assert re.fullmatch(rf"--tokenizer {re.escape(name)} .*\.", sentence), sentence
    return sentence


def added(values: dict[str, Any], *contents: str, **flags: bool) -> bytes:
    """A ``tokenizer.json`` with these added tokens, which are not special."""
    end = values["added_tokens"][0]
    tokens = [
        end | {"id": end["id"] + 1 + n, "content": content, "special": False} | flags
        for n, content in enumerate(contents)
    ]
    return without(values, added_tokens=[end, *tokens])


def test_added_tokens_are_used_as_by_the_library_or_refused(trained: Path) -> None:
    values = json.loads(trained.read_bytes())
    code = "def river():\n    run()\n        <|endoftext|>\tSherlock said    Sherlock\n" * 9
    for normalized in (False, True):
        content = added(values, "    ", "        ", "Sherlock", "\n\n", normalized=normalized)
        library = HFTokenizer.from_str(content.decode())
        library.encode_special_tokens = True
        for encoder in ENCODERS:
            assert not refusal_of(content, "added.json", encoder)
            found = Tokenizer(content, "added.json")
            ids = found.encode(code.encode(), encoder).tolist()
            assert ids == library.encode(code).ids
            assert {701, 702} <= set(ids)
            assert found.end_of_text not in ids
            assert found.decode(ids) == code
    for changed, flags in (("cat", {"single_word": True}), ("cat", {"lstrip": True}), ("cat", {"rstrip": True})):
        assert refusal_of(added(values, changed, **flags), "flags.json", "gigatoken"), flags
    for encoder in ENCODERS:
        assert "New York" in refusal_of(added(values, "New York"), "cut.json", encoder), "it may be cut in a book"
    end = [values["added_tokens"][0] | {"special": False}]
    own = Tokenizer(without(values, added_tokens=end), "end.json")
    for encoder in ENCODERS:
        own.check_encoders(encoder)
        assert own.end_of_text not in own.encode(b"before<|endoftext|>after", encoder), "a book does not end there"


def test_older_files_and_the_hubs_own_are_read(trained: Path) -> None:
    values = json.loads(trained.read_bytes())
    model = {name: value for name, value in values["model"].items() if name in ("dropout", "unk_token", "vocab")}
    pairs = values["model"]["merges"]
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    text = "It was the best of times, it was the worst of times.\n" * 9
    expected = Tokenizer(trained.read_bytes(), "own").encode(text.encode()).tolist()
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        for changes in ({}, {"unk_token": "<|endoftext|>"}, {"continuing_subword_prefix": "", "fuse_unk": False}):
            older = model | {"merges": merges} | changes
            content = without(values, model=older, pre_tokenizer=split, normalizer=None)
            for encoder in ENCODERS:
                assert not refusal_of(content, "gpt2.json", encoder)
                assert Tokenizer(content, "gpt2.json").encode(text.encode(), encoder).tolist() == expected


def test_what_cannot_be_reproduced_is_refused_with_one_sentence(trained: Path) -> None:
    values = json.loads(trained.read_bytes())
    model = values["model"]
    drop = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Removed", "invert": False}
    words = drop | {"pattern": {"Regex": r" ?\S+ \S+|\s|\S+"}, "behavior": "Isolated"}
    after = values["pre_tokenizer"] | {"use_regex": False}
    lone = {"id": 700, "content": "\ud800"} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized", "special"), False
    )
    wrong = {
        "prefix": without(values, model=model | {"continuing_subword_prefix": "##"}),
        "suffix": without(values, model=model | {"end_of_word_suffix": "</w>"}),
        "dropout": without(values, model=model | {"dropout": 0.1}),
        "blanks": without(values, pre_tokenizer={"type": "Sequence", "pretokenizers": [drop, after]}),
        "merge": without(values, model=model | {"merges": [["zzz", "yyy"]]}),
        "surrogate": without(values, added_tokens=[*values["added_tokens"], lone]),
        "surrogates": without(values, model=model | {"merges": [["\ud800", "a"]]}),
        "null": without(values, added_tokens=None),
        "deep": b'{"model": ' + b"[" * 100_000,
    }
    for name, content in wrong.items():
        for encoder in ENCODERS:
            assert refusal_of(content, f"{name}.json", encoder), name
    pairs = model["merges"] + [["e", "r"], [" ", " "]]
    joined = {"type": "Sequence", "pretokenizers": [words, after]}
    known = model["vocab"] | {"e\u0120t": 700}
    content = without(
        values, pre_tokenizer=joined, model=model | {"vocab": known, "merges": [["e\u0120", "t"], *pairs]}
    )
    assert refusal_of(content, "words.json", "tiktoken")


def test_a_panic_of_an_encoder_is_one_sentence_and_the_other_encoder_works(kinds: dict[str, Tokenizer]) -> None:
    content = json.dumps(
        {"pattern": "gpt2", "ranks": ranks([*kinds["own.json"].tokens[:256], b"never merged"]).decode()}
    ).encode()
    assert "--encoder tiktoken" in refusal_of(content, "own.gpt2.tiktoken", "gigatoken")
    assert not refusal_of(content, "own.gpt2.tiktoken", "tiktoken")
    with pytest.raises(UserError, match=r"own\.gpt2\.tiktoken"):
        Tokenizer(content, "own.gpt2.tiktoken").tokenizer_json()


def test_empty_lines_in_a_rank_file_change_nothing(tmp_path: Path, kinds: dict[str, Tokenizer]) -> None:
    content = ranks(kinds["own.json"].tokens[:-1])
    (tmp_path / "whole.gpt2.tiktoken").write_bytes(content)
    whole = read_tokenizer(str(tmp_path / "whole.gpt2.tiktoken"))
    for changed in (content + b"\n", content + b"\r\n \n", b"\n" + content, content.replace(b"\n", b"\r\n")):
        (tmp_path / "other.gpt2.tiktoken").write_bytes(changed)
        found = read_tokenizer(str(tmp_path / "other.gpt2.tiktoken"))
        found.check_encoders("gigatoken")
        assert (found.sha256, len(found), found.end_of_text) == (whole.sha256, len(whole), whole.end_of_text)


def without(values: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(values | changes).encode()


def test_what_is_no_vocabulary_is_refused_by_name(trained: Path, kinds: dict[str, Tokenizer], tmp_path: Path) -> None:
    values = json.loads(trained.read_bytes())
    model, pre = values["model"], values["pre_tokenizer"]
    tokens = kinds["own.json"].tokens[:-1]
    known = dict(list(model["vocab"].items())[:-1])
    wrong = {
        "books.txt": (b"It was the best of times.", "books.txt"),
        "list.json": (b"[1, 2]", "list.json"),
        "half.json": (trained.read_bytes()[:-9], "half.json"),
        "byte.gpt2.tiktoken": (ranks(tokens[1:]), "single bytes"),
        "rank.gpt2.tiktoken": (ranks(tokens).replace(b" 300\n", b" 9000\n"), "the id 300 has no token"),
        "twice.gpt2.tiktoken": (ranks([*tokens, tokens[-1]]), "same token"),
        "base.gpt2.tiktoken": (b"***** 0\n" + ranks(tokens), "base.gpt2.tiktoken"),
        "plain.tiktoken": (ranks(tokens), "split pattern"),
        "hole.json": (without(values, model=model | {"vocab": known | {"zzz": 9000}}), "has no token"),
        "byte.json": (without(values, model=model | {"vocab": {k: v for k, v in known.items() if k != "A"}}), "b'A'"),
        "unigram.json": (without(values, model=model | {"type": "Unigram"}), "Unigram"),
        "words.json": (without(values, pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        "none.json": (without(values, pre_tokenizer=None), "none.json"),
        "prefix.json": (without(values, pre_tokenizer=pre | {"add_prefix_space": True}), "add_prefix_space"),
        "whole.json": (without(values, pre_tokenizer=pre | {"use_regex": False}), "split pattern"),
        "lower.json": (without(values, normalizer={"type": "Lowercase"}), "normalizer"),
        "end.json": (without(values, added_tokens=[]), END),
    }
    for name, (content, said) in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="--tokenizer ") as refused:
            read_tokenizer(str(tmp_path / name)).check_encoders("gigatoken")
        sentence = str(refused.value)
        assert said in sentence, sentence
        assert name in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence
    with pytest.raises(UserError, match=r"--tokenizer .*gone\.json cannot be read"):
        read_tokenizer(str(tmp_path / "gone.json"))
    splits = [{"type": "Split", "pattern": {"Regex": r"\w+|\W"}, "behavior": "Isolated", "invert": False}]
    splits.append(pre | {"use_regex": False})
    odd = Tokenizer(without(values, pre_tokenizer={"type": "Sequence", "pretokenizers": splits}), "odd.json")
    odd.check_encoders("tiktoken")
    with pytest.raises(UserError, match=r"odd\.json .*--encoder tiktoken"):
        odd.check_encoders("gigatoken")
