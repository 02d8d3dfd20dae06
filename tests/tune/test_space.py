"""The space: any divisor pair, every combination of knobs, and the control that the flags describe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.hardware import A100, cpu_facts
from infra.place import Place
from infra.schema import from_json
from train.config import TrainConfig
from train.resolve import resolve
from tune.config import SearchConfig
from tune.folder import kept_config
from tune.space import Candidate, make_space, parse_knobs


def test_every_factor_pair_is_a_candidate() -> None:
    space = make_space(resolve(TrainConfig(global_batch=12, micro_batch=4), cpu_facts()), ())
    assert [c.micro_batch for c in space.candidates()] == [1, 2, 3, 4, 6, 12]
    assert {space.config(c).micro_batch * space.config(c).accumulation for c in space.candidates()} == {12}
    assert space.control == Candidate(4)


def test_knobs_multiply_and_the_control_comes_first() -> None:
    space = make_space(resolve(TrainConfig(global_batch=8, micro_batch=4), cpu_facts()), ("compile", "checkpointing"))
    assert space.config(space.control) == space.base
    assert len(set(space.candidates())) == 4 * len(space.combinations)
    assert all(space.control.knobs != near for near in space.neighbours(space.control.knobs))


def test_a_free_global_batch_is_one_micro_batch_a_step() -> None:
    space = make_space(resolve(TrainConfig(global_batch=24, micro_batch=3), cpu_facts()), (), free=True)
    assert [c.micro_batch for c in space.candidates()] == [1, 2, 3, 4, 8, 16, 24]
    assert {space.config(c).accumulation for c in space.candidates()} == {1}
    assert space.control in space.candidates()
    assert "free" in space.batch_label


def test_contradictions_are_left_out() -> None:
    base = TrainConfig(global_batch=4, micro_batch=4)
    space = make_space(
        resolve(replace(base, model=replace(base.model, context_length=12)), cpu_facts()), ("loss_chunks",)
    )
    assert [c.micro_batch for c in space.candidates() if ("loss_chunks", 8) in c.knobs] == [2, 4]


def test_settings_that_a_cpu_lacks_are_a_gpus_alone() -> None:
    base = TrainConfig(global_batch=2, micro_batch=2, compile="off")

    def values(knob: str, device: str) -> list[object]:
        return [
            dict(knobs)[knob]
            for knobs in make_space(resolve(base, {"cpu": cpu_facts(), "cuda": A100}[device]), (knob,)).combinations
        ]

    assert values("attention", "cpu") == ["sdpa", "manual"]
    assert values("attention", "cuda") == ["auto", "flash", "cudnn", "efficient", "manual"]
    assert values("compile", "cpu") == ["off", "blocks", "whole"]
    assert values("compile", "cuda") == ["off", "blocks", "whole", "max-autotune", "reduce-overhead"]
    assert values("precision", "cpu") == ["fp32"]
    assert values("precision", "cuda") == ["bf16", "fp32", "tf32", "bf16-activations"]
    both = make_space(resolve(base, A100), ("attention", "precision")).combinations
    assert (("attention", "flash"), ("precision", "bf16")) in both
    assert (("attention", "flash"), ("precision", "fp32")) not in both, "flash exists in 16 bits only"


def test_knob_names() -> None:
    assert parse_knobs(()) == ()
    assert parse_knobs(("compile", "loss-chunks", "compile")) == ("compile", "loss_chunks")
    with pytest.raises(UserError, match="'speed' is not a knob"):
        parse_knobs(("speed",))


def test_one_device() -> None:
    with pytest.raises(UserError, match="--workers 2"):
        make_space(resolve(TrainConfig(workers=2), cpu_facts()), ())


def test_settings_survive_their_file() -> None:
    config = SearchConfig(knobs=("compile",), memory_limit=10**9, training=TrainConfig(data=str(Path("/somewhere"))))
    assert from_json(SearchConfig, config.to_json(), "test") == config
    assert replace(config, resume="one", config="one.json").to_json() == config.to_json(), "of one command alone"


def test_a_damaged_search_is_named(tmp_path: Path) -> None:
    for damage in ({"memory_limit": "4GB"}, {"knobs": [["compile"]]}, {"out": 3}):
        (tmp_path / "search.json").write_text(json.dumps({"config": SearchConfig().to_json() | damage}))
        with pytest.raises(UserError, match=r"search\.json is damaged"):
            kept_config(Place.of(tmp_path), SearchConfig)
    with pytest.raises(UserError, match="there is no"):
        kept_config(Place.of(tmp_path / "search.json"), SearchConfig)
