"""Finding of editions of the same work by MinHash, which estimates the fraction of phrases that two books share."""

from collections.abc import Iterable

import numpy as np
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue] compiled, without types

PERMUTATION_COUNT = 128
"""Number of values in a signature."""
BAND_COUNT = 32
"""Number of bands of a signature; books are only compared if they agree in a band."""
SHINGLE_WORDS = 5
"""Number of words per shingle. Fewer would match common phrases; more would miss editions with other spelling."""
MIN_SIMILARITY = 0.6
"""Minimum Jaccard similarity, estimated over shingles, of two books that count as the same work."""
_SEED = 42
MAX_COMPARED_BYTES = 400_000
"""Maximum number of bytes of a book that are compared."""


def make_signature(text: bytes) -> list[int]:
    """Return the MinHash signature of a cleaned text, over its words in lower case."""
    words = text[:MAX_COMPARED_BYTES].decode("utf-8", "ignore").lower().split()
    minhash = RMinHash(num_perm=PERMUTATION_COUNT, seed=_SEED)
    minhash.update([" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))])
    return list(minhash.digest())


class _Index:
    """Index of signatures by band; only signatures that agree in a band are compared (locality-sensitive hashing)."""

    def __init__(self) -> None:
        self._bands: dict[tuple[int, bytes], list[str]] = {}
        self._digests: dict[str, np.ndarray] = {}

    def find_most_similar(self, digest: np.ndarray) -> tuple[float, str]:
        """Return (similarity, name) of the most similar signature; (0.0, "") if no signature agrees in a band."""
        candidates = sorted({name for band in _split_into_bands(digest) for name in self._bands.get(band, ())})
        similar = [(float(np.mean(self._digests[name] == digest)), name) for name in candidates]
        return max(similar, default=(0.0, ""))

    def add(self, name: str, digest: np.ndarray) -> None:
        """Add a signature by its name."""
        self._digests[name] = digest
        for band in _split_into_bands(digest):
            self._bands.setdefault(band, []).append(name)


def _split_into_bands(digest: np.ndarray) -> list[tuple[int, bytes]]:
    return [(number, band.tobytes()) for number, band in enumerate(np.split(digest, BAND_COUNT))]


def find_near_duplicates(signatures: dict[str, list[int]]) -> dict[str, tuple[str, float]]:
    """Return (kept book, similarity) by id of the books that are similar to an earlier book in ``signatures``."""
    index = _Index()
    duplicates: dict[str, tuple[str, float]] = {}
    for book, values in signatures.items():
        digest = np.array(values, dtype=np.uint32)
        similarity, original = index.find_most_similar(digest)
        if similarity >= MIN_SIMILARITY:
            duplicates[book] = (original, similarity)
        else:
            index.add(book, digest)
    return duplicates


def find_similar(signatures: dict[str, list[int]], originals: Iterable[list[int]]) -> set[str]:
    """Return the ids of the books in ``signatures`` that are similar to one of the signatures ``originals``."""
    index = _Index()
    for number, values in enumerate(originals):
        index.add(str(number), np.array(values, dtype=np.uint32))
    digests = {book: np.array(values, dtype=np.uint32) for book, values in signatures.items()}
    return {book for book, digest in digests.items() if index.find_most_similar(digest)[0] >= MIN_SIMILARITY}
