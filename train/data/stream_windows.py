"""Windows of a book stream, shuffled block by block, from a position that a checkpoint can store.

A block is a few million consecutive tokens of encoded books. Its windows are visited in a pseudo-random order, so that
memory is bounded and the first step only waits for one block. Blocks, and so the windows of every step, depend only on
the order of the books, not on the micro-batch or the number of workers. Each worker reads the whole stream, because
encoding is a hundred times faster than training. A checkpoint stores the source, the book and the token at which a
block begins, from which a resumed run reads.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from infra.errors import UserError
from pipeline.stream import EncodedBook
from train.data.windows import permute

BLOCK_TOKENS = 1 << 22
"""Tokens that are shuffled together: about 40 books, 8 MB."""


@dataclass(frozen=True)
class StreamPosition:
    """The position in a book stream at which a block begins."""

    position: int = 0
    """Number of windows before the block."""
    epoch: int = 0
    """Number of the epoch, from 0."""
    partition: int = 0
    """Partition of the stream that contains the book."""
    source: str = ""
    """File that contains the book."""
    book: str = ""
    """Id of the book in which the block begins; empty at the beginning of an epoch."""
    offset: int = 0
    """Token of the book at which the block begins."""
    tokens_hash: str = ""
    """Hash (xxh3-64) of the book's tokens, to detect changes of the book."""


class StreamWindows:
    """The windows of a book stream, which a worker must read in ascending order of their positions.

    ``read_books`` returns the books of an epoch, starting at a partition. Raises ``UserError`` if all books together
    are shorter than a window.
    """

    def __init__(
        self,
        read_books: Callable[[int, int], Iterator[EncodedBook]],
        context_length: int,
        seed: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.context_length = context_length
        self.seed = seed
        self.block_positions = [StreamPosition()]
        """Positions of all blocks that were read, and of the next block."""
        self._read_books = read_books
        self._windows_per_block = max(1, block_tokens // context_length)
        self._books: Iterator[tuple[EncodedBook, int]] | None = None
        self._buffered_books: deque[tuple[EncodedBook, int]] = deque()
        self._block = np.zeros(0, np.uint16)
        self._order = np.zeros(0, np.int64)
        self._start = 0

    def load_state_dict(self, position: StreamPosition) -> None:
        """Begin at ``position``. Must be called before anything is read."""
        self.block_positions, self._start = [position], position.position

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the ``positions`` themselves, because the order of a block is unknown until it is read."""
        return positions

    def read(self, window_ids: np.ndarray, out: np.ndarray) -> None:
        """Copy the windows ``window_ids`` into ``out``, after reading the stream up to their blocks."""
        for row, window_id in enumerate(window_ids.tolist()):
            while window_id >= self._start + len(self._order):
                self._next_block()
            offset = self._order[window_id - self._start] * self.context_length
            out[row] = self._block[offset : offset + self.context_length + 1]

    @property
    def block(self) -> np.ndarray:
        """The tokens of the current block."""
        return self._block

    def _next_block(self) -> None:
        position = self.block_positions[-1]
        if self._books is None:
            self._books = self._books_from(position)
        length = self.context_length
        block_size = self._windows_per_block * length + 1
        size = sum(len(book.tokens) - offset for book, offset in self._buffered_books)
        while size < block_size and (next_book := next(self._books, None)):
            self._buffered_books.append(next_book)
            size += len(next_book[0].tokens) - next_book[1]
        count = min(self._windows_per_block, (size - 1) // length)
        if count < 1:
            self._next_epoch(position, size)
            return
        tokens = np.concatenate([book.tokens[offset:] for book, offset in self._buffered_books])
        self._block = tokens[: count * length + 1]
        self._order = permute(np.arange(count), count, self.seed, position.position)
        self._start = position.position
        self._release_books(count * length)
        book, offset = self._buffered_books[0]
        self.block_positions.append(
            StreamPosition(
                position.position + count,
                position.epoch,
                book.partition,
                book.source,
                book.book,
                offset,
                _hash(book.tokens),
            )
        )

    def _release_books(self, tokens: int) -> None:
        """Release the block's books, except for its last token, which is also the first token of the next block."""
        while tokens >= len(self._buffered_books[0][0].tokens) - self._buffered_books[0][1]:
            book, offset = self._buffered_books.popleft()
            tokens -= len(book.tokens) - offset
        book, offset = self._buffered_books[0]
        self._buffered_books[0] = (book, offset + tokens)

    def _next_epoch(self, position: StreamPosition, size: int) -> None:
        """Start the next epoch, with the books in another order; tokens that do not fill a window are dropped."""
        if not position.book:
            raise UserError(
                f"--stream: the books have {size:,} training tokens, but a window needs {self.context_length + 1:,}. "
                "Add more books, or use a shorter context length."
            )
        self.block_positions[-1] = StreamPosition(position.position, position.epoch + 1)
        self._buffered_books.clear()
        self._books = None

    def _books_from(self, position: StreamPosition) -> Iterator[tuple[EncodedBook, int]]:
        """Yields: (book, index of its first token to use), starting at ``position``.

        Raises ``UserError`` if the book at ``position`` has changed.
        """
        books = self._read_books(position.epoch, position.partition)
        if position.book:
            first_book = next((book for book in books if book.book == position.book), None)
            if first_book is None or _hash(first_book.tokens) != position.tokens_hash:
                state = "is missing from" if first_book is None else "has changed in"
                raise UserError(
                    f"--stream: the book {position.book}, at which the checkpoint resumes, {state} {position.source}. "
                    "Restore it, or start a new run with --name."
                )
            yield first_book, position.offset
        for book in books:
            yield book, 0


def _hash(tokens: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tokens).data)
