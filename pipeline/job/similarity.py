"""Find other editions of the same work by MinHash, which estimates the share of phrases that two books share."""

import numpy as np
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue] compiled, without types

PERMUTATIONS = 128
BANDS = 32
WORDS = 5
"""Words per shingle; fewer would match common phrases, more would miss editions that differ in spelling."""
SIMILAR = 0.6
"""Estimated Jaccard similarity of shingles from which two books count as the same work."""
_SEED = 42
_LONGEST = 400_000
"""Bytes of a book that are compared."""


def signature(text: bytes) -> list[int]:
    """The MinHash signature of a cleaned text, over its words in lower case."""
    words = text[:_LONGEST].decode("utf-8", "ignore").lower().split()
    made = RMinHash(num_perm=PERMUTATIONS, seed=_SEED)
    made.update([" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))])
    return list(made.digest())


def near_duplicates(signatures: dict[str, list[int]]) -> dict[str, tuple[str, float]]:
    """Books that are similar to one with a smaller id: book to (the one that is kept, similarity).

    Only books that agree in a band of their signatures are compared (locality-sensitive hashing).
    """
    bands: dict[tuple[int, bytes], list[str]] = {}
    digests = {book: np.array(signatures[book], dtype=np.uint32) for book in signatures}
    found: dict[str, tuple[str, float]] = {}
    for book in sorted(signatures):
        own = [(n, band.tobytes()) for n, band in enumerate(np.split(digests[book], BANDS))]
        candidates = sorted({other for band in own for other in bands.get(band, ())})
        similar = [(float(np.mean(digests[other] == digests[book])), other) for other in candidates]
        similarity, first = max(similar, default=(0.0, ""))
        if similarity >= SIMILAR:
            found[book] = (first, similarity)
            continue
        for band in own:
            bands.setdefault(band, []).append(book)
    return found
