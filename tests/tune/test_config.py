"""What makes two searches the same: all that decides which trials run and what they mean."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from infra.cli.flags import parse_flags
from infra.errors import UserError
from train.config import Cycle, TrainConfig
from tune.config import LadderConfig, SearchConfig

CONFIG = SearchConfig()


def changed(change: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """The identity of a search with these changes to itself and to what it trains."""
    return replace(CONFIG, training=TrainConfig().replace(**training), **change).identity()


def test_what_makes_it_another_search() -> None:
    own: dict[str, Any] = {
        "memory_limit": 10**9, "knobs": ("compile=whole",), "accumulations": (1, 2), "searcher": "grid",
        "trial_steps": 30, "trial_time": 5.0, "speed_tolerance": 0.5, "confirm_rounds": 0,
    }  # fmt: skip
    control = {"global_batch": 960, "compile": "blocks", "seed": 1, "learning_rate": 1.0}
    identities = [changed({name: value}, {}) for name, value in own.items()]
    identities += [changed({}, {name: value}) for name, value in control.items()]
    assert CONFIG.identity() not in identities


def test_what_may_change_when_it_is_resumed() -> None:
    """Also the length of the training, which is not the search's."""
    own = {"name": "one", "out": "elsewhere", "resume": "one", "address": "auto", "compile_time": 60.0}
    length = {"steps": 5, "cycle": Cycle(5, 1), "data": "moved"}
    assert (
        changed(own, length)
        == changed({}, {"tokens": 10**9})
        == changed({}, {"time_budget": 60.0})
        == CONFIG.identity()
    )


def test_a_flag_of_the_search_is_not_one_of_the_run_that_it_describes(
    command_line: Callable[..., AbstractContextManager[None]],
) -> None:
    """A trial ends once its speed is known; the run of best.json must not."""
    with command_line("--speed-tolerance", "0.02"):
        config = parse_flags(SearchConfig, "search")
    assert (config.speed_tolerance, config.training.duration.speed_tolerance) == (0.02, None)
    described = TrainConfig.of(speed_tolerance=0.1)
    with command_line():
        config = parse_flags(SearchConfig, "search", SearchConfig(described))
    assert (config.speed_tolerance, config.training) == (0.01, described)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"trial_steps": 6}, "--trial-steps 6"),
        ({"confirm_rounds": -1}, "--confirm-rounds -1"),
        ({"speed_tolerance": 1.0}, "--speed-tolerance"),
        ({"accumulations": (0, 1)}, "--accumulations 0"),
        ({"accumulations": (1, 2, 2)}, "--accumulations .*2 twice"),
        ({"speed_tolerance": float("nan")}, "--speed-tolerance nan"),
        ({"trial_steps": 10**30}, "--trial-steps 1"),
        ({"trial_time": float("inf")}, "--trial-time inf"),
        ({"max_concurrent_trials": 2**63}, "--max-concurrent-trials 9"),
        ({"accumulations": (1, 2**31)}, "--accumulations 2147483648"),
        ({"knobs": ("speed=1",)}, "'speed' is not a knob"),
        ({"knobs": ("compile",)}, "compile=: '' is not a valid value"),
        ({"knobs": ("compile=whole,fast",)}, "compile=fast: 'fast' is not a valid value"),
        ({"knobs": ("compile=auto",)}, "'auto' is not a valid value"),
        ({"knobs": ("optimizer=adamw-8bit,muon",)}, "'muon' is not a valid value"),
        ({"knobs": ("loss_chunks=many",)}, "loss_chunks=many.* integers"),
        ({"knobs": ("compile=whole", "compile=off")}, "compile twice"),
    ],
)
def test_what_gives_no_search_is_refused(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        replace(CONFIG, **change)


LEARNING = {"objective": "loss", "train_time": 60.0, "knobs": ("learning_rate=1e-3",)}


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"train_time": None}, "--train-time 1h"),
        ({"train_time": -1.0}, "--train-time -1"),
        ({"train_time": float("inf")}, "--train-time inf"),
        ({"target_loss": 0.0}, "--target-loss 0 must be above 0"),
        ({"target_loss": -3.0}, "--target-loss -3"),
        ({"target_loss": float("nan")}, "--target-loss nan"),
        ({"search_time": 0.0}, "--search-time 0"),
        ({"knobs": ()}, "--knobs"),
        ({"knobs": ("compile=whole",)}, "compile is a setting of the execution.*--objective speed"),
        ({"knobs": ("learning_rate=1e-3", "learning-rate=2e-3")}, "learning_rate twice"),
        ({"knobs": ("lerning_rate=1e-3",)}, "'lerning_rate' is not a knob.*learning_rate"),
        ({"accumulations": (1, 2)}, "--accumulations"),
        ({"searcher": "grid"}, "--searcher grid"),
        ({"objective": "speed", "knobs": ()}, "--train-time 60.*--objective loss"),
    ],
)
def test_what_gives_no_search_for_the_lowest_loss_is_refused(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        replace(CONFIG, **LEARNING | change)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"speed_tolerance": float("nan")}, "--speed-tolerance nan"), ({"speed_tolerance": -1.0},
        "--speed-tolerance -1"),
        ({"speed_tolerance": 1.0}, "--speed-tolerance 1"),
        ({"steps": 10**30}, "--steps 1"), ({"seeds": 10**30}, "--seeds 1"), ({"seed": -3}, "--seed -3"),
        ({"time_budget": float("inf")}, "--time-budget inf"), ({"memory_limit": 10**30}, "--memory-limit 1"),
    ],
)  # fmt: skip
def test_what_gives_no_ladder_is_refused_where_it_is_read(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        LadderConfig(**settings)
    assert LadderConfig(speed_tolerance=0.0, steps=8, seeds=1).speed_tolerance == 0.0


def test_rungs_validate_on_the_same_windows() -> None:
    """A number of batches that each rung chose by its own speed would make losses incomparable."""
    with pytest.raises(UserError, match=r"20s\+20"):
        LadderConfig(cycle=Cycle())
    assert LadderConfig(cycle=Cycle(None, 5)).cycle.val_batches == 5
