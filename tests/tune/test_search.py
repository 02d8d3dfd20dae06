"""The command with real Ray and real MLflow: rows, files, runs, what a kill leaves, and every refusal."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from trainers import make_trainer

from infra.ray.cluster import ray_session
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef
from train.config import Cycle, TrainConfig, load_config
from train.model_config import PRESETS, ModelConfig
from train.resolved import resolve_local
from train.run_files.lookup import format_run_command
from train.run_files.run_folder import resume_command
from tune import find_fastest, search
from tune.config import SearchConfig
from tune.experiment.folder import write_record
from tune.experiment.search_plan import make_search
from tune.strategy.ranking import NEGLIGIBLE_LOSS, rank
from tune.trial.row import read_rows

FLAGS = [
    "--model", "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320",
    "--device", "cpu", "--trial-steps", "8",
]  # fmt: skip


def runs(folder: Path, name: str) -> tuple[Run, list[Run]]:
    """The parent run of the search ``name`` and its children."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tune")
    assert experiment
    mlflow_runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in mlflow_runs if r.info.run_name == name]
    return parent, [r for r in mlflow_runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Path]:
    """A working folder that holds an empty store, for all commands of this module."""
    made = tmp_path_factory.mktemp("search")
    shutil.copy(empty_store, made)
    working_folder_before = Path.cwd()
    os.chdir(made)
    yield made
    os.chdir(working_folder_before)


def files(folder: Path) -> dict[Path, int]:
    """The rows in ``folder``, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "trials").glob("m*.json")}


TWO = ["--searcher", "grid", "--global-batch", "2", "--micro-batch", "1", "--memory-limit", "8GB"]
"""A search with two candidates."""


@pytest.fixture(scope="module")
def killed(folder: Path, small_shards: Path, cluster: str) -> dict[Path, int]:
    """What a search left whose driver was killed after its first trial."""
    flags = [*TWO, "--confirm-rounds", "0", "--name", "one"]
    command = [sys.executable, "-m", "tune.search", "--data", str(small_shards), *flags, *FLAGS]
    driver = subprocess.Popen(command, start_new_session=True, env=os.environ | {"RAY_ADDRESS": cluster})
    deadline = time.monotonic() + 200
    while not files(folder / "runs" / "one") and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.2)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    return files(folder / "runs" / "one")


@pytest.fixture(scope="module")
def searched(command: Callable[..., int], folder: Path, killed: dict[Path, int], cluster: str) -> Path:
    """A finished search: the one that was killed, continued by this process. Every candidate once."""
    assert killed, "otherwise nothing was begun"
    with ray_session(cluster):
        assert command(search.main, "--resume", "one") == 0
    return folder / "runs" / "one"


@pytest.mark.usefixtures("in_this_process")
def test_the_next_search_completes_the_runs_of_a_killed_one(
    command: Callable[..., int], folder: Path, killed: dict[Path, int], small_shards: Path
) -> None:
    """From its folder: the trial that ended before the kill has all its entries, and the search its settings."""
    flags = ["--searcher", "grid", "--global-batch", "1", "--memory-limit", "8GB", "--confirm-rounds", "0"]
    assert command(search.main, "--data", str(small_shards), *flags, *FLAGS, "--name", "next") == 0
    parent, children = runs(folder, "one")
    (row,) = read_rows(folder / "runs" / "one" / "trials")
    assert (parent.info.status, parent.data.tags["fully_logged"]) == ("KILLED", "true")
    assert parent.data.params["memory_limit"] == "8.00 GB"
    (trial,) = [child for child in children if child.data.tags["trial"] == row.key]
    assert (trial.info.status, trial.data.tags["fully_logged"]) == ("FINISHED", "true")
    assert trial.data.metrics["result/tokens_per_second"] == row.tokens_per_second
    assert {child.info.status for child in children if child is not trial} <= {"KILLED"}


def test_a_killed_search_continues(folder: Path, killed: dict[Path, int], searched: Path) -> None:
    now = files(searched)
    assert 1 == len(killed) < len(now) == 2
    assert {path: now[path] for path in killed} == killed
    parent, children = runs(folder, "one")
    assert parent.info.status == "FINISHED"
    assert Counter(r.info.status for r in children) == {"FINISHED": 2}


@pytest.mark.usefixtures("in_this_process")
def test_a_search_leaves_rows_files_and_runs(command: Callable[..., int], folder: Path, small_shards: Path) -> None:
    """Every candidate once, then once more."""
    assert (
        command(search.main, "--data", str(small_shards), *TWO, *FLAGS, "--confirm-rounds", "1", "--name", "whole") == 0
    )
    done = folder / "runs" / "whole"
    rows = list(csv.DictReader((done / "trials.csv").open()))
    assert Counter(row["stage"] for row in rows) == {"probe": 2, "confirm": 2}
    assert {row["outcome"] for row in rows} == {"ok"}
    assert {int(row["micro_batch"]) * int(row["accumulation"]) for row in rows} == {2}
    assert {row["node"] for row in rows} == {socket.gethostname()}
    assert "resident set" in (done / "summary.md").read_text()
    parent, children = runs(folder, "whole")
    assert parent.info.status == "FINISHED"
    assert "tokens/s" in parent.data.tags["mlflow.note.content"]
    assert parent.data.metrics["trials/ok"] == len(rows)
    assert parent.data.metrics["result/speedup_over_control"] >= 1 - NEGLIGIBLE_LOSS
    assert Counter(r.info.status for r in children) == {"FINISHED": len(rows)}
    assert len({r.data.tags["trial"] for r in children}) == len(rows)
    assert all(r.data.metrics["result/tokens_per_second"] > 0 for r in children)
    assert all(r.data.metrics["memory/predicted_gb"] > 0 for r in children), "a grid's and confirmations' too"
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    charts = ("leaderboard", "memory_by_micro_batch", "speed_by_micro_batch", "pareto", "progress")
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {
        "trials.csv", "summary.md", "best.json", "search.json", *(f"{chart}.png" for chart in charts),
    }  # fmt: skip
    speeds = [client.get_metric_history(r.info.run_id, "result/tokens_per_second") for r in children]
    assert {point.step for points in speeds for point in points} == {0}, "for which MLflow draws bars"


@pytest.mark.usefixtures("in_this_process")
def test_every_report_of_a_search_shows_the_same_speeds(
    command: Callable[..., int], folder: Path, small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of each trial and of each candidate: its line, the table, summary.md, trials.csv, best.json, and MLflow."""
    flags = [*TWO, *FLAGS, "--confirm-rounds", "2", "--name", "same"]
    assert command(search.main, "--data", str(small_shards), *flags) == 0
    printed, done = capfd.readouterr().out, folder / "runs" / "same"
    parent, children = runs(folder, "same")
    tags = {child.data.tags["trial"]: child.data.tags for child in children}
    metrics = {child.data.tags["trial"]: child.data.metrics for child in children}
    rows = {row.key: row for row in read_rows(done / "trials")}
    table = list(csv.DictReader((done / "trials.csv").open()))
    assert len(table) == len(rows) == len(children)
    metric, *ends = ("result/tokens_per_second", *(f"detail/result/tokens_per_second_{end}" for end in ("low", "high")))
    for line in table:
        trial, row = line["key"], rows[line["key"]]
        assert row.speed
        assert re.search(rf"(?m)^ *{row.number} .*\| {re.escape(str(row.speed))} tokens/s \|", printed)
        assert tuple(float(line[name]) for name in ("tokens_per_second", "speed_low", "speed_high")) == row.speed
        assert tuple(metrics[trial][name] for name in (metric, *ends)) == row.speed
        assert tags[trial]["tokens/s"] == str(row.speed)
        assert str(row.speed) in tags[trial]["mlflow.note.content"]
    ranked = rank(list(rows.values()))
    for entry in ranked:
        trials = [line for line in table if rows[line["key"]].candidate == entry.candidate]
        names = ("candidate_tokens_per_second", "candidate_speed_low", "candidate_speed_high")
        assert {tuple(float(line[name]) for name in names) for line in trials} == {entry.speed}
        assert {int(line["candidate_runs"]) for line in trials} == {entry.runs}
        assert {tags[line["key"]]["candidate_tokens/s"] for line in trials} == {str(entry.speed)}
        cells = f"| {entry.speed.middle:,.0f} | {entry.speed.interval} |"
        assert cells in (done / "summary.md").read_text()
        assert cells in parent.data.tags["mlflow.note.content"]
        assert re.search(rf"(?m)^ *{entry.candidate.micro_batch} x .*{entry.speed.interval}", printed)
    best = json.loads((done / "best.json").read_text())["measured"]
    assert (best["tokens_per_second"], best["speed_low"], best["speed_high"]) == ranked[0].speed
    assert tuple(parent.data.metrics[name] for name in (metric, *ends)) == ranked[0].speed
    assert str(ranked[0].speed) in printed


def test_what_is_to_be_pasted_names_odd_folders_as_a_shell_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "all of my [runs]" / "it's one"
    again = resume_command("tune.search", StorageDir.of(folder))
    assert shlex.split(again)[-3:] == ["it's one", "--out", str(folder.parent)]
    assert shlex.split(format_run_command(StorageDir.of(folder) / "best.json"))[-1] == str(folder / "best.json")
    again = resume_command("tune.search", StorageDir.of("s3://lab/runs/one"))
    assert again == "python -m tune.search --resume one --out s3://lab/runs"


def test_the_winner_trains(searched: Path) -> None:
    best = json.loads((searched / "best.json").read_text())
    assert best["measured"]["tokens_per_second"] > 0
    config = load_config(searched / "best.json")
    assert config.batch.micro_batch == best["config"]["micro_batch"]
    assert make_trainer(resolve_local(config.replace(steps=5, cycle=Cycle(5, 0)))).run().outcome == "finished"


@pytest.mark.usefixtures("in_this_process")
def test_resume_runs_only_what_is_missing(
    command: Callable[..., int], folder: Path, searched: Path, small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also when the same data lies elsewhere by now."""
    rows = files(searched)
    lost_file = max(rows, key=lambda path: rows[path])
    lost_file.unlink()
    moved = shutil.copytree(small_shards, folder / "moved")
    assert command(search.main, "--resume", "one", "--data", str(moved)) == 0
    printed = capfd.readouterr().out
    assert re.search(
        r"(probe|confirm) +micro-batch \d x \d \| [\d,]+ \(95% CI [\d,]+ to [\d,]+\) tokens/s \| "
        r"[\d.]+ GB of 8.00 GB \| compile .*ok: ",
        printed,
    )
    assert re.search(
        r"best so far: micro-batch \d x \d, [\d,]+ tokens/s \| elapsed [\dms]+ \| about [\dms]+ left", printed
    )
    assert "winner" in printed
    assert re.search("(?m)^Next +about .*: python -m train.run --config", printed)
    now = files(searched)
    assert {path for path in now if now[path] != rows[path]} == {lost_file}
    _, children = runs(folder, "one")
    assert len(children) == len(rows)


@pytest.mark.usefixtures("searched")
def test_what_is_not_the_same_search_is_refused(
    refused: Callable[..., str], folder: Path, small_shards: Path, make_shards: Callable[..., Path]
) -> None:
    assert "global_batch: 2 → 16" in refused(search.main, "--resume", "one", "--global-batch", "16")
    other = make_shards(folder / "other", seed=1)
    assert "(data: " in refused(search.main, "--resume", "one", "--data", str(other))
    assert "there is no search in" in refused(search.main, "--resume", "two")
    for name, refusal in {"one": "already exists", "../one": "not a valid folder name"}.items():
        assert refusal in refused(
            search.main, "--name", name, "--data", str(small_shards), "--out", str(folder / "runs")
        )


@pytest.mark.usefixtures("in_this_process")
def test_over_the_limit_is_an_outcome(
    command: Callable[..., int], folder: Path, small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--searcher", "grid", "--memory-limit", "100MB", "--name", "tight", "--global-batch", "1"]
    assert command(search.main, "--data", str(small_shards), *flags, *FLAGS) == 1
    assert "no configuration fits 100MB" in capfd.readouterr().out
    parent, (child,) = runs(folder, "tight")
    assert (parent.info.status, child.info.status) == ("FAILED", "FINISHED")
    assert "no configuration fits 100MB" in parent.data.tags["mlflow.note.content"]
    rows = list(csv.DictReader((folder / "runs/tight/trials.csv").open()))
    assert [row["outcome"] for row in rows] == ["over_limit"]
    assert not (folder / "runs/tight/best.json").exists()


def test_a_search_that_cannot_be_resumed_yet_keeps_its_folder(
    refused: Callable[..., str], folder: Path, small_shards: Path
) -> None:
    """Although nothing has run: its driver was killed before the first trial, and its store is away now."""
    training = TrainConfig.of(data=str(small_shards), model=PRESETS["tiny"], global_batch=2, device="cpu")
    made = make_search(SearchConfig(training=training, name="early", memory_limit=8 * 10**9))
    made.folder.mkdir(parents=True)
    away = RunRef("sqlite:////gone/mlflow.db", "1", "a", made.directory.address)
    write_record(made.workspace, made.record(away))
    assert "sqlite:////gone/mlflow.db" in refused(search.main, "--resume", "early")
    assert (folder / "runs" / "early" / "search.json").is_file()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--memory-limit", "1kB"], "less than the"),
        (["--knobs", "magic=1"], "'magic' is not a knob"),
        (["--knobs", "loss_chunks=7"], "--loss-chunks 7"),
        (["--knobs", "fp8=true"], "--fp8"),
        (["--accumulations", "0"], "--accumulations 0"),
        (["--accumulations", "1", "1000000000"], "--accumulations 1000000000"),
        (["--accumulations", "1000000000"], "--accumulations 1000000000"),
        (["--device", "cuda"], "no GPU"),
        (["--workers", "2"], "--workers 2"),
        (["--trial-steps", "2"], "--trial-steps 2"),
        (["--tracking-uri", "sqlite:///."], "is a folder"),
        (["--micro-batch", "3"], "--micro-batch 3"),
        (["--max-concurrent-trials", "0"], "--max-concurrent-trials 0"),
        (["--global-batch", "0"], "--global-batch 0"),
        (["--global-batch", "²"], "'²'"),
        (["--config", ""], "--config is empty"),
        (["--resume="], "--resume is empty"),
    ],
)
def test_bad_input_gets_one_sentence(
    refused: Callable[..., str], folder: Path, small_shards: Path, flags: list[str], sentence: str
) -> None:
    batch = [] if "--global-batch" in flags else ["--global-batch", "4"]
    assert sentence in refused(search.main, "--data", str(small_shards), "--name", "bad", *FLAGS, *batch, *flags)
    assert not (folder / "runs" / "bad").exists()


def test_dry_run_runs_nothing(
    command: Callable[..., int], folder: Path, small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        command(search.main, "--data", str(small_shards), "--name", "dry", "--dry-run", "--global-batch", "4", *FLAGS)
        == 0
    )
    assert re.search(r"control +4 x 1 to 1 x 4 ", capfd.readouterr().out)
    assert not (folder / "runs" / "dry").exists()
    flags = ["--dry-run", "--global-batch", "4", "--knobs", "checkpointing=selective,full", "attention=manual"]
    assert command(search.main, "--data", str(small_shards), *flags, *FLAGS) == 0
    printed = capfd.readouterr().out
    assert re.search(r"control +4 x 1 to 1 x 4 ", printed)
    assert re.search(r"checkpointing=full +4 x 1 to 1 x 4 ", printed)
    assert "2 more combinations change several knobs" in printed
    assert re.search(r"about \d+ trials of at most 8 steps or 1m each, at most [\dms]+ in total", printed)


def test_a_search_from_python_that_is_interrupted_is_not_one_without_a_winner(
    folder: Path, small_shards: Path, small_model: ModelConfig, interrupt_when: Callable[[Callable[[], object]], None]
) -> None:
    """What it has found is kept, as after Ctrl-C in the command."""
    training = TrainConfig.of(data=str(small_shards), model=small_model, global_batch=2, micro_batch=1, device="cpu")
    config = SearchConfig(training=training, searcher="grid", trial_steps=8, memory_limit=8 * 10**9, name="python")
    directory = folder / "runs" / "python"
    interrupt_when(lambda: any(directory.glob("ray-*")))  # which Tune makes
    with pytest.raises(KeyboardInterrupt):
        find_fastest(config)
    assert (directory / "search.json").exists()
