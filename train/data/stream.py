"""A stream of books as the data of a run: windows shuffled block by block, from a place that a checkpoint can hold.

In: encoded books, one after the other. Out: the same interface as that of shards. A block is a few million consecutive
tokens, cut into windows that are visited in a pseudo-random order, so that memory is bounded and the first step waits
for one block only. Blocks depend on the order of the books alone, and so do the windows of every step, at any
micro-batch and number of workers. Each worker reads the whole stream, because encoding is a hundred times faster than
training. A checkpoint names the source, the book and the token where the block of its position begins; a resumed run
reads from there.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from infra.errors import UserError
from pipeline.shards import Manifest
from pipeline.stream import EncodedBook, Stream
from train.config import TrainConfig
from train.data.source import estimate
from train.data.windows import VALIDATION_SEED, Windows, permute

BLOCK = 1 << 22
"""Tokens that are shuffled together: about 40 books, 8 MB."""


@dataclass(frozen=True)
class StreamPosition:
    """Where a block begins: after ``position`` windows, at the token ``offset`` of a book of an epoch."""

    position: int = 0
    epoch: int = 0
    piece: int = 0
    source: str = ""
    book: str = ""
    """Empty at the beginning of an epoch."""
    offset: int = 0
    tokens_hash: str = ""
    """Hash (xxh3-64) of the book's tokens, which tells whether it has changed."""


class StreamWindows:
    """The windows of a stream; each worker must request its own in ascending order.

    ``read`` returns the books of an epoch, starting at a piece. Raises ``UserError`` when they do not fill a window.
    """

    def __init__(
        self, read: Callable[[int, int], Iterator[EncodedBook]], context_length: int, seed: int, block: int = BLOCK
    ) -> None:
        self.context_length = context_length
        self.seed = seed
        self.places = [StreamPosition()]
        """The places of all blocks so far, and of the next one."""
        self._read = read
        self._windows_per_block = max(1, block // context_length)
        self._books: Iterator[tuple[EncodedBook, int]] | None = None
        self._waiting: deque[tuple[EncodedBook, int]] = deque()
        self._block = np.zeros(0, np.uint16)
        self._order = np.zeros(0, np.int64)
        self._start = 0

    def go_to(self, place: StreamPosition) -> None:
        """Begin at ``place``; call it before anything is read."""
        self.places, self._start = [place], place.position

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
        place = self.places[-1]
        if self._books is None:
            self._books = self._from(place)
        length = self.context_length
        wanted = self._windows_per_block * length + 1
        size = sum(len(book.tokens) - offset for book, offset in self._waiting)
        while size < wanted and (following := next(self._books, None)):
            self._waiting.append(following)
            size += len(following[0].tokens) - following[1]
        count = min(self._windows_per_block, (size - 1) // length)
        if count < 1:
            self._next_epoch(place, size)
            return
        tokens = np.concatenate([book.tokens[offset:] for book, offset in self._waiting])
        self._block = tokens[: count * length + 1]
        self._order = permute(np.arange(count), count, self.seed, place.position)
        self._start = place.position
        self._drop(count * length)
        book, offset = self._waiting[0]
        self.places.append(
            StreamPosition(
                place.position + count, place.epoch, book.piece, book.source, book.book, offset, _hash(book.tokens)
            )
        )

    def _drop(self, tokens: int) -> None:
        """Release the block's books, but for its last token, which is also the first token of the next block."""
        while tokens >= len(self._waiting[0][0].tokens) - self._waiting[0][1]:
            book, offset = self._waiting.popleft()
            tokens -= len(book.tokens) - offset
        book, offset = self._waiting[0]
        self._waiting[0] = (book, offset + tokens)

    def _next_epoch(self, place: StreamPosition, size: int) -> None:
        """Begin the books again in another order; the rest of this epoch does not fill a window and is left out."""
        if not place.book:
            raise UserError(
                f"the books of --stream have {size:,} tokens for training and one window needs "
                f"{self.context_length + 1:,}: name more books, or choose a shorter context length."
            )
        self.places[-1] = StreamPosition(place.position, place.epoch + 1)
        self._waiting.clear()
        self._books = None

    def _from(self, place: StreamPosition) -> Iterator[tuple[EncodedBook, int]]:
        """Books, starting at ``place``, each with the token to begin at.

        Raises ``UserError`` when the book of ``place`` is no longer what it was.
        """
        books = self._read(place.epoch, place.piece)
        if place.book:
            found = next((book for book in books if book.book == place.book), None)
            if found is None or _hash(found.tokens) != place.tokens_hash:
                state = "can no longer be read from" if found is None else "has changed in"
                raise UserError(
                    f"--stream: the book {place.book}, within which the checkpoint continues, {state} {place.source}. "
                    "Restore it, or start a new run with --name."
                )
            yield found, place.offset
        for book in books:
            yield book, 0


class StreamData:
    """The data of a run with ``--stream``. Raises ``UserError`` when too little is held out for validation."""

    def __init__(self, config: TrainConfig, stream: Stream) -> None:
        length = config.model.context_length
        self.stream = stream
        self.windows = StreamWindows(self._read, length, config.seed)
        self.validation = None
        self.epoch_windows = None
        self.books = self.tokens = self.chars = 0
        self.dropped: Counter[str] = Counter()
        self.encoded_on: Counter[str] = Counter()
        """Tokens by the machine that encoded them."""
        held_out = []
        if config.cycle.val:
            held_out = self.stream.held_out(config.cycle.val * config.step_tokens + 1)
            tokens = np.concatenate([book.tokens for book in held_out] or [np.zeros(0, np.uint16)])
            if len(tokens) <= length:
                raise UserError(
                    f"the books that --stream holds out for validation have {len(tokens):,} tokens and one window "
                    f"needs {length + 1:,}: name more books, or turn validation off (--cycle {config.cycle.train}+0)"
                    f"{_left_out(held_out)}."
                )
            self.validation = Windows([tokens], length, VALIDATION_SEED, split="val")
        self._held_out = held_out

    def _read(self, epoch: int, piece: int) -> Iterator[EncodedBook]:
        """The stream's books that are not dropped, and count them. Raises ``UserError`` when all are dropped."""
        first: EncodedBook | None = None
        for book in self.stream.read(epoch, piece):
            if book.dropped:
                self.dropped[book.dropped] += 1
                first = first or book
                continue
            self.books += 1
            self.tokens += len(book.tokens)
            self.encoded_on[book.node] += len(book.tokens)
            self.chars += book.chars
            yield book
        if first and not self.books:
            raise UserError(
                f"no book of --stream can be used for training: name others, or change how they are read"
                f"{_left_out([first])}."
            )

    @property
    def manifest(self) -> Manifest:
        """The stream's manifest, with the mean length of the books that were read so far."""
        return estimate(self.stream, self.tokens / self.books if self.books else None, self._held_out)

    def summary(self) -> dict[str, Any]:
        """What was read, including a last block that has not been trained on."""
        counts = {"books": self.books, "tokens": self.tokens, "chars": self.chars}
        return counts | {"dropped": dict(self.dropped), "encoded_on": dict(self.encoded_on)}

    def place(self, position: int) -> dict[str, Any]:
        """Where the block that holds the window at ``position`` begins."""
        return asdict(next(place for place in reversed(self.windows.places) if place.position <= position))

    def go_to(self, place: dict[str, Any] | None) -> None:
        """Begin at a value of :meth:`place`."""
        if place:
            self.windows.go_to(StreamPosition(**place))


def _hash(tokens: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tokens).data)


def _left_out(books: Sequence[EncodedBook]) -> str:
    """The end of a sentence: the first of ``books`` that was dropped, and why; empty when none was."""
    return next((f"; {book.book} was left out: {book.why}" for book in books if book.dropped), "")
