"""The space: any divisor pair, every combination of knobs, and the control that the flags describe."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.device.hardware import A100, cpu_info
from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef
from train.config import TrainConfig
from train.resolved import resolve
from tune.config import SearchConfig
from tune.experiment.folder import read_config
from tune.space import Candidate, make_space


def test_every_factor_pair_is_a_candidate() -> None:
    space = make_space(resolve(TrainConfig.of(global_batch=12, micro_batch=4), cpu_info()), ())
    assert [c.micro_batch for c in space.candidates()] == [1, 2, 3, 4, 6, 12]
    assert {space.config(c).batch.micro_batch * space.config(c).batch.accumulation for c in space.candidates()} == {12}
    assert space.control == Candidate(4)


def test_knobs_multiply_and_the_control_comes_first() -> None:
    space = make_space(
        resolve(TrainConfig.of(global_batch=8, micro_batch=4), cpu_info()), ("compile=off,whole", "checkpointing=full")
    )
    assert space.config(space.control) == space.base
    assert len(set(space.candidates())) == 4 * len(space.combinations)
    assert all(space.control.knobs != near for near in space.neighbors(space.control.knobs))


def test_all_kinds_of_recomputation_that_the_settings_support_are_candidates() -> None:
    def kinds(*knobs: str, **settings: Any) -> list[str]:
        base = resolve(TrainConfig.of(global_batch=8, micro_batch=4, **settings), A100)
        space = make_space(base, ("checkpointing=auto", *knobs))
        return [value for combination in space.combinations for name, value in combination if name == "checkpointing"]

    whole = ["none", "budget-75", "selective", "budget", "alternate", "budget-25", "full"]
    assert kinds() == whole
    assert kinds(compile="blocks") == ["none", "alternate", "full"]
    assert kinds(checkpointing="auto", compile="off") == ["none", "selective", "alternate", "full"]


@pytest.mark.parametrize(
    ("batch", "micro_batch", "accumulations", "largest", "control"),
    [(12, 6, (1, 2), 24, (6, 2)), (24, 12, (1, 2), None, (12, 2)), (20, 20, (4, 2), 20, (4, 4))],
)
def test_two_axes_have_every_pair_up_to_the_largest_step(
    batch: int, micro_batch: int, accumulations: tuple[int, ...], largest: int | None, control: tuple[int, int]
) -> None:
    """The control is the run that the flags describe, or the largest with the first accumulation."""
    base = resolve(TrainConfig.of(global_batch=batch, micro_batch=micro_batch), cpu_info())
    space = make_space(base, (), accumulations, largest)
    pairs = {
        (c.micro_batch, space.config(c).batch.accumulation): space.config(c).batch.global_batch
        for c in space.candidates()
    }
    sizes = {1, 2, 4, 8, 16, 24, micro_batch}
    assert pairs == {(m, a): m * a for m in sizes for a in accumulations if m * a <= (largest or batch)}
    own = space.config(space.control)
    assert (own.batch.micro_batch, own.batch.accumulation) == control
    assert space.short_label(space.control) == f"{control[0]} x {control[1]}"


def test_micro_batches_that_fit_with_no_setting_are_left_out() -> None:
    base = resolve(TrainConfig.of(global_batch=1, micro_batch=1), A100)
    space = make_space(base, ("checkpointing=full",), (1, 2), 10**6)
    smaller_space = space.restrict(
        lambda candidate: candidate.micro_batch <= (64 if ("checkpointing", "full") in candidate.knobs else 8)
    )
    assert max(smaller_space.micro_batches) == 64
    assert space.restrict(lambda candidate: False).micro_batches == (1,)


def test_contradictions_are_left_out() -> None:
    base = TrainConfig.of(global_batch=4, micro_batch=4)
    short = base.replace(model=replace(base.model, context_length=12))
    space = make_space(resolve(short, cpu_info()), ("loss_chunks=1,8",))
    assert [c.micro_batch for c in space.candidates() if ("loss_chunks", 8) in c.knobs] == [2, 4]
    both = make_space(resolve(base, A100), ("attention=flash", "precision=fp32")).combinations
    assert (("attention", "flash"), ("precision", "bf16-activations")) in both
    assert (("attention", "flash"), ("precision", "fp32")) not in both, "flash exists in 16 bits only"


def test_the_values_to_try_follow_the_controls_own_and_those_of_other_numerics_have_a_star() -> None:
    base = resolve(TrainConfig.of(global_batch=4), A100)
    space = make_space(base, ("optimizer=adamw,adamw-8bit", "loss-chunks=8,1", "precision=tf32", "fp8=true"))
    values = [dict.fromkeys(value for _, value in axis) for axis in zip(*space.combinations, strict=True)]
    assert [[*axis] for axis in values] == [
        ["adamw-fused", "adamw", "adamw-8bit"], [1, 8], ["bf16-activations", "tf32"], [False, True]
    ]  # fmt: skip
    near = {space.knobs_label(knobs) for knobs in space.neighbors(space.control.knobs)}
    assert near == {"optimizer=adamw", "optimizer=adamw-8bit*", "loss_chunks=8", "precision=tf32*", "fp8=True*"}


@pytest.mark.parametrize(
    ("base", "knob", "reason"),
    [
        (TrainConfig.of(device="cpu"), "attention=flash", "--attention flash and --device cpu"),
        (TrainConfig.of(device="cpu"), "loss_chunks=0", "--loss-chunks 0"),
        (TrainConfig.of(device="cpu", optimizer="muon"), "optimizer=adamw", "--optimizer muon"),
        (TrainConfig.of(device="cpu", workers=2), "compile=off", "--workers 2"),
    ],
)
def test_what_no_candidate_can_be_is_refused(base: TrainConfig, knob: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make_space(resolve(base, cpu_info()), (knob,))


def test_settings_survive_their_file() -> None:
    config = SearchConfig(
        knobs=("compile=whole",),
        accumulations=(1, 2),
        memory_limit=10**9,
        training=TrainConfig.of(data=str(Path("/somewhere"))),
    )
    assert from_json(SearchConfig, config.to_json(), "test") == config
    assert replace(config, resume="one", config="one.json").to_json() == config.to_json(), "of one command alone"


def test_a_damaged_search_is_named(tmp_path: Path) -> None:
    for damage in ({"memory_limit": "4GB"}, {"knobs": [["compile"]]}, {"out": 3}):
        record = {
            "config": SearchConfig().to_json() | damage,
            "identity": {},
            "mlflow_run": to_json(RunRef("", "", "")),
        }
        (tmp_path / "search.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match=r"search\.json is corrupt"):
            read_config(StorageDir.of(tmp_path), SearchConfig)
    with pytest.raises(UserError, match="there is no"):
        read_config(StorageDir.of(tmp_path / "search.json"), SearchConfig)
