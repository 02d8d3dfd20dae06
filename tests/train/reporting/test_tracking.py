"""A training run in a real MLflow store: few numbers, what was changed, the columns of its views, and its metrics."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from infra.cli.units import GB
from infra.device.hardware import cpu_info
from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from infra.tracking import orphaned_runs
from infra.tracking.names import MAX_TOP_LEVEL_METRICS
from infra.tracking.orphaned_runs import incomplete_runs
from infra.tracking.run_ref import RunRef
from infra.tracking.saved_views import COLUMNS, VIEWS
from infra.tracking.store import create_run, read_logged
from infra.tracking.tracker import Tracker
from pipeline.shards import TRACKING_FILE, find_producing_run, read_manifest
from train.config import ResolvedConfig, TrainConfig
from train.model_config import ModelConfig
from train.reporting import tracking
from train.reporting.report import run_report
from train.resolved import resolve
from train.result import CycleReport, Memory, RunResult
from train.run_files.run_folder import RunFolder

HOME = RunFolder(Path("runs/one"))

CYCLE = CycleReport(
    step=3, batches=4, train_loss=4.0, val_loss=3.5, train_tokens=384, val_tokens=128, books_seen=2,
    cycle_seconds=4.0, train_seconds=3.0, data_wait_seconds=0.25, optimizer_seconds=0.5, elapsed=9.0,
    cycle_tokens=384, epoch_seconds=1.0,
    learning_rate=1e-3, gradient_norm=2.0, step_losses=[5.0, 4.0, 3.0], val_bits_per_byte=1.5,
)  # fmt: skip

LOGGED = to_json(replace(CYCLE, step=12, val_loss=0.0, train_tokens=4000, elapsed=9.0, cycle_tokens=1000))


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    requested = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=2, global_batch=4, precision="fp32", device="cpu",
        compile="off", loss="plain",
    )  # fmt: skip
    return resolve(requested, cpu_info())


@pytest.fixture
def result(make_result: Callable[..., RunResult]) -> RunResult:
    """With every number that a result can have."""
    return make_result(
        device="NVIDIA H100", memory=Memory(10**9, 2 * 10**9, 4 * 10**9, "nvml", 1), mfu=0.4, hfu=0.5,
        predicted_memory=5 * 10**9, matmul_utilization=0.6, val_bits_per_character=1.25,
        joules_per_million_tokens=1754.0,
    )  # fmt: skip


def started(
    home: RunFolder, config: ResolvedConfig, requested: TrainConfig, memory_limit: int | None = None, step: int = 0
) -> None:
    """The folder of a run as its command leaves it before the first step."""
    home.path.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(config.dataset.data)
    write_json(home.config, requested.to_json())
    write_json(
        home.start,
        to_json(tracking.RunStart(config.to_json(), manifest.fingerprint, manifest.splits, step, memory_limit)),
    )


def ended(home: RunFolder, config: ResolvedConfig, result: RunResult, store: str) -> None:
    """What that command adds at the end."""
    write_json(home.result, to_json(result))
    tracking.write_summary(
        home,
        run_report(config.step, config.dataset, config.duration, result, home.location, 8 * 10**9),
        config.dataset,
        store,
    )


def recorded(config: ResolvedConfig, result: RunResult) -> tuple[RunRef, Run]:
    """The run that the driver leaves, on a card that was watched."""
    key = create_run("train", "one", tags={"kind": "run"})
    started(HOME, config, config.requested, 8 * 10**9)
    HOME.append_report(replace(CYCLE, step=10, step_losses=CYCLE.step_losses[:1]))
    with Tracker(key) as tracker:
        tracking.fill(tracker, HOME, until=0)
        tracker.log_metrics({"system/gpu_power_watts": 690.0}, 1)
        ended(HOME, config, result, key.store)
        tracking.fill(tracker, HOME)
    return key, MlflowClient(key.store).get_run(key.run_id)


class CountingTracker(Tracker):
    """A tracker that counts the entries that it sends."""

    def _put(self, entry: dict[str, Any]) -> None:
        sent[entry["kind"], entry.get("key") or entry.get("name") or ""] += 1
        super()._put(entry)


sent = Counter[tuple[str, str]]()


@pytest.mark.usefixtures("working_folder")
def test_the_start_of_a_run_is_sent_once(config: ResolvedConfig, result: RunResult) -> None:
    """The end fills the run from its folder again, and finds what the start has sent."""
    key = create_run("train", "one", tags={"kind": "run"})
    for step in (0, 3):
        started(HOME, config, config, 8 * 10**9, step)
        sent.clear()
        with CountingTracker(key, read_logged(key) if step else None) as tracker:
            tracking.fill(tracker, HOME, until=step)
            ended(HOME, config, result, key.store)
            tracking.fill(tracker, HOME)
        names = ("config-from-step-3.json", "resumed_at_step") if step else ("config.json",)
        counts = {name: count for (_, name), count in sent.items() if name in names}
        assert counts == dict.fromkeys(names, 1)
        assert {count for (kind, _), count in sent.items() if kind in ("param", "data")} == (set() if step else {1})
        tags = MlflowClient(key.store).get_run(key.run_id).data.tags
        assert tags["outcome"] == "finished", "of which the start of a resumed run clears the earlier one"
        assert all(tags.values()), "an empty tag takes space above the description"


@pytest.mark.usefixtures("working_folder")
def test_a_page_begins_with_few_numbers_and_keeps_the_others(config: ResolvedConfig, result: RunResult) -> None:
    _, run = recorded(config, result)
    first = {name for name in run.data.metrics if not name.startswith(("detail/", "system/"))}
    assert first == set(tracking.METRICS)
    assert len(first) <= MAX_TOP_LEVEL_METRICS
    details = {name for name in run.data.metrics if name.startswith("detail/")}
    assert {
        "detail/result/tokens_per_second_low", "detail/result/tokens_per_second_high", "detail/result/hfu",
        "detail/memory/predicted_gb", "detail/time/data_wait_fraction",
    } <= details  # fmt: skip
    for column in COLUMNS["train"].keys() - {"tags.`reason`"}:  # A finished run has none.
        kind, _, name = column.partition(".")
        assert name.strip("`") in getattr(run.data, kind), column
    drawn = {metric for view in VIEWS["train"] if view.charts for metric in (*view.charts, view.x_metric)}
    assert drawn <= run.data.metrics.keys()


@pytest.mark.usefixtures("working_folder")
def test_what_was_changed_is_told_from_what_is_usual(config: ResolvedConfig, result: RunResult) -> None:
    """``asked``, not what it became on this device: ``auto`` is no change."""
    key, run = recorded(config, result)
    text = "tiny,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"
    assert run.data.params == {
        "changed.model": text, "changed.micro_batch": "2", "changed.global_batch": "4", "changed.precision": "fp32",
        "changed.device": "cpu", "changed.compile": "off", "changed.loss": "plain", "compile": "off", "loss": "plain",
        "model": text, "data": config.dataset.data, "micro_batch": "2", "accumulation": "2",
        "global_batch": "4", "precision": "fp32", "device": "cpu", "seed": "0",
    }  # fmt: skip
    whole = MlflowClient(key.store).download_artifacts(key.run_id, "config.json")
    assert '"attention": "sdpa"' in Path(whole).read_text()


@pytest.mark.usefixtures("working_folder")
def test_the_list_says_why_a_run_failed(config: ResolvedConfig, result: RunResult) -> None:
    keys = [create_run("train", name, tags={"kind": "run"}) for name in ("oom", "raised")]
    error_text = "CUDA out of memory. Tried to allocate 2.00 GiB"
    started(HOME, config, config)
    ended(HOME, config, replace(result, outcome="oom", reason=error_text), keys[0].store)
    with Tracker(keys[0]) as tracker:
        tracking.fill(tracker, HOME)
    with pytest.raises(RuntimeError), Tracker(keys[1]):
        raise RuntimeError(error_text + "\nand a traceback")
    for key in keys:
        assert MlflowClient(key.store).get_run(key.run_id).data.tags["reason"] == error_text
    assert "tags.`reason`" in COLUMNS["train"]


def note(key: RunRef) -> list[str]:
    """The paragraphs of a run's description."""
    return MlflowClient(key.store).get_run(key.run_id).data.tags["mlflow.note.content"].split("\n\n")


@pytest.mark.usefixtures("working_folder")
def test_the_description_begins_with_three_lines(config: ResolvedConfig, result: RunResult) -> None:
    """What MLflow shows of it unfolded, and legibly."""
    key, _ = recorded(config, result)
    what, numbers, following = note(key)[0].split("  \n")
    assert Path(config.dataset.data).name in what
    for number in ("1,000", "990 to 1,020", "40.0%", "4.00 GB of 8.00 GB", "5.00", "3.250", "3.500"):
        assert number in numbers
    assert "--checkpoint one" in following


@pytest.mark.usefixtures("working_folder")
def test_a_run_links_to_the_run_that_made_its_data(
    config: ResolvedConfig, result: RunResult, tmp_path: Path, small_shards: Path
) -> None:
    """It is named beside the manifest, so that the fingerprint is the same whoever made the shards."""
    folder = Path(shutil.copytree(small_shards, tmp_path / "tokens"))
    maker = create_run("pipeline", "tokens")
    write_json(folder / TRACKING_FILE, maker.to_json_for(str(folder)))
    manifest = read_manifest(folder)
    assert manifest.fingerprint == read_manifest(small_shards).fingerprint
    key, _ = recorded(config.replace(data=str(folder)), result)
    page = f"#/experiments/{maker.experiment_id}/runs/{maker.run_id}?workflowType=machine_learning"
    assert note(key)[1] == f"Data: [tokens]({page})"


def test_an_unknown_run_is_not_named(tmp_path: Path, small_shards: Path) -> None:
    assert find_producing_run(small_shards) is None
    folder = Path(shutil.copytree(small_shards, tmp_path / "tokens"))
    for unknown in ("{damaged", json.dumps(RunRef("sqlite:////gone/mlflow.db", "3", "1").to_json_for(str(folder)))):
        (folder / TRACKING_FILE).write_text(unknown)
        assert find_producing_run(folder) is None


@pytest.mark.usefixtures("working_folder")
def test_a_search_links_to_the_run_that_trained_with_its_winner(place: StorageDir, tmp_path: Path) -> None:
    search, run = create_run("tune", "search"), create_run("train", "best")
    with Tracker(search) as tracker:
        tracker.set_description("**What:** the fastest way\n\n| a table |")
    place.write_json("search.json", {"mlflow_run": search.to_json_for(place.address)})
    with Tracker(run) as tracker:
        tracking.link_search(tracker, "best", str(place / "best.json"))
        tracking.link_search(tracker, "best", str(tmp_path / "config.json"))  # which no search has left
    what, link, rest_lines = note(search)
    assert (what, rest_lines) == ("**What:** the fastest way", "| a table |")
    assert f"[best](#/experiments/{run.experiment_id}/runs/{run.run_id}?" in link
    client = MlflowClient(run.store)
    assert client.get_run(search.run_id).data.tags["trained.run"] == run.run_id
    assert client.get_run(run.run_id).data.tags["search.run"] == search.run_id


@pytest.mark.usefixtures("working_folder")
def test_what_the_store_lacks_of_a_run_is_sent_by_the_next_command(
    config: ResolvedConfig, result: RunResult, tmp_path: Path
) -> None:
    """Of one that finished while the store was away, of one that was killed, of one whose folder is another's, and of
    one that was killed after it had finished and was continued."""
    homes = [RunFolder(tmp_path / name) for name in ("finished", "killed", "again", "continued")]
    keys = []
    for home in homes:
        home.path.mkdir()
        keys.append(create_run("train", home.path.name, run_dir=home.location.address, keep=home.save_run_ref))
        home.append_report(CYCLE)
        home.append_report(replace(CYCLE, step=6, step_losses=[2.5, 2.0, 1.5]))
    with Tracker(keys[0]) as tracker:
        tracking.log_cycle(tracker, to_json(CYCLE))
    client = MlflowClient(keys[0].store)
    for key, status in zip(keys, ("RUNNING", "KILLED", "KILLED", "RUNNING"), strict=True):
        client.set_tag(key.run_id, "fully_logged", "false")
        client.update_run(key.run_id, status)
    for home, steps in ((homes[0], 6), (homes[3], 3)):
        started(home, config, config)
        write_json(home.result, to_json(replace(result, predicted_memory=5 * 10**9, steps=steps)))
    homes[0].summary.write_text("**What:** a run")
    os.utime(homes[0].result, (2e9, 2e9))
    orphaned_runs.open_run_dirs.clear()  # as if their processes had ended
    homes[2].save_run_ref(create_run("train", "again"))  # in the folder that the first had
    tracking.complete_orphaned_runs(create_run("train", "next"))
    runs = [client.get_run(key.run_id) for key in keys]
    assert [run.info.status for run in runs] == ["FINISHED", "KILLED", "KILLED", "KILLED"]
    assert [run.data.metrics.get("loss/step") for run in runs] == [1.5, 1.5, None, 1.5]
    assert [m.step for m in client.get_metric_history(keys[0].run_id, "loss/step")] == [1, 2, 3, 4, 5, 6]
    assert runs[0].data.metrics["result/mfu"] == 0.4
    assert runs[0].data.tags["memory"] == "4.00 GB"
    assert runs[0].data.tags["mlflow.note.content"] == "**What:** a run"
    assert runs[0].info.end_time == 2_000_000_000_000
    assert runs[0].data.params["changed.micro_batch"] == "2", "although the store was away from the start"
    create_run("train", "last")
    assert incomplete_runs == []


def test_a_cycle_in_mlflow_has_each_steps_loss_at_its_step() -> None:
    *steps, (last, actual) = tracking.cycle_metrics(LOGGED)
    assert steps == [(10, {"loss/step": 5.0}), (11, {"loss/step": 4.0}), (12, {"loss/step": 3.0})]
    assert last == 12
    assert actual == {
        "loss/train": 4.0, "loss/val": 0.0, "loss/val_bits_per_byte": 1.5, "detail/loss/val_perplexity": 1.0,
        "throughput/tokens_per_second": 250.0,
        "progress/train_tokens": 4000, "detail/progress/books": 2, "detail/time/elapsed_seconds": 9.0,
        "detail/time/cycle_seconds": 4.0, "detail/time/train_seconds": 3.0, "detail/time/data_wait_seconds": 0.25,
        "detail/time/optimizer_seconds": 0.5, "optimizer/learning_rate": 1e-3, "optimizer/gradient_norm": 2.0,
    }  # fmt: skip
    for no_perplexity in (None, 1000.0):
        *_, (_, actual) = tracking.cycle_metrics(LOGGED | {"val_loss": no_perplexity})
        assert actual["detail/loss/val_perplexity"] is None


def curve(cycles: list[int]) -> list[int]:
    """The steps whose losses are in MLflow, of a run that was reported at the end of each of these ``cycles``."""
    shown: list[int] = []
    for first, last in pairwise([0, *cycles]):
        cycle = LOGGED | {"step": last, "step_losses": [float(step) for step in range(first + 1, last + 1)]}
        *steps, _ = tracking.cycle_metrics(cycle)
        assert all(values == {"loss/step": float(step)} for step, values in steps)
        shown += [step for step, _ in steps]
    return shown


def test_the_losses_of_a_long_run_are_thinned_the_same_however_it_was_reported() -> None:
    """Wherever its cycles end, or it was continued."""
    shown = curve([5000])
    assert shown[:1001] == [*range(1, 1000), 1000, 1002]
    assert shown[-2:] == [4996, 5000]
    assert curve([7, 1501, 1502, 3333, 5000]) == shown


def test_a_result_in_mlflow(config: ResolvedConfig, make_result: Callable[..., RunResult]) -> None:
    memory = Memory(2 * GB, 3 * GB, 4 * GB, "nvml", allocator_retries=5)
    result = make_result(
        memory=memory, mfu=0.4, matmul_utilization=0.5, flops_per_token=cast(ModelConfig, config.model).palm_flops,
        predicted_memory=5 * GB,
    )  # fmt: skip
    metrics = run_report(config.step, config.dataset, config.duration, result, HOME.location).metrics()
    formulas = {name: metrics.pop(name) for name in [*metrics] if "flops_per_token" in name}
    assert len(formulas) == 4
    causal = 0.4 * cast(ModelConfig, config.model).causal_flops / cast(ModelConfig, config.model).palm_flops
    assert metrics.pop("result/mfu_causal") == pytest.approx(causal)
    assert metrics == {
        "result/tokens_per_second": 1000.0, "result/tokens_per_second_low": 990.0,
        "result/tokens_per_second_high": 1020.0, "result/mfu": 0.4, "result/matmul_utilization": 0.5,
        "result/tflops_per_second": 0.002, "result/petaflop_days": 0.5, "result/val_loss": 3.5,
        "result/val_perplexity": 33.1,
        "result/val_bits_per_byte": 1.5, "memory/process_gb": 4.0, "memory/allocated_gb": 2.0,
        "memory/reserved_gb": 3.0, "memory/allocator_retries": 5, "memory/predicted_gb": 5.0,
        "memory/prediction_error": 0.25, "time/first_step_seconds": 1.5, "time/data_wait_fraction": 0.01,
        "time/optimizer_fraction": 0.09,
    }  # fmt: skip
    assert tracking.run_list_tags(result) == {
        "memory": "4.00 GB", "tokens/s": "1,000 (95% CI 990 to 1,020)",
    }  # fmt: skip
    continued = tracking.run_list_tags(replace(result, throughput=None))
    assert continued["tokens/s"] == "not measured", "as its page says, and not what an earlier part of the run was"


NO_METRIC = {
    "steps", "warmup_steps", "implausible_reason", "train_loss", "train_tokens", "val_tokens", "books_seen",
    "train_seconds", "paused_seconds", "flops_per_token", "first_loss", "unigram_loss", "capacity",
}  # fmt: skip
"""Numbers of a result that its cycles have as well, that another function records, or that are in result.json alone."""


def test_every_number_of_a_result_is_a_metric_of_its_run_in_the_unit_of_its_name(
    config: ResolvedConfig, distinct: Callable[..., Any]
) -> None:
    """Each by itself: a new one has to be added here, and one in the place of another shows."""
    result = distinct(RunResult, diagnosis=None, shortage=None, loss_prediction=None)
    speed, memory = result.throughput, result.memory
    numbers = vars(result) | vars(speed) | vars(memory)
    numbers = {name for name, value in numbers.items() if isinstance(value, int | float)} - NO_METRIC
    formulas = ("result/mfu_causal", "result/flops_per_token")
    metrics = run_report(config.step, config.dataset, config.duration, result, HOME.location).metrics()
    actual = {name: value for name, value in metrics.items() if not name.startswith(formulas)}
    same = ("tokens_per_second", "petaflop_days", "mfu", "hfu", "val_loss", "val_perplexity", "val_bits_per_byte",
            "val_bits_per_character", "val_windows")  # fmt: skip
    everything = vars(result) | vars(speed)
    assert actual == {f"result/{name}": everything[name] for name in same} | {
        "result/tokens_per_second_low": speed.low, "result/tokens_per_second_high": speed.high,
        "result/matmul_utilization": result.matmul_utilization,
        "result/tflops_per_second": result.flops_per_second / 1e12,
        "result/kilojoules_per_million_tokens": result.joules_per_million_tokens / 1e3,
        "memory/process_gb": memory.process / 1e9, "memory/allocated_gb": memory.allocated / 1e9,
        "memory/reserved_gb": memory.reserved / 1e9, "memory/allocator_retries": memory.allocator_retries,
        "memory/predicted_gb": result.predicted_memory / 1e9,
        "memory/prediction_error": result.predicted_memory / memory.process - 1,
        "time/first_step_seconds": result.first_step_seconds,
        "time/data_wait_fraction": result.data_wait_fraction, "time/optimizer_fraction": result.optimizer_fraction,
    }  # fmt: skip
    assert len(actual) == len(numbers) + len(["memory/prediction_error"]), "none is left out"
