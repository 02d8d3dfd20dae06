"""A config refuses what contradicts itself in one sentence, and survives JSON and the command line."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from infra.cli.flags import parse_flags
from infra.errors import UserError
from pipeline.config import ReadingConfig
from train.config import Cycle, ResolvedConfig, TrainConfig, config_from_json, load_config
from train.model_config import PRESETS, parse_model
from train.run import RunOptions, defaults


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"global_batch": 7, "micro_batch": 2}, ["--global-batch 7", "--micro-batch 2", "--micro-batch 1 or 7"]),
        ({"global_batch": 10**24 + 1, "micro_batch": 2}, [f"--global-batch {10**24 + 1}", "2^31"]),
        ({"global_batch": 8, "micro_batch": 4, "workers": 3}, ["--global-batch 8", "--workers 3"]),
        ({"steps": 5, "time_budget": 3.0}, ["--steps", "--time-budget"]),
        ({"tokens": 5}, ["--tokens 5", "--global-batch"]),
        ({"steps": 0}, ["--steps 0"]),
        ({"micro_batch": 0}, ["--micro-batch 0"]),
        ({"seed": 2**63}, ["--seed 9223372036854775808"]),
        ({"loss_chunks": 7, "micro_batch": 32}, ["--loss-chunks 7", "--micro-batch"]),
        ({"reading": ReadingConfig(text_field="content")}, ["--text-field", "--stream", "python -m pipeline.tokenize"]),
    ],
)
def test_a_contradiction_is_named(settings: dict, named: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        TrainConfig.of(**settings)
    for part in named:
        assert part in str(refusal.value)


def test_a_model_is_written_as_it_is_read() -> None:
    for text in (*PRESETS, "tiny,layers=4", "small,bias=false,dropout=0.2"):
        assert parse_model(parse_model(text).text) == parse_model(text)


def test_a_models_changes_are_read_as_their_types() -> None:
    assert parse_model("tiny, bias=False,tied=true,dropout=0.5,heads=4") == dataclasses.replace(
        PRESETS["tiny"], bias=False, tied=True, dropout=0.5, heads=4
    )
    assert dataclasses.replace(PRESETS["tiny"], bias=False).text == "tiny,bias=false"


def test_a_size_that_no_model_has_is_named() -> None:
    for name, value in (
        ("vocab_size", 0), ("context_length", 0), ("dropout", 1.0), ("dropout", float("nan")),
        ("padded_vocab_size", 50256), ("context_length", 10**30), ("width", 2**20 + 1), ("layers", 10**30),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"{name}.*{value}"):
            dataclasses.replace(PRESETS["tiny"], **{name: value})
    assert dataclasses.replace(PRESETS["tiny"], padded_vocab_size=50257)


def test_a_searchs_best_is_read_by_its_config(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text(json.dumps({"space": "fixed", "config": TrainConfig.of(seed=5).to_json()}))
    assert load_config(path) == TrainConfig.of(seed=5)


def test_an_unknown_model_is_refused() -> None:
    for text in ("huge", "tiny,depth=3", "tiny,layers=two", "tiny,layers", "tiny,heads=3"):
        with pytest.raises(UserError):
            parse_model(text)


def test_a_bad_config_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for content in (
        "", "[1]", '{"config": 3}', '{"config": null}', '{"color": 1}', '{"precision": "fp8"}', '{"steps": -1}',
        "\xff", "[" * 100_000, f'{{"steps": {"9" * 5000}}}',
    ):  # fmt: skip
        path.write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=r"bad\.json"):
            load_config(path)


def test_the_batch_arithmetic() -> None:
    config = ResolvedConfig.of(micro_batch=8, workers=2)
    assert config.batch.accumulation == 30
    assert config.step_tokens == 491_520
    assert config.replace(tokens=10**6).total_steps == 2
    assert config.replace(steps=7).total_steps == 7
    assert config.replace(micro_batch=4, global_batch=8).step_tokens == 8192


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"global_batch": "8"}, "global_batch is '8'"), ({"mask_books": 1}, "mask_books is 1"),
        ({"ablate": [1]}, "ablate.0 is 1"), ({"compile": None}, "compile is None"),
        ({"stream": "books"}, "stream is 'books'"), ({"model": {"depth": 2}}, "model has an unknown setting"),
        ({"model": 3}, "model is 3"), ({"cycle": -3}, "--cycle '-3'"), ({"cycle": "²+1"}, "--cycle '².1'"),
        ({"cycle": "0+1"}, "--cycle '0.1'"),
        ({"reading": {"languages": "en"}}, "languages is 'en'"), ({"reading": None}, "reading is None"),
        ({"reading": {"languages": ["english"]}}, "--languages 'english'"),
    ],
)  # fmt: skip
def test_a_files_values_are_of_their_fields_types(values: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=rf"^a\.json.*{named}"):
        config_from_json(values, "a.json")


def test_every_field_takes_back_what_it_gave() -> None:
    full = TrainConfig.of(
        stream=("books",), reading=ReadingConfig(doc_separator="***", languages=("en", "fr")), steps=3,
        speed_tolerance=0.01, ablate=("async-loss",), accelerator="A100",
    )  # fmt: skip
    tiny = TrainConfig.of(model=parse_model("tiny,layers=3,dropout=0.1,tied=false"), steps=7, cycle=Cycle(5, 1))
    for config in (TrainConfig(), full, tiny, TrainConfig.of(time_budget=3), TrainConfig.of(learning_rate=1)):
        assert config_from_json(json.loads(json.dumps(config.to_json())), "a.json") == config


def test_how_a_stream_is_read_is_in_a_file_and_under_the_pipelines_flags(
    tmp_path: Path, command_line: Callable[..., AbstractContextManager[None]]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(TrainConfig.of(stream=("a.jsonl",), steps=3, reading=ReadingConfig(text_field="body")).to_json())
    )
    default = RunOptions(training=load_config(path))
    with command_line("--languages", "en", "fr", "--join-lines"):
        reading = parse_flags(RunOptions, "a command", default).training.dataset.reading
    assert reading == ReadingConfig(text_field="body", languages=("en", "fr"), join_lines=True)
    assert "reading" not in TrainConfig().to_json(), "which has no effect on shards"


def test_flags_win_over_a_file_also_with_their_default_values(
    tmp_path: Path, command_line: Callable[..., AbstractContextManager[None]]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TrainConfig.of(micro_batch=7, global_batch=14, fp8=True, steps=3).to_json()))
    words = ["--micro-batch", "auto", "--workers", "7", "--no-fp8", "--steps", "None", "--tokens=100000", "--config"]
    with command_line(*words, str(path)):
        config = parse_flags(RunOptions, "a command", defaults()).training
    assert config == TrainConfig.of(global_batch=14, workers=7, tokens=100_000)


@pytest.mark.parametrize(
    ("text", "cycle"),
    [
        ("200+20", Cycle(200, 20)), ("200", Cycle(200)), ("20s", Cycle()), ("5m+0", Cycle(None, 0, 300.0)),
        ("1m30s+3", Cycle(None, 3, 90.0)),
    ],
)  # fmt: skip
def test_a_cycle_is_steps_or_a_time_with_or_without_a_number_of_batches(text: str, cycle: Cycle) -> None:
    assert Cycle.parse(text) == cycle
    assert str(cycle) == text
    assert cycle.validates == (not text.endswith("+0"))


@pytest.mark.parametrize("text", ["", "+1", "0", "0+1", "20s+", "20s+x", "5+-1", "s", "20x", "99999999+1"])
def test_a_cycle_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--cycle"):
        Cycle.parse(text)
