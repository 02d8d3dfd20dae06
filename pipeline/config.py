"""Settings of the pipeline, with their defaults and units.

The settings for reading and cleaning sources are separate classes, because a run that streams books needs them, too.
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
"""Address of Project Gutenberg's mirror for robots."""

SAMPLE = "sample"
"""Source that stands for the installed King James Bible."""

IDENTITY_SETTINGS = (
    "sources", "text_field", "text_column", "doc_separator", "languages", "min_chars", "join_lines", "val_fraction",
    "encoder", "duplicates", "shard_size",
)  # fmt: skip
"""Names of the settings that determine the bytes of the shards."""


@strict
@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Settings for cleaning and filtering books. Raises ``UserError`` for invalid values."""

    text_field: str = "text"
    """Field of JSON documents that contains the text of a book."""

    text_column: str = "text"
    """Column of Parquet files that contains the text of a book. Case is ignored unless columns differ only in case."""

    doc_separator: str | None = None
    """Separator between the books of a text file with several books, for example '<|endoftext|>'.
    By default a text file is one book."""

    languages: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[CODE ...]")] = ()
    """Languages of the books to keep, as ISO 639-1 codes (en fr ...). A book's language is read from its header, or
    else detected. By default all languages are kept."""

    min_chars: int = 200
    """Minimum number of characters of a book; shorter books are dropped."""

    join_lines: bool = False
    """Join hard-wrapped lines into paragraphs. Verse and tables do not change."""

    def __post_init__(self) -> None:
        if self.doc_separator == "":
            raise UserError("--doc-separator is empty. Set it to the separator between two books, or remove it.")
        for language in self.languages:
            if not re.fullmatch("[a-z]{2}", language):
                raise UserError(
                    f"--languages {language!r} is not an ISO 639-1 language code. Use codes such as en fr de."
                )


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
    """Tokenizer file, local or in object storage: the tokenizer.json of a byte-level BPE, or a .tiktoken file whose
    name contains its split pattern (gpt2, cl100k or o200k). 'python -m pipeline.vocabulary' trains a tokenizer.
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
    """Sources of books, in any order.
    Formats are txt, md, zip, json, jsonl and parquet; text and JSON may be compressed with gzip, zstd, bzip2 or xz.
    - files, folders or globs, local or at s3://, gs://, az:// or hf://
    - gutenberg:1342,84: books of Project Gutenberg, downloaded by number
    - sample: the King James Bible, which is installed with the program"""

    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "data/tokens"
    """Folder for the token shards, on a disk that all workers share, or s3://bucket/folder (gs://, az://)."""

    workers: int | None = None
    """Number of parallel Ray Data tasks (at least 1).
    By default one local process per CPU core without Ray, or all cores of the cluster at --address."""

    val_fraction: float = 0.01
    """Fraction of the books to hold out for validation (at least 0, below 1), selected by a hash of each book's id.
    With a fraction above 0, at least one of two or more books is held out.
    A text keeps its split in later data sets of the same --out.
    Files that are named as the validation split beside training files are held out, too."""

    encoder: Literal["gigatoken", "tiktoken"] = "gigatoken"
    """Library that encodes the text; both libraries give the same token ids.
    - gigatoken: about 15 times as fast; a sample of the books is compared with the reference library
    - tiktoken: the reference library, which is tiktoken, or Hugging Face's tokenizers for a tokenizer.json"""

    mirror: str = MIRROR
    """Address of the mirror of Project Gutenberg for 'gutenberg:' numbers; it must permit robots."""

    duplicates: Literal["drop", "drop-near", "keep"] = "drop"
    """Treatment of books with the same cleaned text.
    - drop: keep one book, which is the first by id of the books held out for validation, or else of all
    - drop-near: also drop near duplicates, such as other editions, found by MinHash
    - keep: keep all books"""

    shard_size: Bytes = 16_000_000
    """Bytes of text per shard and per task (at least 1MB). A data set with another size has different shards."""

    dry_run: Switch = False
    """Print the plan without tokenizing. Books of 'gutenberg:' numbers are downloaded, because the plan needs their
    size."""

    overwrite: Switch = False
    """Replace the data set in --out instead of finishing it. After an interruption, run the same command again.
    Books that were held out for validation stay held out, unless the new --val-fraction is smaller."""

    tracking_uri: TrackingUri = None

    address: Address = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise UserError("There are no sources. Name a file or folder of books, or omit the sources for the sample.")
        if "" in self.sources:
            raise UserError("A source is empty. Replace it with a file or folder of books, or remove it.")
        if not self.out:
            raise UserError("--out is empty. Set it to a folder or s3://bucket/folder for the shards, or remove it.")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"--val-fraction {self.val_fraction} must be at least 0 and below 1.")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers} must be at least 1.")
        if self.shard_size < 1_000_000:
            raise UserError(f"--shard-size {self.shard_size}B is too small for a task. Use 1MB or more.")

    def identity(self) -> dict[str, Any]:
        """Return the ``IDENTITY_SETTINGS`` by name, for the manifest and to detect changed settings."""
        values = {name: getattr(self, name) for name in IDENTITY_SETTINGS}
        return values | {"sources": sorted(set(self.sources)), "languages": sorted(set(self.languages))}

    @property
    def num_workers(self) -> int:
        """Number of parallel tasks on this machine."""
        return self.workers or cpu_count()
