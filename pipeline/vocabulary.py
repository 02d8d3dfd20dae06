"""The command ``python -m pipeline.vocabulary BOOKS --size 4096 --out data/tokenizer.json``, which trains a tokenizer.

The result is the ``tokenizer.json`` of a byte-level BPE, for ``python -m pipeline.tokenize --tokenizer``. The same
books and settings give the same file, because books are read in a fixed order, and the trainer breaks ties by id.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, ClassVar

import tyro
import xxhash

from infra.cli import command
from infra.cli.console import console
from infra.cli.progress import Status, status
from infra.cli.table import Report
from infra.cli.units import Bytes
from infra.device.first_run import NextCommand
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.books.sources import build_inventory
from pipeline.config import SAMPLE, CleaningConfig, TokenizeConfig
from pipeline.encoding.formats import END_OF_TEXT
from pipeline.encoding.tokenizer import Tokenizer, gpt2
from pipeline.job.plan import Partition, make_partitions
from pipeline.job.report import BYTES_PER_SECOND, START_SECONDS
from pipeline.job.task import clean_and_filter, drop_on_error, read_or_drop

BYTE_TOKENS = 256
"""Number of tokens that are single bytes."""
PARTITION_BYTES = 1_000_000
"""Bytes of text per partition; the sample consists of whole partitions."""
MAX_WORD_CHARS = 1000
"""Maximum number of characters of a word for the trainer, whose time grows with the square of this number. Longer
words, such as a genome or encoded data, are split, because they are not worth a token."""
_LONG_WORD = re.compile(
    rf"[^\W\d_]{{{MAX_WORD_CHARS}}}|\d{{{MAX_WORD_CHARS}}}|(?:[^\w\s]|_){{{MAX_WORD_CHARS}}}|\s{{{MAX_WORD_CHARS}}}"
)
_WHITESPACE_TO_SPACES = bytes.maketrans(b"\t\n\v\f\r", b" " * 5)
CHUNK_BYTES = 100_000
"""Bytes of text per chunk for the trainer, which collects 256 chunks before it counts their words."""


@dataclass(frozen=True)
class VocabularyConfig(CleaningConfig):
    """Train a byte-level BPE tokenizer with GPT-2's split pattern on a sample of books."""

    main_flags: ClassVar[tuple[str, ...]] = ("sources", "size", "sample", "out", "languages")
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "book reading": ("min_chars", "join_lines", "text_field", "text_column", "doc_separator"),
    }

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = (SAMPLE,)
    """Sources of books, as for pipeline.tokenize."""

    size: int = 4096
    """Number of token ids (at least 257), including the 256 single bytes and the end-of-text token.
    Shards take two bytes per token with up to 65,536 ids, else four."""

    sample: Bytes = 100_000_000
    """Bytes of text to learn from (at least 1kB), from partitions spread over the books."""

    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "data/tokenizer.json"
    """Tokenizer file to write, local or in object storage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size <= BYTE_TOKENS:
            raise UserError(
                f"--size {self.size} must be at least {BYTE_TOKENS + 1}, for all bytes and the end-of-text token."
            )
        if self.sample < 1000:
            raise UserError(f"--sample {self.sample}B is too small to learn from. Use 1kB or more.")


def main(config: VocabularyConfig) -> int:
    file = StorageDir.of(config.out)
    if file.parent.exists(file.name):
        raise UserError(f"--out {config.out} already exists. Choose another file, or remove it.")
    with status("listing books") as live_status:
        content = train(config, live_status)
    file.parent.write(file.name, content)
    tokenizer = Tokenizer(content, config.out)
    console.print(f"{config.out}: {len(tokenizer):,} token ids, sha256 {tokenizer.sha256[:12]}", markup=False)
    Report([("Next", str(next_command(config)))]).show()
    return 0


def next_command(config: VocabularyConfig) -> NextCommand:
    """Return the command that tokenizes the same books with the new tokenizer, to a folder of its own."""
    words = [*config.sources, "--tokenizer", config.out, "--out", f"data/tokens-{config.size}"]
    for setting in fields(CleaningConfig):  # Books must be read as the tokenizer has read them.
        if (value := getattr(config, setting.name)) != setting.default:
            words.append(f"--{setting.name.replace('_', '-')}")
            words += [] if value is True else map(str, value if isinstance(value, tuple) else (value,))
    command = f"python -m pipeline.tokenize {shlex.join(words)}"
    size = build_inventory(config.sources).summary()["bytes"]
    return NextCommand(command, START_SECONDS + size / BYTES_PER_SECOND)


def train(config: VocabularyConfig, live_status: Status) -> bytes:
    """Train the tokenizer and return its ``tokenizer.json``.

    Raises ``UserError`` if there are no books, or too few for the requested size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    cleaning = {field.name: getattr(config, field.name) for field in fields(CleaningConfig)}
    settings = TokenizeConfig(config.sources, shard_size=PARTITION_BYTES, **cleaning)
    partitions = make_partitions(build_inventory(config.sources), settings)
    tokenizer.train_from_iterator(_read_texts(config, partitions, live_status), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if (vocab_size := tokenizer.get_vocab_size()) < config.size:
        raise UserError(
            f"The books yield only {vocab_size:,} of the {config.size:,} token ids requested with --size. Add books, "
            f"or use --size {vocab_size}."
        )
    return tokenizer.to_str().encode()


def _read_texts(config: VocabularyConfig, partitions: list[Partition], live_status: Status) -> Iterator[str]:
    """Yield the first ``sample`` bytes of the partitions, in an order that only depends on their numbers."""
    size = 0
    ordered = sorted(partitions, key=lambda partition: xxhash.xxh3_64_intdigest(partition.name.encode()))
    for settings, file_range in (
        (partition.settings, file_range) for partition in ordered for file_range in partition.ranges
    ):
        for raw in read_or_drop(file_range, settings):
            book = (
                raw if isinstance(raw, DroppedBook) else drop_on_error(raw.id, partial(clean_and_filter, raw, settings))
            )
            if isinstance(book, DroppedBook):
                continue
            for chunk in gpt2().chunks(book.text[: config.sample - size], CHUNK_BYTES):
                yield from _split_long_words(chunk)
            size += len(book.text)
            live_status.update(f"reading books: {size / 1e6:,.1f} MB")
            if size >= config.sample:
                break
        if size >= config.sample:  # The remaining files need not be opened.
            break
    live_status.update(f"learning {config.size:,} tokens from {min(size, config.sample) / 1e6:,.1f} MB of text")


def _split_long_words(chunk: bytes) -> Iterator[str]:
    """Yield the text of ``chunk``, split after every ``MAX_WORD_CHARS`` characters of a longer word."""
    text, start = chunk.decode(errors="ignore"), 0
    # Matching the pattern takes as long as training, and splitting at whitespace takes a fiftieth of that time.
    if max(map(len, chunk.split()), default=0) >= MAX_WORD_CHARS or b" " * MAX_WORD_CHARS in chunk.translate(
        _WHITESPACE_TO_SPACES
    ):
        for word in _LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
    yield text[start:]


if __name__ == "__main__":
    command.run(main, VocabularyConfig, module="pipeline.vocabulary")
