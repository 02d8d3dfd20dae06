"""The split of every text that the data sets of an output have held, so that a text keeps it when its id changes.

Ids change when a file is compressed, a row is inserted above others, or a folder of the same name is added. The history
is kept beside the records of the pieces: 33 bytes a text, and a MinHash signature of a held-out one where near
duplicates are looked for. It is written before a data set is finished, and outlives its manifest and ``--overwrite``.
"""

import io
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import SPLIT_HISTORY

_SCHEMA = pa.schema(
    [
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("is_val", pa.bool_(), nullable=False),
        pa.field("book", pa.string()),
        pa.field("signature", pa.binary()),
    ]
)
_SHARE = b"val_fraction"


@dataclass
class SplitHistory:
    """Texts by their sha256, and whether one of them was ever held out for validation."""

    val_fraction: float
    """The share by which the newest data set was split."""
    is_val: dict[bytes, bool] = field(default_factory=dict)
    books: dict[str, bytes] = field(default_factory=dict)
    """Ids that alone would put a book into the other split, and the text that had it. It may be edited."""
    signatures: dict[bytes, list[int]] = field(default_factory=dict)
    """MinHash signatures of held-out texts."""

    @classmethod
    def read(cls, out_dir: StorageDir, val_fraction: float) -> Self:
        """That of ``out_dir``; an empty one where no data set has been finished."""
        try:
            content = out_dir.read(SPLIT_HISTORY)
        except (FileNotFoundError, NotADirectoryError):
            return cls(val_fraction)
        try:
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
            if not table.schema.equals(_SCHEMA):
                raise ValueError(f"it has the columns {', '.join(table.column_names)}")
            share = float((table.schema.metadata or {})[_SHARE])
        except (pa.ArrowException, ValueError, KeyError, OSError) as damage:
            raise UserError(
                f"{out_dir / SPLIT_HISTORY} is damaged ({damage}). Restore it, or use another --out: without it, what "
                "was held out for validation here could be trained on."
            ) from damage
        texts, held, books, signatures = (column.to_pylist() for column in table.columns)
        return cls(
            share,
            dict(zip(texts, held, strict=True)),
            {book: text for book, text in zip(books, texts, strict=True) if book is not None},
            {
                text: np.frombuffer(signature, np.uint32).tolist()
                for text, signature in zip(texts, signatures, strict=True)
                if signature
            },
        )

    def write(self, out_dir: StorageDir) -> None:
        """Replace that of ``out_dir``; equal ones have equal bytes."""
        ids = {text: book for book, text in sorted(self.books.items())}
        texts = sorted(self.is_val)
        signatures = [self.signatures.get(text) for text in texts]
        columns = [
            texts,
            [self.is_val[text] for text in texts],
            [ids.get(text) for text in texts],
            [None if signature is None else np.array(signature, np.uint32).tobytes() for signature in signatures],
        ]
        schema = _SCHEMA.with_metadata({"val_fraction": repr(self.val_fraction)})
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(
                pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
            )
        out_dir.write(SPLIT_HISTORY, sink.getvalue())

    def valid_for(self, val_fraction: float) -> "SplitHistory":
        """What of it decides splits at another share, which chooses anew: a larger one keeps what is held out."""
        if val_fraction == self.val_fraction:
            return self
        held = {text: True for text, is_val in self.is_val.items() if is_val and val_fraction > self.val_fraction}
        books = {book: text for book, text in self.books.items() if text in held}
        return SplitHistory(val_fraction, held, books, {t: s for t, s in self.signatures.items() if t in held})

    def split_known(self, book: str, sha256: str) -> bool | None:
        """Whether a book was held out, by its text or else by its id; None where neither is known."""
        text = bytes.fromhex(sha256)
        known = self.is_val.get(text)
        return self.is_val.get(self.books.get(book, text)) if known is None else known

    def add(self, book: str, sha256: str, *, is_val: bool, by_id: bool, signature: list[int] | None) -> None:
        """Note a book of a data set: whether it is held out, and whether its id says so. A held-out text stays so."""
        text = bytes.fromhex(sha256)
        self.is_val[text] = is_val or self.is_val.get(text, False)
        if is_val != by_id:
            self.books[book] = text
        if self.is_val[text] and signature:
            self.signatures[text] = signature
