"""Windows of a stream of books, shuffled block by block, from a place that a checkpoint can hold.

In: encoded books, one after the other. Out: the same interface as that of shards. A block is a few million consecutive
tokens, cut into windows that are visited in a pseudo-random order, so that memory is bounded and the first step waits
for one block only. Blocks depend on the order of the books alone, and so do the windows of every step, at any
micro-batch and number of workers. Each worker reads the whole stream, because encoding is a hundred times faster than
training. A checkpoint names the source, the book and the token where the block of its position begins; a resumed run
reads from there.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from infra.errors import UserError
from pipeline.stream import EncodedBook
from train.data.windows import permute

BLOCK = 1 << 22
"""Tokens that are shuffled together: about 40 books, 8 MB."""


@dataclass(frozen=True)
class StreamPosition:
    """Where a block begins: after ``position`` windows, at the token ``offset`` of a book of an epoch."""

    position: int = 0
    epoch: int = 0
    partition: int = 0
    source: str = ""
    book: str = ""
    """Empty at the beginning of an epoch."""
    offset: int = 0
    tokens_hash: str = ""
    """Hash (xxh3-64) of the book's tokens, which tells whether it has changed."""


class StreamWindows:
    """The windows of a stream; each worker must request its own in ascending order.

    ``read`` returns the books of an epoch, starting at a partition. Raises ``UserError`` when they do not fill a
    window.
    """

    def __init__(
        self, read: Callable[[int, int], Iterator[EncodedBook]], context_length: int, seed: int, block: int = BLOCK
    ) -> None:
        self.context_length = context_length
        self.seed = seed
        self.block_positions = [StreamPosition()]
        """The places of all blocks so far, and of the next one."""
        self._read = read
        self._windows_per_block = max(1, block // context_length)
        self._books: Iterator[tuple[EncodedBook, int]] | None = None
        self._buffered_books: deque[tuple[EncodedBook, int]] = deque()
        self._block = np.zeros(0, np.uint16)
        self._order = np.zeros(0, np.int64)
        self._start = 0

    def load_state_dict(self, position: StreamPosition) -> None:
        """Begin at ``position``; call it before anything is read."""
        self.block_positions, self._start = [position], position.position

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """The positions themselves: a position's window is known only when its block is read."""
        return positions

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy the windows at the places ``numbers`` into ``out``, after reading as far as them."""
        for row, number in enumerate(numbers.tolist()):
            while number >= self._start + len(self._order):
                self._next_block()
            first = self._order[number - self._start] * self.context_length
            out[row] = self._block[first : first + self.context_length + 1]

    def _next_block(self) -> None:
        position = self.block_positions[-1]
        if self._books is None:
            self._books = self._books_from(position)
        length = self.context_length
        wanted = self._windows_per_block * length + 1
        size = sum(len(book.tokens) - offset for book, offset in self._buffered_books)
        while size < wanted and (following := next(self._books, None)):
            self._buffered_books.append(following)
            size += len(following[0].tokens) - following[1]
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
        """Release the block's books, but for its last token, which is also the first token of the next block."""
        while tokens >= len(self._buffered_books[0][0].tokens) - self._buffered_books[0][1]:
            book, offset = self._buffered_books.popleft()
            tokens -= len(book.tokens) - offset
        book, offset = self._buffered_books[0]
        self._buffered_books[0] = (book, offset + tokens)

    def _next_epoch(self, position: StreamPosition, size: int) -> None:
        """Begin the books again in another order; the rest of this epoch does not fill a window and is left out."""
        if not position.book:
            raise UserError(
                f"--stream: the books have {size:,} tokens for training, and one window needs "
                f"{self.context_length + 1:,}. Add more books, or use a shorter context length."
            )
        self.block_positions[-1] = StreamPosition(position.position, position.epoch + 1)
        self._buffered_books.clear()
        self._books = None

    def _books_from(self, position: StreamPosition) -> Iterator[tuple[EncodedBook, int]]:
        """Books, starting at ``position``, each with the token to begin at.

        Raises ``UserError`` when the book of ``position`` is no longer what it was.
        """
        books = self._read(position.epoch, position.partition)
        if position.book:
            first_book = next((book for book in books if book.book == position.book), None)
            if first_book is None or _hash(first_book.tokens) != position.tokens_hash:
                state = "can no longer be read from" if first_book is None else "has changed in"
                raise UserError(
                    f"--stream: the book {position.book}, within which the checkpoint continues, {state} "
                    f"{position.source}. Restore it, or start a new run with --name."
                )
            yield first_book, position.offset
        for book in books:
            yield book, 0


def _hash(tokens: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tokens).data)
