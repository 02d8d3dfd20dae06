"""A search for the lowest loss, and the rows of its trials, without running any."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from learning_rows import TRAIN_TIME, final_rows, learning_row, speed_row

from infra.device.hardware import cpu_info
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import TrainConfig
from train.model_config import parse_model
from tune.config import SearchConfig
from tune.learning.plan import LearningSearch
from tune.learning.space import make_learning_space
from tune.learning.strategy import LearningStrategy
from tune.space import Candidate
from tune.trial.row import TrialRow

KNOBS = ("learning_rate=1e-3,2e-3,1e-2",)
MakeSearch = Callable[..., LearningSearch]


@pytest.fixture(scope="session")
def make_search() -> MakeSearch:
    """Create a search whose control has the learning rate 0.0003; ``settings`` are those of its config."""

    def make(knobs: tuple[str, ...] = KNOBS, train_tokens: int = 10**8, **settings: Any) -> LearningSearch:
        training = TrainConfig.of(
            model=parse_model("tiny"), device="cpu", learning_rate=3e-4, global_batch=16, schedule="wsd"
        )
        space = make_learning_space(training, knobs, cpu_info())
        config = SearchConfig(training=training, objective="loss", train_time=TRAIN_TIME, knobs=knobs, **settings)
        strategy = LearningStrategy(space, TRAIN_TIME, config.target_loss, config.search_time)
        manifest = Manifest.of([], config={}, tokenizer_sha256="", inputs={}, report={})
        manifest = replace(manifest, splits={split: {"books": 9, "tokens": train_tokens} for split in ("train", "val")})
        directory = StorageDir.of("runs/one")
        return LearningSearch(
            config, directory, (), manifest, space.config(space.control), 4 * 10**9, space, strategy, val_windows=64
        )

    return make


@pytest.fixture(scope="session")
def search(make_search: MakeSearch) -> LearningSearch:
    return make_search()


def by_rate(search: LearningSearch) -> dict[float, Candidate]:
    return {dict(candidate.knobs)["learning_rate"]: candidate for candidate in search.space.candidates}


@pytest.fixture(scope="session")
def rows(search: LearningSearch) -> list[TrialRow]:
    """The control, a winner and a candidate as good, all with three seeds, and one that was stopped."""
    control, best, close, stopped = (by_rate(search)[rate] for rate in (3e-4, 1e-3, 2e-3, 1e-2))
    return [
        speed_row(control),
        *(learning_row(who, level) for who, level in ((control, 2.0), (best, 1.7), (close, 1.701))),
        learning_row(stopped, 2.4, (100,), outcome="pruned", reason="its loss was above the median"),
        *final_rows(control, 2.0), *final_rows(best, 1.7), *final_rows(close, 1.701),
    ]  # fmt: skip
