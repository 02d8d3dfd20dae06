"""The settings of the tokenizer, with their defaults and units.

How sources are read and cleaned is a class of its own, because a training run that streams books needs it too.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import tyro

from infra.cli.options import Address, JoinsRay, Switch, TrackingUri
from infra.cli.units import Bytes
from infra.device.host import cpu_count
from infra.errors import UserError
from infra.schema import strict

MIRROR = "https://gutenberg.pglaf.org"
"""Project Gutenberg's mirror for robots."""

SAMPLE = "sample"

IDENTITY_SETTINGS = (
    "sources", "text_field", "text_column", "doc_separator", "languages", "min_chars", "join_lines", "val_fraction",
    "encoder", "duplicates", "shard_size",
)  # fmt: skip
"""The settings that decide the bytes of the shards."""


@strict
@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Settings for cleaning and filtering books. Raises ``UserError`` for invalid values."""

    text_field: str = "text"
    """Field of JSON lines that contains a book's text."""

    text_column: str = "text"
    """Column of Parquet files that contains a book's text; its case only matters if two columns differ in it alone."""

    doc_separator: str | None = None
    """Separator between books in text files that contain several, for example '<|endoftext|>'.
    By default a text file is one book."""

    languages: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[CODE ...]")] = ()
    """Languages of the books to keep (ISO 639-1: en fr ...), by their header, else detected. By default all."""

    min_chars: int = 200
    """Minimum number of characters of a book; shorter ones are dropped."""

    join_lines: bool = False
    """Join hard-wrapped lines into paragraphs; verse and tables are kept."""

    def __post_init__(self) -> None:
        if self.doc_separator == "":
            raise UserError("--doc-separator is empty: give the separator between two books, or leave it out.")
        for language in self.languages:
            if not re.fullmatch("[a-z]{2}", language):
                raise UserError(f"--languages {language!r} is not a language code: write for example en fr de.")


@strict
@dataclass(frozen=True, kw_only=True)
class ReadingConfig(CleaningConfig):
    """Settings for turning sources into tokens, for shards and streams."""

    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "book reading": (
            "tokenizer", "languages", "min_chars", "join_lines", "text_field", "text_column", "doc_separator",
        ),
    }  # fmt: skip

    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Tokenizer file: the tokenizer.json of a byte-level BPE, or a .tiktoken file whose name contains its split pattern
    (gpt2, cl100k or o200k), local or in object storage; python -m pipeline.vocabulary trains one.
    By default GPT-2's tokenizer."""


@dataclass(frozen=True)
class TokenizeConfig(ReadingConfig, JoinsRay):
    """Turn books into token shards. After an interruption, the same command finishes the data set."""

    main_flags: ClassVar[tuple[str, ...]] = (
        "sources", "out", "workers", "val_fraction", "duplicates", "languages", "tokenizer", "dry_run", "overwrite",
    )  # fmt: skip
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        **ReadingConfig.flag_groups,
        "encoding": ("encoder", "shard_size"),
        "download and cluster": ("mirror", "tracking_uri", "address"),
    }

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = (SAMPLE,)
    """Books, in any order: files, folders or globs, here or at s3://, gs://, az://, hf://;
    gutenberg:1342,84, which downloads those numbers; or sample, the King James Bible, installed with this program.
    Formats: txt, md, zip, json, jsonl, parquet, plain or gz, zst, bz2, xz."""

    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "data/tokens"
    """Folder for the token shards, on a disk that all workers share, or s3://bucket/folder (gs://, az://)."""

    workers: int | None = None
    """Number of parallel Ray Data tasks (at least 1).
    By default all CPUs of this machine without Ray, or all CPUs of the cluster at --address."""

    val_fraction: float = 0.01
    """Share of the books, at least 0 and below 1, held out for validation, chosen by a hash of each book's id.
    Unless it is 0, at least one of two books is. A text keeps its split in later data sets of the same --out.
    Files named as the validation split of a data set with training files are held out besides."""

    encoder: Literal["gigatoken", "tiktoken"] = "gigatoken"
    """Tokenizer. Both give the same ids.
    - gigatoken: about 15 times as fast; a sample of the books is checked by the other
    - tiktoken: OpenAI's, or Hugging Face's tokenizers for a --tokenizer of theirs"""

    mirror: str = MIRROR
    """Robot-friendly mirror for 'gutenberg:' numbers."""

    duplicates: Literal["drop", "near", "keep"] = "drop"
    """What happens to books with the same cleaned text.
    - drop: one is kept, the first by id among those held out for validation or else among all
    - near: also drop near duplicates, such as other editions, found by MinHash
    - keep: all are kept"""

    shard_size: Bytes = 16_000_000
    """Text per shard and per task, at least 1MB. The shards depend on it, but not on the number of workers."""

    dry_run: Switch = False
    """Print the plan without tokenizing. Books given by gutenberg: are downloaded, because their size is needed."""

    overwrite: Switch = False
    """Replace the data set in --out instead of finishing it. After an interruption, run the same command again.
    The books that were held out for validation stay so, unless --val-fraction is smaller."""

    tracking_uri: TrackingUri = None

    address: Address = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise UserError("No sources. Name a file or a folder of books, or leave sources out for the sample.")
        if "" in self.sources:
            raise UserError("A source is empty. Name a file or a folder of books in its place, or leave it out.")
        if not self.out:
            raise UserError("--out is empty: name a folder or s3://bucket/folder for the shards, or leave it out.")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"--val-fraction {self.val_fraction} must be at least 0 and below 1.")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers} must be at least 1.")
        if self.shard_size < 1_000_000:
            raise UserError(f"--shard-size {self.shard_size}B is too small for a task: give 1MB or more.")

    def identity(self) -> dict[str, Any]:
        """The settings named in ``IDENTITY_SETTINGS``, for the manifest and for telling runs apart."""
        values = {name: getattr(self, name) for name in IDENTITY_SETTINGS}
        return values | {"sources": sorted(set(self.sources)), "languages": sorted(set(self.languages))}

    @property
    def num_workers(self) -> int:
        """Tasks at a time on this machine."""
        return self.workers or cpu_count()
