"""Train a vocabulary on books: ``python -m pipeline.vocabulary BOOKS --size 4096 --out data/tokenizer.json``.

It is the ``tokenizer.json`` of a byte-level BPE, for ``python -m pipeline.tokenize --tokenizer``. The same books and
settings give the same file: they are read in an order of their own, and the trainer breaks ties by id.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

import tyro
import xxhash

from infra.cli import command
from infra.cli.console import console
from infra.cli.progress import Status, status
from infra.cli.units import Bytes
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.books.sources import build_inventory
from pipeline.config import SAMPLE, CleaningConfig, TokenizeConfig
from pipeline.encoding.formats import END
from pipeline.encoding.tokenizer import Tokenizer, gpt2
from pipeline.job.plan import Partition, make_partitions
from pipeline.job.task import clean_and_filter, drop_on_error, read_or_drop

BYTE_TOKENS = 256
PIECE = 1_000_000
"""Bytes of text in the pieces of which a sample is made."""
MAX_WORD = 1000
"""Characters of a word that the trainer gets whole: its time grows with their square, and no longer word is worth a
token. Only parts of longer ones are learned from, such as a genome or encoded data."""
_LONG_WORD = re.compile(rf"[^\W\d_]{{{MAX_WORD}}}|\d{{{MAX_WORD}}}|(?:[^\w\s]|_){{{MAX_WORD}}}|\s{{{MAX_WORD}}}")
_BLANKS = bytes.maketrans(b"\t\n\v\f\r", b" " * 5)
CHUNK = 100_000
"""Bytes of text that the trainer gets at a time: it collects 256 of them before it counts their words."""


@dataclass(frozen=True)
class VocabularyConfig(CleaningConfig):
    """Train the vocabulary of a byte-level BPE, with GPT-2's split pattern, on a sample of books."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = (SAMPLE,)
    """Books, as pipeline.tokenize takes them."""

    size: int = 4096
    """Token ids, at least 257: the single bytes, the tokens that are learned, and the end of text, which is the last.
    Shards of up to 65536 ids take two bytes per token, others four."""

    sample: Bytes = 100_000_000
    """Text to learn from, at least 1kB, in pieces spread over the books."""

    out: str = "data/tokenizer.json"
    """The file to write, also in object storage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size <= BYTE_TOKENS:
            raise UserError(
                f"--size {self.size} must be at least {BYTE_TOKENS + 1}, for all bytes and the end of text."
            )
        if self.sample < 1000:
            raise UserError(f"--sample {self.sample}B is too small to learn from: give 1kB or more.")


def main(config: VocabularyConfig) -> int:
    file = StorageDir.of(config.out)
    if file.parent.exists(file.name):
        raise UserError(f"--out {config.out} exists already: name another file, or remove it.")
    with status("listing the books") as live_status:
        content = train(config, live_status)
    file.parent.write(file.name, content)
    tokenizer = Tokenizer(content, config.out)
    console.print(
        f"{config.out}: {len(tokenizer):,} ids, sha256 {tokenizer.sha256[:12]}; encode books with 'python -m "
        "pipeline.tokenize "
        f"... --tokenizer {config.out}'",
        markup=False,
    )
    return 0


def train(config: VocabularyConfig, live_status: Status) -> bytes:
    """The ``tokenizer.json``. Raises ``UserError`` when the books are missing, or too few for its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    cleaning = {field.name: getattr(config, field.name) for field in fields(CleaningConfig)}
    settings = TokenizeConfig(config.sources, shard_size=PIECE, **cleaning)
    partitions = make_partitions(build_inventory(config.sources), settings)
    tokenizer.train_from_iterator(_texts(config, partitions, live_status), trainer)
    tokenizer.add_special_tokens([END])
    if (vocab_size := tokenizer.get_vocab_size()) < config.size:
        raise UserError(
            f"the books have enough words for {vocab_size:,} of --size {config.size:,} token ids: name more "
            "books, or give "
            f"--size {vocab_size}."
        )
    return tokenizer.to_str().encode()


def _texts(config: VocabularyConfig, partitions: list[Partition], live_status: Status) -> Iterator[str]:
    """The first ``sample`` bytes of the pieces' text, in an order that depends on their numbers alone."""
    size = 0
    ordered = sorted(partitions, key=lambda piece: xxhash.xxh3_64_intdigest(piece.name.encode()))
    for settings, part in ((partition.settings, part) for partition in ordered for part in partition.parts):
        for raw in read_or_drop(part, settings):
            book = (
                raw if isinstance(raw, DroppedBook) else drop_on_error(raw.id, partial(clean_and_filter, raw, settings))
            )
            if isinstance(book, DroppedBook):
                continue
            for chunk in gpt2().chunks(book.text[: config.sample - size], CHUNK):
                yield from _words_cut(chunk)
            size += len(book.text)
            live_status.update(f"reading books, {size / 1e6:,.1f} MB")
            if size >= config.sample:
                break
        if size >= config.sample:  # the remaining files need not be opened
            break
    live_status.update(f"learning {config.size:,} tokens from {min(size, config.sample) / 1e6:,.1f} MB of text")


def _words_cut(chunk: bytes) -> Iterator[str]:
    """The text of ``chunk``, cut after every ``MAX_WORD`` characters of a longer word."""
    text, start = chunk.decode(errors="ignore"), 0
    # The pattern takes as long as training, and splitting at blanks a fiftieth of that.
    if max(map(len, chunk.split()), default=0) >= MAX_WORD or b" " * MAX_WORD in chunk.translate(_BLANKS):
        for word in _LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
    yield text[start:]


if __name__ == "__main__":
    command.run(main, VocabularyConfig, module="pipeline.vocabulary")
