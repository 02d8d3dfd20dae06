"""The candidates of a search for the lowest loss."""

from pathlib import Path

import pytest

from infra.device.hardware import cpu_info
from infra.errors import UserError
from train.config import TrainConfig
from train.model_config import parse_model
from tune.learning.space import LearningSpace, make_learning_space
from tune.space import Candidate


def space_of(*knobs: str, model: str = "tiny", **settings: object) -> LearningSpace:
    return make_learning_space(TrainConfig.of(model=parse_model(model), device="cpu", **settings), knobs, cpu_info())


def test_the_control_comes_first_and_numbers_ascend() -> None:
    space = space_of("learning_rate=3e-3,1e-3", "optimizer=muon", learning_rate=2e-3, global_batch=8)
    assert space.values == {"learning_rate": (1e-3, 2e-3, 3e-3), "optimizer": ("adamw-fused", "muon")}
    assert space.control.knobs == (("learning_rate", 2e-3), ("optimizer", "adamw-fused"))
    assert len(space.candidates) == 6
    config = space.config(space.candidates[-1])
    assert (config.optimization.learning_rate, config.optimization.optimizer) == (3e-3, "muon")


def test_each_candidate_gets_a_micro_batch_for_its_global_batch() -> None:
    space = space_of("global_batch=6,64", global_batch=16)
    batches = {space.config(c).batch.global_batch: c.micro_batch for c in space.candidates}
    assert batches == {16: 16, 6: 6, 64: 32}


def test_the_shape_of_a_preset_can_be_searched() -> None:
    space = space_of("layers=2,3", "dropout=0.0,0.1", global_batch=8)
    shapes = {(space.config(c).model.text, *(value for _, value in c.knobs)) for c in space.candidates}
    assert {shape[1:] for shape in shapes} == {(2, 0.0), (2, 0.1), (3, 0.0), (3, 0.1)}
    assert len({text for text, *_ in shapes}) == 4


def test_neighbors_differ_in_one_step_of_one_or_two_knobs() -> None:
    space = space_of("learning_rate=1e-3,2e-3,4e-3,8e-3", "global_batch=4,8,16,32", learning_rate=1e-3, global_batch=4)
    near = [tuple(value for _, value in c.knobs) for c in space.neighbors(space.control)]
    assert near == [(1e-3, 8), (2e-3, 4), (2e-3, 8)]
    assert space.edges(space.control) == [("learning_rate", 1e-3), ("global_batch", 4)]


def test_another_optimizer_is_near_with_the_same_numbers_only() -> None:
    space = space_of("learning_rate=1e-3,2e-3", "optimizer=adamw-fused,muon", learning_rate=1e-3, global_batch=4)
    near = [tuple(value for _, value in c.knobs) for c in space.neighbors(space.control)]
    assert near == [(1e-3, "muon"), (2e-3, "adamw-fused")]


def test_candidates_that_differ_only_in_the_rate_have_one_speed() -> None:
    space = space_of("learning_rate=1e-3,2e-3", "global_batch=4,8", "optimizer=adamw-fused,sgd", global_batch=4)
    assert len({space.speed_key(candidate) for candidate in space.candidates}) == 4


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        (["compile=off,whole"], "setting of the execution"),
        (["learning_rat=1e-3"], "learning_rate"),
        (["learning_rate=fast"], "'fast'"),
        (["optimizer=adam"], "'adam'"),
        (["learning_rate=-1.0"], "learning-rate -1.0"),
        (["global_batch=8", "global_batch=16"], "twice"),
        ([], "--knobs"),
    ],
)
def test_invalid_knobs_are_named(knobs: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        space_of(*knobs)


def test_a_knob_that_the_model_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "models"))
    with pytest.raises(UserError, match="no width"):
        space_of("width=32,64", model="own_models:gpt2,vocab_size=320,context_length=32")


def test_candidates_are_equal_however_they_were_made() -> None:
    first, second = (space_of("learning_rate=1e-3,2e-3", global_batch=8) for _ in range(2))
    assert first.candidates == second.candidates
    assert isinstance(first.control, Candidate)
