"""Tokenizers that encode UTF-8 text to exactly the ids of the library that the tokenizer file is written for.

A :class:`Tokenizer` is read from a rank file of tiktoken or from a ``tokenizer.json`` of Hugging Face. Both the fast
encoder and the reference that checks it are built from the bytes of that file. GPT-2's rank file is package data, so
that it is not downloaded, and is checked against the hash that tiktoken itself pins. The encoders ignore special
tokens, because a book that contains the characters ``<|endoftext|>`` must not end there.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import gigatoken
import numpy as np
import psutil
import tiktoken

from infra.errors import UserError, first_line
from infra.storage.directory import StorageDir
from pipeline.encoding.chunks import CHUNK_BYTES, find_boundary, find_word_boundary, split_into_chunks
from pipeline.encoding.formats import (
    END_OF_TEXT,
    SPLIT_PATTERNS,
    added_tokens,
    find_end_of_text,
    make_tokenizer_json,
    parse_ranks,
    parse_tokenizer_json,
    to_ordinary_json,
    to_reference_json,
)
from pipeline.shards import TOKENIZER_FILE

GPT2_RANKS = Path(__file__).parents[1] / "gpt2.tiktoken"
"""Rank file of GPT-2's tokenizer."""
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""Hash of GPT-2's rank file."""

VERIFIED_BYTES = 300_000
"""Bytes of a book that are compared with the reference, which takes tiktoken 0.2 s."""
MAX_CACHE_GROWTH_BYTES = 100_000_000
"""Bytes by which this process may grow before the fast encoder is re-created.

The encoder caches every word forever, with 63 bytes each, in a table that doubles. This limit keeps the table below 300
MB. Re-creating the encoder takes 0.2 s, including the common words.
"""
_DECODED_IDS = 1_000_000
"""Number of ids that are decoded at once."""
MEMORY_CHECK_BYTES = 4_000_000
"""Bytes of text between two checks of the size of this process."""

# Letters and digits that are new in Unicode 17, in UTF-8, and some of their neighbors. tiktoken and gigatoken have
# tables of different Unicode versions, and split words at these characters differently. The patterns are grouped by
# their first byte, which few books contain, because searching for a byte takes 1% of the encoding time, and for a
# pattern 20%.
_NEWEST_LETTERS = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|[\xb1\xb3]\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    b"\xf0": re.compile(
        rb"\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]|\x9e\x9b|\xab\x9c|\xac\xba"
        rb"|\xb2[\x8e-\xbf]|\xb3[\x80-\x91])"
    ),
}

_PROSE = "It's 1,234.56 o'clock -- \"WE'LL see,\" she said;\r\n\r\n    then\tleft...  été, 日本語, мир! <|endoftext|> https://a.b/c_d\n"
EncoderName = Literal["gigatoken", "tiktoken"]


class EncodingMismatch(UserError):
    """Error for different ids of the fast encoder and the reference library."""


class _CachedEncoder:
    """Encoder of gigatoken, which caches every word; it is re-created before the cache takes too much memory."""

    def __init__(self, factory: Callable[[], gigatoken.Tokenizer]) -> None:
        self._process = psutil.Process()
        self._factory = factory
        self._create()

    def _create(self) -> None:
        self._tokenizer = self._factory()
        self._min_rss = self._process.memory_info().rss  # The minimum excludes the memory of large books.
        self._unchecked_bytes = 0

    def encode(self, text: bytes) -> np.ndarray:
        """Encode ``text`` with gigatoken."""
        self._unchecked_bytes += len(text)
        if self._unchecked_bytes > MEMORY_CHECK_BYTES:
            self._unchecked_bytes, rss = 0, self._process.memory_info().rss
            self._min_rss = min(self._min_rss, rss)
            if rss > self._min_rss + MAX_CACHE_GROWTH_BYTES:
                del self._tokenizer  # Free the cache before the next encoder needs memory.
                self._create()
        return self._tokenizer.encode(text)


class Tokenizer:
    """Byte-level BPE, with its tokens by id and the encoders of the fast and the reference library.

    ``content`` is stored with data sets and checkpoints. It is an unchanged ``tokenizer.json``, or the ranks of a
    ``.tiktoken`` file as JSON, with the name of their split pattern. If it is not a byte-level BPE, raises a
    ``UserError`` that begins with ``name``.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.name = name
        self.pattern: str | None = "gpt2"
        """Name of a rank file's split pattern; None for a ``tokenizer.json``."""
        self._ranks = content
        if self.is_gpt2:  # The hash proves that the file is valid; most commands save the 60 ms of parsing it.
            return
        try:
            self._values = json.loads(content)
            self.pattern = self._values.get("pattern")
            if self.pattern:
                self._ranks = self._values["ranks"].encode()
            _ = self.tokens
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as fault:
            raise UserError(
                f"{name} is not a byte-level BPE ({first_line(fault).rstrip('.')}). Use a .tiktoken file with all "
                "ranks, or a tokenizer.json as written by 'python -m pipeline.vocabulary'."
            ) from fault

    def __len__(self) -> int:
        return len(self._ranks.splitlines()) + 1 if self.is_gpt2 else len(self.tokens)

    @cached_property
    def tokens(self) -> list[bytes]:
        """Tokens by id, including the end-of-text token."""
        return parse_ranks(self._ranks) if self.pattern else parse_tokenizer_json(self._values)

    @cached_property
    def end_of_text(self) -> int:
        """Id of the end-of-text token."""
        return len(self) - 1 if self.pattern else find_end_of_text(self._values)

    @property
    def is_gpt2(self) -> bool:
        """Whether this is GPT-2's tokenizer, which is part of every installation."""
        return self.sha256 == GPT2_SHA256

    @cached_property
    def dtype(self) -> type[np.unsignedinteger]:
        """Smallest integer type of shards that has all ids."""
        return np.uint16 if len(self) <= 1 << 16 else np.uint32

    @property
    def library(self) -> str:
        """Name of the reference library, which the tokenizer file is written for."""
        return "tiktoken" if self.pattern else "tokenizers"

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of UTF-8 bytes of each token id; 0 for the end-of-text token."""
        sizes = np.array([len(token) for token in self.tokens], dtype=np.int64)
        sizes[self.end_of_text] = 0
        return sizes

    @cached_property
    def tiktoken(self) -> tiktoken.Encoding:
        """Encoding of tiktoken for a rank file."""
        assert self.pattern
        return tiktoken.Encoding(
            "gpt2" if self.is_gpt2 else self.sha256,
            pat_str=SPLIT_PATTERNS[self.pattern],
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens[:-1])},
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=len(self),
        )

    @cached_property
    def _tokenizers(self) -> Any:
        from tokenizers import Tokenizer  # Imported here, because it takes 0.1 s, and GPT-2 does not need it.

        tokenizer = Tokenizer.from_str(to_reference_json(self._values))
        tokenizer.encode_special_tokens = True  # This encodes special tokens as ordinary text.
        return tokenizer

    def encode_with_reference(self, text: str) -> np.ndarray:
        """Encode ``text`` with the reference library, as uint32."""
        if self.pattern:
            return self.tiktoken.encode_to_numpy(text, disallowed_special=())
        return np.array(self._tokenizers.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    @cached_property
    def _fast(self) -> _CachedEncoder:
        return _CachedEncoder(self._gigatoken)

    def _gigatoken(self) -> gigatoken.Tokenizer:
        if not self.pattern:
            return gigatoken.Tokenizer.from_json(to_ordinary_json(self._values))
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:  # gigatoken only reads ranks from a file.
            file.write(self._ranks)
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=self.pattern, special_tokens={})

    def check_encoders(self, encoder: EncoderName) -> None:
        """Build ``encoder`` and the reference, and compare them on a text that contains every token.

        Raises ``UserError`` if an encoder cannot be built, gives different ids, or loses text.
        """
        added_texts = [] if self.pattern else [token["content"] for token in added_tokens(self._values)]
        sample = _PROSE + "".join(f"x{t}x {t} {t}{t}  {t}\n{t}.\t{t}" for t in added_texts)
        words = [token.decode(errors="ignore") for token in self.tokens]
        text = "\n".join((sample, *words)) + " ".join(words)
        advice = "Use a tokenizer.json as written by 'python -m pipeline.vocabulary'."
        with self._errors_as_user_errors(self.library, advice):
            expected = self.encode_with_reference(text)
            if self._join_tokens(expected) != text.encode():
                raise ValueError("decoding the ids does not give the original text")
            chunk_ids = [self.encode_with_reference(chunk.decode()) for chunk in self.chunks(sample.encode(), 1)]
            self._check_equal(np.concatenate(chunk_ids), self.encode_with_reference(sample), "without preceding text")
        if encoder == "gigatoken":
            with self._errors_as_user_errors("gigatoken", "Use --encoder tiktoken, the reference library of the file."):
                self._check_equal(self._fast.encode(text.encode()), expected, f"than with {self.library}")

    def _check_equal(self, ids: np.ndarray, expected: np.ndarray, comparison: str) -> None:
        """Raise ``ValueError`` with the text at the first difference of ``ids`` and ``expected``."""
        if not np.array_equal(ids, expected):
            common_length = np.cumprod(ids[: len(expected)] == expected[: len(ids)]).sum()
            text = self._join_tokens(expected[common_length : common_length + 8]).decode(errors="ignore")
            raise ValueError(f"{text[:20]!r} has different ids {comparison}")

    def _join_tokens(self, ids: Iterable[int]) -> bytes:
        tokens = self.tokens
        count = len(tokens)
        return b"".join(tokens[token] for token in ids if token < count)

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        """Return the text of ``ids`` in UTF-8; takes little more memory than the text."""
        parts = (ids[start : start + _DECODED_IDS].tolist() for start in range(0, len(ids), _DECODED_IDS))
        return b"".join(map(self._join_tokens, parts))

    @contextmanager
    def _errors_as_user_errors(self, library: str, advice: str) -> Iterator[None]:
        """Raise ``UserError``, with the sentence ``advice``, for any error of ``library`` in the block."""
        try:
            yield
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:  # A panic of a Rust library is not an Exception.
            reason = first_line(fault).rstrip(".")
            raise UserError(f"{self.name} does not work with {library}: {reason}. {advice}") from fault

    def encode(self, text: bytes, encoder: EncoderName = "gigatoken") -> np.ndarray:
        """Encode ``text``, which must be valid UTF-8, without an end-of-text token.

        A chunk with letters of the newest Unicode version is always encoded with the reference.
        """
        ids = [self._encode(chunk, encoder).astype(self.dtype) for chunk in self.chunks(text)]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)

    def _encode(self, text: bytes, encoder: EncoderName) -> np.ndarray:
        if encoder == "tiktoken" or any(
            first_byte in text and letter.search(text) for first_byte, letter in _NEWEST_LETTERS.items()
        ):
            return self.encode_with_reference(text.decode())
        return self._fast.encode(text)

    def chunks(self, text: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield ``text`` in chunks of about ``size`` bytes that encode to the same ids as the whole text."""
        return split_into_chunks(text, size, find_boundary if self.is_gpt2 else find_word_boundary)

    def verify(self, book: str, text: bytes, ids: np.ndarray, size: int = VERIFIED_BYTES) -> int:
        """Compare the ``ids`` of about ``size`` bytes of ``text`` with the reference; return the bytes compared.

        Raises an ``EncodingMismatch`` that names ``book`` and the first difference.
        """
        compared_bytes = position = 0
        for chunk in self.chunks(text, min(max(1, size), CHUNK_BYTES)):
            expected = self.encode_with_reference(chunk.decode()).astype(self.dtype)
            compared_bytes += len(chunk)
            is_last = compared_bytes == len(text)
            encoded_ids = ids[position:] if is_last else ids[position : position + len(expected)]
            if not np.array_equal(expected, encoded_ids):
                raise self._mismatch(book, expected, encoded_ids, position)
            position += len(expected)
            if compared_bytes >= size:
                break
        return compared_bytes

    def _mismatch(self, book: str, expected: np.ndarray, encoded_ids: np.ndarray, position: int) -> EncodingMismatch:
        """Return the error for different ids of ``book`` from its token ``position`` on."""
        common_length = min(len(expected), len(encoded_ids))
        difference_positions = np.nonzero(expected[:common_length] != encoded_ids[:common_length])[0]
        first_difference = int(difference_positions[0]) if len(difference_positions) else common_length
        examples = slice(first_difference, first_difference + 4)
        return EncodingMismatch(
            f"gigatoken and {self.library} encode {book} differently from token {position + first_difference:,} on "
            f"({encoded_ids[examples].tolist()} instead of {expected[examples].tolist()}). "
            f"Use --encoder tiktoken, and report the versions of gigatoken and {self.library} with this book."
        )

    def tokenizer_json(self) -> str:
        """Return the ``tokenizer.json`` for Hugging Face's libraries."""
        if not self.pattern:
            return self.content.decode()
        with self._errors_as_user_errors("gigatoken", "Tokenize with a tokenizer.json, which lists its merges."):
            return make_tokenizer_json(self.tokens, self._gigatoken().merges, self.pattern)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; an incomplete character becomes a replacement character."""
        return self._join_tokens(ids).decode(errors="replace")


@cache
def gpt2(rank_file: Path = GPT2_RANKS) -> Tokenizer:
    """Return GPT-2's tokenizer. Raises ``UserError`` if ``rank_file`` differs from the published file."""
    ranks = rank_file.read_bytes()
    digest = hashlib.sha256(ranks).hexdigest()
    if digest != GPT2_SHA256:
        raise UserError(
            f"{rank_file} is not GPT-2's rank file (sha256 {digest}). Reinstall this program with "
            "'pip install --force-reinstall --no-deps .' in its folder."
        )
    return Tokenizer(ranks, str(rank_file))


def read_tokenizer(address: str | None) -> Tokenizer:
    """Read the tokenizer at ``address`` (``--tokenizer``), local or in object storage; None means GPT-2's."""
    if address is None:
        return gpt2()
    file = StorageDir.of(address)
    try:
        content = file.parent.read(file.name)
    except OSError as missing:
        raise UserError(
            f"--tokenizer {address} cannot be read: {missing.strerror or 'No such file'}. Use a .tiktoken file or a "
            "tokenizer.json, in object storage if a cluster tokenizes."
        ) from missing
    name = f"--tokenizer {address}"
    if content.lstrip().startswith(b"{") or not file.name.endswith(".tiktoken"):
        return Tokenizer(content, name)
    match = re.search("|".join(["r50k", *SPLIT_PATTERNS]), file.name)
    if match is None:
        stem = file.name.removesuffix(".tiktoken")
        raise UserError(
            f"{name}: a .tiktoken file does not store its split pattern, so the file name must contain it. Rename the "
            f"file, for example to {' or '.join(f'{stem}.{pattern}.tiktoken' for pattern in SPLIT_PATTERNS)}."
        )
    pattern = match[0].replace("r50k", "gpt2")
    ranks = "".join(f"{line}\n" for line in content.decode(errors="replace").splitlines() if line.strip())
    if pattern == "gpt2" and hashlib.sha256(ranks.encode()).hexdigest() == GPT2_SHA256:
        return gpt2()
    return Tokenizer(json.dumps({"pattern": pattern, "ranks": ranks}).encode(), name)


@cache
def load_by_hash(sha256: str, address: str | None) -> Tokenizer:
    """Return the tokenizer with this hash, read once per process from ``address`` unless it is GPT-2's.

    Raises ``UserError`` if the file at ``address`` has another hash.
    """
    if sha256 == GPT2_SHA256:
        return gpt2()
    tokenizer = read_tokenizer(address)
    if tokenizer.sha256 != sha256:
        raise UserError(
            f"{address} has changed (sha256 {tokenizer.sha256[:12]}, expected {sha256[:12]}). Restore the original, or "
            "re-create the data with 'python -m pipeline.tokenize --overwrite'."
        )
    return tokenizer


def load_from(directory: StorageDir, sha256: str) -> Tokenizer | None:
    """Return the tokenizer of the data set or checkpoint in ``directory``; None if it has none."""
    has_tokenizer = sha256 == GPT2_SHA256 or directory.exists(TOKENIZER_FILE)
    return load_by_hash(sha256, (directory / TOKENIZER_FILE).address) if has_tokenizer else None
