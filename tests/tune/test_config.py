"""What makes two searches the same: all that decides which trials run and what they mean."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UserError
from infra.schema import from_json
from train.config import Cycle, TrainConfig
from tune.config import SearchConfig

CONFIG = SearchConfig()


@pytest.mark.parametrize(
    "change",
    [
        {"memory_limit": 10**9}, {"knobs": ("compile",)}, {"free_global_batch": True}, {"searcher": "grid"},
        {"trial_steps": 30}, {"trial_time": 5.0}, {"trial_precision": 0.5}, {"confirm": 0},
    ],
)  # fmt: skip
def test_what_makes_it_another_search(change: dict[str, Any]) -> None:
    assert replace(CONFIG, **change).identity() != CONFIG.identity()


@pytest.mark.parametrize("change", [{"global_batch": 960}, {"compile": "blocks"}, {"seed": 1}, {"learning_rate": 1.0}])
def test_another_control_makes_it_another_search(change: dict[str, Any]) -> None:
    assert replace(CONFIG, training=replace(TrainConfig(), **change)).identity() != CONFIG.identity()


@pytest.mark.parametrize(
    "change",
    [{"name": "one"}, {"out": Path("elsewhere")}, {"resume": "one"}, {"address": "auto"}, {"compile_time": 60.0}],
)
def test_what_may_change_when_it_is_resumed(change: dict[str, Any]) -> None:
    assert replace(CONFIG, **change).identity() == CONFIG.identity()


@pytest.mark.parametrize(
    "change", [{"steps": 5}, {"tokens": 10**9}, {"time_budget": 60.0}, {"cycle": Cycle(5, 1)}, {"data": "moved"}]
)
def test_the_length_of_the_training_is_not_the_searchs(change: dict[str, Any]) -> None:
    assert replace(CONFIG, training=replace(TrainConfig(), **change)).identity() == CONFIG.identity()


def test_a_search_of_an_earlier_version_is_read() -> None:
    values = CONFIG.to_json()
    del values["compile_time"]
    assert from_json(SearchConfig, values, "test").compile_time == CONFIG.compile_time


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"trial_steps": 6}, "--trial-steps 6"),
        ({"confirm": -1}, "--confirm -1"),
        ({"trial_precision": 1.0}, "--trial-p"),
    ],
)
def test_what_gives_no_search_is_refused(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        replace(CONFIG, **change)
