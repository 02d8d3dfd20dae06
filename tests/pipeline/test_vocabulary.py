"""A vocabulary of one's own: trained, read from either kind of file, and exact by the library it is written for."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from infra.storage_dir import StorageDir
from pipeline import tokenize, vocabulary
from pipeline.config import Reading, TokenizeConfig
from pipeline.encoding.formats import PATTERNS
from pipeline.encoding.vocabulary import Vocabulary, gpt2, read_vocabulary, vocabulary_at
from pipeline.inspect import passages
from pipeline.shards import VOCABULARY_FILE, TokenShards, read_manifest
from pipeline.stream import Stream
from pipeline.vocabulary import VocabularyConfig

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


def ranks(tokens: list[bytes]) -> bytes:
    """A rank file."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary of the sample."""
    out = tmp_path_factory.mktemp("vocabulary") / "own.json"
    assert vocabulary.main(VocabularyConfig(size=700, out=str(out))) == 0
    return out


@pytest.fixture(scope="module")
def kinds(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    """The same tokens as both kinds of files, by every split pattern, and with the end of text as the first id."""
    folder = tmp_path_factory.mktemp("kinds")
    values = json.loads(trained.read_bytes())
    own = Vocabulary(trained.read_bytes(), "own")
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
    for pattern in PATTERNS:
        (folder / f"own.{pattern}.tiktoken").write_bytes(ranks(own.tokens[:-1]))
    found = {file.name: read_vocabulary(str(file)) for file in folder.iterdir()}
    for each in found.values():
        each.prepare("gigatoken")
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
    kinds: dict[str, Vocabulary], text: str, size: int
) -> None:
    for name, each in kinds.items():
        ids = each.encode(text.encode())
        assert ids.tolist() == each.reference(text).tolist(), name
        assert each.decode(ids) == text, name
        assert each.lengths[ids].sum() == len(text.encode()), name
        assert each.end_of_text not in ids, name
        pieces = [each.reference(piece.decode()) for piece in each.chunks(text.encode(), size)]
        assert np.concatenate(pieces).tolist() == ids.tolist(), name


@settings(max_examples=100)
@given(texts)
def test_a_rank_file_is_the_same_as_a_tokenizer_json(kinds: dict[str, Vocabulary], text: str) -> None:
    for pattern in PATTERNS:
        ranked = kinds[f"own.{pattern}.tiktoken"]
        exported = Vocabulary(ranked.tokenizer_json().encode(), pattern)
        assert (exported.tokens, exported.end_of_text) == (ranked.tokens, ranked.end_of_text)
        assert exported.reference(text).tolist() == ranked.reference(text).tolist(), pattern


def test_training_is_deterministic_and_within_its_sample(trained: Path, tmp_path: Path) -> None:
    config = VocabularyConfig(size=700, out=str(tmp_path / "again.json"))
    vocabulary.main(config)
    assert (tmp_path / "again.json").read_bytes() == trained.read_bytes()
    vocabulary.main(replace(config, sample=100_000, out=str(tmp_path / "less.json")))
    assert (tmp_path / "less.json").read_bytes() != trained.read_bytes()
    found = Vocabulary(trained.read_bytes(), "own")
    assert (len(found), found.end_of_text, found.dtype) == (700, 699, np.uint16)
    assert b" the" in found.tokens
    with pytest.raises(UserError, match="exists already"):
        vocabulary.main(config)
    with pytest.raises(UserError, match="--size"):
        vocabulary.main(replace(config, size=50_000, sample=10_000, out=str(tmp_path / "more.json")))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A vocabulary of all pairs of bytes, of which those of the last letters have ids above 65,535."""
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
    config = TokenizeConfig((str(books),), out=str(tmp_path / "out"), vocabulary=str(large), tracking_uri=store)
    tokenize.main(config)
    place = StorageDir.of(tmp_path / "out")
    found = vocabulary_at(place, read_manifest(place).vocabulary_sha256)
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
    assert all(text for _, text in passages(place, shards.manifest, 3, 20))

    stream = Stream([str(books)], 0, Reading(vocabulary=str(large)))
    streamed = {book.book: book for book in stream.held_out(10**9)}
    assert streamed
    for book in streamed.values():
        assert book.tokens.dtype == np.uint32
        assert book.tokens.tolist() == read[book.book].tolist()


def test_a_data_set_carries_its_vocabulary_and_refuses_another(
    trained: Path, kinds: dict[str, Vocabulary], tmp_path: Path, store: str, write_books: Callable[..., Path]
) -> None:
    config = TokenizeConfig(
        (str(write_books(tmp_path / "books", 3)),), out=str(tmp_path / "out"), vocabulary=str(trained),
        tracking_uri=store,
    )  # fmt: skip
    tokenize.main(config)
    assert (tmp_path / "out" / VOCABULARY_FILE).read_bytes() == trained.read_bytes()
    before = read_manifest(tmp_path / "out")
    tokenize.main(replace(config, vocabulary=str(tmp_path / "out" / VOCABULARY_FILE)))
    assert read_manifest(tmp_path / "out") == before, "the same, wherever it is"
    other = tmp_path / "first.json"
    other.write_bytes(kinds["first.json"].content)
    for changed in (None, str(other)):
        with pytest.raises(UserError, match=r"vocabulary was .*--overwrite"):
            tokenize.main(replace(config, vocabulary=changed))
    tokenize.main(replace(config, vocabulary=None, overwrite=True))
    assert not (tmp_path / "out" / VOCABULARY_FILE).exists()
    assert read_manifest(tmp_path / "out").vocabulary_sha256 == gpt2().sha256


def without(values: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(values | changes).encode()


def test_what_is_no_vocabulary_is_refused_by_name(trained: Path, kinds: dict[str, Vocabulary], tmp_path: Path) -> None:
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
        with pytest.raises(UserError, match="--vocabulary ") as refused:
            read_vocabulary(str(tmp_path / name)).prepare("gigatoken")
        sentence = str(refused.value)
        assert said in sentence, sentence
        assert name in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence
    with pytest.raises(UserError, match=r"--vocabulary .*gone\.json cannot be read"):
        read_vocabulary(str(tmp_path / "gone.json"))
    splits = [{"type": "Split", "pattern": {"Regex": r"\w+|\W"}, "behavior": "Isolated", "invert": False}]
    splits.append(pre | {"use_regex": False})
    odd = Vocabulary(without(values, pre_tokenizer={"type": "Sequence", "pretokenizers": splits}), "odd.json")
    odd.prepare("tiktoken")
    with pytest.raises(UserError, match=r"odd\.json .*--encoder tiktoken"):
        odd.prepare("gigatoken")
