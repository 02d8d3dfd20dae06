"""History of the split of every text in the data sets of an output, so that a text with a new id keeps its split.

Ids change when a file is compressed, a row is inserted above others, or a folder of the same name is added. The history
is stored beside the results of the partitions, with 33 bytes per text and, if near duplicates are dropped, a MinHash
signature of each held-out text. It is written before a data set is finished, and ``--overwrite`` keeps it.
"""

import io
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import SPLIT_HISTORY_FILE

_SCHEMA = pa.schema(
    [
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("is_val", pa.bool_(), nullable=False),
        pa.field("book", pa.string()),
        pa.field("signature", pa.binary()),
    ]
)
_FRACTION_KEY = b"val_fraction"


@dataclass
class SplitHistory:
    """History of the texts of an output, by their sha256."""

    val_fraction: float
    """Fraction by which the newest data set was split."""
    is_val: dict[bytes, bool] = field(default_factory=dict)
    """Whether each text was ever held out for validation."""
    books: dict[str, bytes] = field(default_factory=dict)
    """Texts by book id of the books whose id alone would select the other split; the text may change later."""
    signatures: dict[bytes, list[int]] = field(default_factory=dict)
    """MinHash signatures of the held-out texts."""

    @classmethod
    def read(cls, out_dir: StorageDir, val_fraction: float) -> Self:
        """Read the history in ``out_dir``; return an empty history if no data set has been finished."""
        try:
            content = out_dir.read(SPLIT_HISTORY_FILE)
        except (FileNotFoundError, NotADirectoryError):
            return cls(val_fraction)
        try:
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
            if not table.schema.equals(_SCHEMA):
                raise ValueError(f"it has the columns {', '.join(table.column_names)}")
            fraction = float((table.schema.metadata or {})[_FRACTION_KEY])
        except (pa.ArrowException, ValueError, KeyError, OSError) as damage:
            raise UserError(
                f"{out_dir / SPLIT_HISTORY_FILE} is damaged ({damage}). Restore it, or use another --out. Without it, "
                "books that were held out for validation could be trained on."
            ) from damage
        texts, was_val, books, signatures = (column.to_pylist() for column in table.columns)
        return cls(
            fraction,
            dict(zip(texts, was_val, strict=True)),
            {book: text for book, text in zip(books, texts, strict=True) if book is not None},
            {
                text: np.frombuffer(signature, np.uint32).tolist()
                for text, signature in zip(texts, signatures, strict=True)
                if signature
            },
        )

    def write(self, out_dir: StorageDir) -> None:
        """Write the history to ``out_dir``; equal histories have equal bytes."""
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
        out_dir.write(SPLIT_HISTORY_FILE, sink.getvalue())

    def restrict_to(self, val_fraction: float) -> "SplitHistory":
        """Return the part of the history that is valid at ``val_fraction``.

        A larger fraction than before keeps the held-out texts, and a smaller one keeps none.
        """
        if val_fraction == self.val_fraction:
            return self
        was_val = {text: True for text, is_val in self.is_val.items() if is_val and val_fraction > self.val_fraction}
        books = {book: text for book, text in self.books.items() if text in was_val}
        return SplitHistory(val_fraction, was_val, books, {t: s for t, s in self.signatures.items() if t in was_val})

    def was_held_out(self, book: str, sha256: str) -> bool | None:
        """Return whether a book was held out, by its text or else by its id; None if the history has neither."""
        text = bytes.fromhex(sha256)
        was_val = self.is_val.get(text)
        return self.is_val.get(self.books.get(book, text)) if was_val is None else was_val

    def add(self, book: str, sha256: str, *, is_val: bool, is_val_by_id: bool, signature: list[int] | None) -> None:
        """Add a book to the history; a text that was held out stays held out.

        ``is_val`` is whether the book is held out, and ``is_val_by_id`` is whether its id selects it.
        """
        text = bytes.fromhex(sha256)
        self.is_val[text] = is_val or self.is_val.get(text, False)
        if is_val != is_val_by_id:
            self.books[book] = text
        if self.is_val[text] and signature:
            self.signatures[text] = signature
