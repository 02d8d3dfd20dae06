"""The command's refusals; a whole ladder, interrupted and continued, is in tests/test_main_job.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.command import UserError
from train import ladder
from train.climb import refuse_short, refuse_unsuited
from train.config import ModelConfig, TrainConfig
from train.loop import Trainer
from train.suites import Rung


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def command(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """The exit code of ``python -m train.ladder`` with these flags."""
    monkeypatch.setattr(sys, "argv", ["train.ladder", *flags])
    with pytest.raises(SystemExit) as leaving:
        ladder.main()
    return int(leaving.value.code or 0)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--suite", "lop"], "loop"),
        (["--suite", "a100", "--rungs", "compil"], "compile"),
        (["--steps", "3"], "needs 8 or more"),
        (["--steps", "10", "--time-budget", "5m"], "give one of them"),
        (["--data", "nowhere"], "pipeline.tokenize"),
        (["--compare", "nothing"], "no finished ladder"),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, small_shards: Path, capfd: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    data = [] if "--data" in flags else ["--data", str(small_shards)]
    assert command(monkeypatch, *data, *flags) == 2
    error = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert named in error
    assert "Traceback" not in error


def test_a_budget_that_leaves_no_warm_up_says_how_long_it_needs(small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig(data=small_shards, model=small_model, micro_batch=4, global_batch=4, time_budget=0.001)
    short = Trainer(config).run()
    with pytest.raises(UserError, match=r"a rung needs 8 steps, here --time-budget \d+s or more"):
        refuse_short(short, "")
    refuse_short(Trainer(replace(config, time_budget=None, steps=8)).run(), "")
    with pytest.raises(UserError, match="cannot be run: oom"):
        refuse_short(None, "oom")


def test_a_mistyped_ladder_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/ladder.json").write_text("{}")
    assert command(monkeypatch, "--resume", "on") == 2
    assert "did you mean one" in " ".join(capfd.readouterr().err.split())


def test_a_rung_that_says_nothing_here_is_named(small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig(data=small_shards, model=small_model, micro_batch=4, global_batch=4, steps=8)
    on_gpu = replace(config, device="cuda", naive=("pages",))
    rung = Rung("large pages", {"naive": ()})
    with pytest.raises(UserError, match="the pages are a CPU's"):
        refuse_unsuited(on_gpu, replace(on_gpu, naive=()), rung)
    refuse_unsuited(replace(on_gpu, device="cpu"), replace(on_gpu, device="cpu", naive=()), rung)
    with pytest.raises(UserError, match="--attention cudnn"):
        Trainer(replace(config, device="cpu", attention="cudnn")).run()
