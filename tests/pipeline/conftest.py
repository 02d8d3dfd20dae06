"""What the pipeline's tests share: books that a test can write, and a store."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.job import plan

WORDS = """the of and a to in he was that his it with as had for on at by not she from her but which you they were
    all harbour lantern whale winter morning captain letter garden window road mountain river evening""".split()  # noqa: SIM905


def _prose(seed: int, words: int = 3000) -> str:
    """Reproducible text that passes every filter: sentences in paragraphs, with a number of its own."""
    chance = random.Random(seed)
    paragraphs = []
    for _ in range(max(1, words // 100)):
        chosen = [chance.choice(WORDS) + ("," if chance.random() < 0.1 else "") for _ in range(98)]
        paragraphs.append(f"Number {seed} {' '.join(chosen)}.")
    return "\n\n".join(paragraphs) + "\n"


def _write_books(folder: Path, count: int, words: int = 3000) -> Path:
    """``count`` text files with different prose."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"book {number:04d}.txt").write_text(_prose(number, words), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prose() -> Callable[..., str]:
    """``prose(seed, words=3000)``."""
    return _prose


@pytest.fixture(scope="session")
def write_books() -> Callable[..., Path]:
    """``write_books(folder, count, words=3000)``."""
    return _write_books


@pytest.fixture
def limit_partitions(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``limit_partitions(count)``: a partition has at most so many files."""
    return lambda count: monkeypatch.setattr(plan, "MAX_RANGES_PER_PARTITION", count)


@pytest.fixture(scope="session")
def store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow store, created once."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path_factory.mktemp('mlflow'))}"
