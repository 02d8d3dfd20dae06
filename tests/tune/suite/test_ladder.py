"""Whole ladders in their short form, and the command's refusals; one is interrupted in tests/test_main_job.py."""

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from infra.device.hardware import cpu_info
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from infra.tracking.names import MAX_TOP_LEVEL_METRICS
from infra.tracking.store import store_uri
from pipeline.stream import EncodedBook, Stream, encoded_books
from train.config import TrainConfig, load_config
from train.estimate.memory import predict_peak
from train.loop.memory_limit import MemoryLimit
from train.model_config import ModelConfig, parse_model
from train.resolved import resolve
from tune import ladder
from tune.config import LadderConfig
from tune.suite import report
from tune.trial import run as trial

pytestmark = pytest.mark.usefixtures("working_folder", "in_this_process")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--suite", "lop"], "loop"), (["--steps", "3"], "--steps 3 must be at least 8"),
        (["--steps", "10", "--time-budget", "5m"], "--time-budget"), (["--data", "nowhere"], "pipeline.tokenize"),
        (["--compare", "nothing"], "no finished ladder"),
        (["--suite", "precision"], "Set --steps"), (["--seeds", "2", "--steps", "8", "--cycle", "8+0"], "--cycle"),
        (["--rungs", "streaming"], "--stream"), (["--stream", "no-books"], "no-books"), (["--seeds", "0"], "--seeds 0"),
        (["--search-result", "nothing.json"], "--search-result nothing.json"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    refused: Callable[..., str], small_shards: Path, flags: list[str], named: str
) -> None:
    data = [] if "--data" in flags else ["--data", str(small_shards)]
    assert named in refused(ladder.main, *data, *flags)


RUNGS = {
    "a100": ["tensor cores", "compile", "flash attention", "tied weights", "prefetched copies", "max-autotune"],
    "memory": ["accumulation", "accumulation, checkpointing", "fp16", "Adafactor", "8-bit AdamW"],
    "aa": ["again 1", "again 2"],
}
"""Of a suite that keeps what was changed, one that does not, and one that changes nothing."""
REFUSED = {"tensor cores", "max-autotune", "fp16"} | (set() if find_spec("torchao") else {"8-bit AdamW"})
"""The last by its worker."""


class Inline(Stream):
    """A stream whose books are encoded in this process and not ahead by Ray Data."""

    def read(self, epoch: int, partition: int = 0) -> Iterator[EncodedBook]:
        return (book for each in self.order_partitions(epoch)[partition:] for book in encoded_books(each, "train"))


@pytest.fixture
def eager() -> Iterator[None]:
    """Compiled code runs as it is; tests/train/test_switches.py is about compilation."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("suite", RUNGS)
def test_a_suite_runs_in_its_short_form(
    command: Callable[..., int], tmp_path: Path, small_shards: Path, capfd: pytest.CaptureFixture[str], eager: None,
    suite: str,
) -> None:  # fmt: skip
    """The real loop, store and statistics. tests/train/loop/test_golden.py trains every rung of every suite."""
    model = "tiny,layers=1,heads=2,width=48,context_length=32,vocab_size=257,padded_vocab_size=257"
    flags = ["--suite", suite, "--data", str(small_shards), "--model", model, "--device", "cpu", "--name", suite]
    flags += ["--compare", "study"]
    rungs = RUNGS[suite]
    if suite == "a100":
        Path("runs").mkdir()
        doctor = {"machine": socket.gethostname(), "device": "cpu", "matmul": {"fp32": 1e12}}
        write_json(Path("runs/doctor.json"), doctor)  # as the doctor saves it
    assert command(ladder.main, *flags, "--rungs", *rungs, "--steps", "8", "--cycle", "8+1") == 0
    printed = capfd.readouterr().out
    standing = json.loads((tmp_path / "runs" / suite / "rungs.json").read_text())
    base, *rows = standing["rows"]
    assert len(standing["controls"]) == 1 + sum(row["speed"] is not None for row in rows)
    assert "…" not in printed, "a number that is cut off says nothing"
    assert f"{standing['controls'][0]:,.0f} tokens/s" in printed
    twice = {"compile", "flash attention"}  # whose batch is larger than that of the rung before
    rungs = [name for rung in rungs for name in ([f"{rung}, same batch"] if rung in twice else []) + [rung]]
    assert [row["name"] for row in rows] == rungs
    refused = {row["name"]: row["reason"] for row in rows if row["speed"] is None}
    assert refused.keys() == REFUSED.intersection(rungs)
    assert all(f"{name}: skipped; {reason}" in printed for name, reason in refused.items())
    assert base["loss"] > 0
    for row in rows:
        if row["speed"] is not None:
            assert 0 < row["speed_low"] <= row["speed"] <= row["speed_high"]
            assert row["total"]["low"] < row["total"]["ratio"] < row["total"]["high"]
            assert row["loss"] > 0
            assert row["memory"] > 0
    labeled = {row["name"] for row in rows if row["changes_numerics"]}
    labels = {"compile", "flash attention", "tied weights", "Adafactor", "8-bit AdamW"}
    assert labeled == labels.intersection(rungs) - refused.keys()
    summary = (tmp_path / "runs" / suite / "summary.md").read_text()
    assert all(name in summary for name in rungs)
    for said in ("112,200 / ", r"25\.4[ |]+26\.9"):
        matches = [re.search(said, text) is not None for text in (printed, summary)]
        assert matches == 2 * [suite == "a100"], "the study's"
    assert ("BERT-large" in printed) is ("BERT-large" in summary) is (suite == "memory"), "the study's"
    assert (tmp_path / "runs" / suite / "study.png").exists() is (suite != "aa")
    assert ("matmul ceiling" in printed) is (suite == "a100"), "which is known by the doctor's measurement"
    client = MlflowClient(store_uri())
    (parent,) = client.search_runs(["1"], "tags.kind = 'ladder'")
    fastest = max((row for row in rows if row["speed"]), key=lambda row: row["speed"])
    assert {
        "result/baseline_tokens_per_second": base["speed"],
        "result/best_tokens_per_second": fastest["speed"],
        "result/speedup_over_baseline": fastest["total"]["ratio"],
    }.items() <= parent.data.metrics.items()
    if fastest["speed"] > base["speed"]:
        assert parent.data.metrics["result/best_tokens_per_second_low"] == fastest["speed_low"]
        assert parent.data.metrics["result/speedup_over_baseline_low"] == fastest["total"]["low"]
    assert len(parent.data.metrics) <= MAX_TOP_LEVEL_METRICS
    children = client.search_runs(["1"], "tags.stage = 'rung'")
    finished = {run.data.tags["rung"] for run in children if run.info.status == "FINISHED"}
    assert finished == {row["name"] for row in rows if row["speed"] is not None}
    assert all(run.info.status == "FINISHED" or run.data.tags["reason"] for run in children)
    best = load_config(f"runs/{suite}/best.json")
    assert (best.duration.steps, best.checkpoints.keep_checkpoints) == (
        None,
        TrainConfig().checkpoints.keep_checkpoints,
    ), "it is a run's, not a rung's"


def test_each_rung_gets_the_batch_that_fits_and_the_last_what_a_search_found(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, small_shards: Path
) -> None:
    limits(monkeypatch)
    text = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"
    config = TrainConfig.of(
        data=str(small_shards), model=parse_model(text), device="cpu", precision="fp32", attention="manual",
        micro_batch=64, global_batch=64, compile="off", loss="plain",
    )  # fmt: skip
    Path("best.json").write_text(json.dumps({"config": config.replace(micro_batch=2, global_batch=6).to_json()}))
    limit = -(-predict_peak(resolve(config, cpu_info()).step).total // 10**6)
    flags = ["--suite", "memory", "--rungs", "checkpointing", "--data", str(small_shards), "--model", text]
    flags += [
        "--fit-batch", "--memory-limit", f"{limit}MB", "--search-result", "best.json", "--device", "cpu", "--name",
        "fitted",
    ]  # fmt: skip
    assert command(ladder.main, *flags, "--steps", "8", "--cycle", "8+1") == 0
    base, *rows = json.loads(Path("runs/fitted/rungs.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["checkpointing, same batch", "checkpointing", "searched batch"]
    assert rows[0]["batch"] == base["batch"]
    assert not rows[0]["changes_numerics"]
    assert int(rows[1]["batch"]) > int(base["batch"]) > 8, "what saves memory makes room for more"
    assert rows[1]["changes_numerics"], "the global batch is the mathematics"
    assert rows[2]["batch"].endswith(" x 3")
    assert base["predicted_memory"] <= limit * 10**6


IMPOSE = MemoryLimit.apply


def limits(monkeypatch: pytest.MonkeyPatch, *sizes: float) -> None:
    """Impose limits of these sizes on the next trials, and none on those after them."""
    waiting = iter(sizes)
    monkeypatch.setattr(MemoryLimit, "apply", lambda _, device: IMPOSE(int(next(waiting, 10**12)), device))


def test_a_rung_over_the_limit_has_failed(
    command: Callable[..., int], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], small_shards: Path, small_model: ModelConfig,
) -> None:  # fmt: skip
    limits(monkeypatch, 1e12, 1e6)  # of the baseline and the rung
    flags = ["--suite", "memory", "--rungs", "checkpointing", "--data", str(small_shards), "--device", "cpu"]
    flags += ["--model", small_model.text, "--steps", "8", "--cycle", "8+0", "--memory-limit", "4GB"]
    assert command(ladder.main, *flags, "--rungs", "checkpointing", "fp16", "chunked loss", "--name", "first") == 0
    assert "checkpointing: skipped; over_limit: the process used" in capfd.readouterr().out
    _, row, _, other = json.loads(Path("runs/first/rungs.json").read_text())["rows"]
    assert row["speed"] is None
    assert row["reason"].startswith("over_limit: the process used")
    assert other["speed"]
    limits(monkeypatch, 1e6)
    assert re.search("The baseline .*over_limit: .*--fit-batch", refused(ladder.main, *flags, "--name", "second"))


def test_a_rung_streams_books_against_shards(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    make_shards: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    """The real loop on real books. tests/train/data/test_stream.py has a stream through Ray."""
    data = make_shards(tmp_path / "tokens")
    (tmp_path / "books").mkdir()
    for number in range(8):
        text = "".join(f"It was day {day} of year {number}, and the {day}th man said so.\n" for day in range(60))
        (tmp_path / "books" / f"{number}.txt").write_text(text)
    monkeypatch.setattr("train.data.stream.Stream", Inline)
    model = "tiny,layers=1,heads=2,width=32,context_length=32"
    flags = ["--suite", "loader", "--data", str(data), "--model", model, "--device", "cpu", "--name", "streamed"]
    flags += ["--rungs", "1 thread", "streaming", "--stream", "books", "--steps", "8", "--cycle", "8+1"]
    assert command(ladder.main, *flags) == 0
    printed = capfd.readouterr().out
    assert "streaming*" in printed, "it sees other windows"
    base, thread, streaming = json.loads(Path("runs/streamed/rungs.json").read_text())["rows"]
    assert (thread["name"], streaming["name"]) == ("1 thread", "streaming")
    assert streaming["speed"] > 0
    stored_json = json.loads(Path("runs/streamed/ladder.json").read_text())["config"]
    assert stored_json["stream"] == [str(tmp_path / "books")]
    assert base["loss"] != streaming["loss"]


def test_only_a_fitted_ladder_has_a_memory_limit_by_default() -> None:
    assert LadderConfig(fit_batch=True).with_ends().memory_limit == 40 * 10**9
    assert LadderConfig().with_ends().memory_limit is None


def test_a_ladder_of_ones_own_that_was_killed_leaves_no_run_behind_that_seems_to_run(
    command: Callable[..., int], small_shards: Path, small_model: ModelConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its names have brackets, which are printed as they are."""
    Path("own.py").write_text(
        "from tune.suite.suites import Rung, Suite\n"
        "SUITE = Suite('own', 'of [/b]', {}, (Rung('[fast] rate', {'learning_rate': 1e-3}),))\n"
    )
    flags = ["--suite", "own.py", "--data", str(small_shards), "--device", "cpu", "--steps", "8", "--cycle", "8+0"]
    assert command(ladder.main, *flags, "--model", small_model.text, "--name", "[my] own") == 0
    printed = capfd.readouterr().out
    assert all(name in printed for name in ("of [/b]", "[fast] rate", "runs/[my] own"))
    client = MlflowClient(store_uri())
    (rung,) = client.search_runs(["1"], "tags.stage = 'rung'")
    client.update_run(rung.info.run_id, status="RUNNING")
    client.set_tag(rung.info.run_id, "fully_logged", "false")
    (row,) = Path("runs/[my] own/trials").glob("01-fast-rate-*.json")
    row.unlink()
    assert command(ladder.main, "--resume", "[my] own") == 0
    runs = client.search_runs(["1"])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4, "the ladder, two controls, and the rung once"
    assert row.exists()


def test_an_interrupted_ladder_says_how_to_continue_it(
    command: Callable[..., int], in_this_process: Any, small_shards: Path, small_model: ModelConfig,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run_trial = in_this_process.run_trial

    def interrupted(request: trial.TrialRequest) -> object:
        if request.proposal.stage == "rung":
            raise KeyboardInterrupt
        return run_trial(request)

    in_this_process.run_trial = interrupted
    flags = ["--suite", "memory", "--rungs", "checkpointing", "--data", str(small_shards), "--device", "cpu"]
    flags += ["--model", small_model.text, "--steps", "8", "--cycle", "8+0", "--name", "stopped"]
    assert command(ladder.main, *flags) == 130
    assert "resume with: python -m tune.ladder --resume stopped\n" in capfd.readouterr().out
    assert [path.stem[:10] for path in Path("runs/stopped/trials").glob("*")] == ["control-00"]
    mlflow_runs = MlflowClient(store_uri()).search_runs(["1"])
    ended = {run.data.tags.get("stage", "ladder"): run.info.status for run in mlflow_runs}
    assert ended == {"baseline": "FINISHED", "rung": "KILLED", "ladder": "KILLED"}
    in_this_process.run_trial = run_trial
    assert command(ladder.main, "--resume", "stopped") == 0
    assert {run.info.status for run in MlflowClient(store_uri()).search_runs(["1"])} == {"FINISHED"}


def test_time_ends_a_rung_early_once_its_speed_is_known(
    command: Callable[..., int], small_shards: Path, small_model: ModelConfig
) -> None:
    assert LadderConfig().with_ends().speed_tolerance == 0.005
    assert LadderConfig(time_budget=20.0, speed_tolerance=0).with_ends().speed_tolerance == 0
    assert LadderConfig(steps=100).with_ends().speed_tolerance is None, (
        "the rungs' losses are compared at the same step"
    )
    flags = ["--suite", "memory", "--rungs", "checkpointing", "--data", str(small_shards), "--device", "cpu"]
    flags += ["--model", small_model.text, "--time-budget", "200s", "--speed-tolerance", "0.9", "--cycle", "20+1"]
    assert command(ladder.main, *flags, "--name", "early") == 0
    ends = [len(json.loads(path.read_text())["step_seconds"]) for path in Path("runs/early/trials").glob("*.json")]
    assert len(ends) == 3, "the baseline, the rung and the control again"
    assert all(end % 20 == 1 and end < 2000 for end in ends), "seen behind a cycle's report, and not after 200 seconds"


def test_a_ladder_whose_baseline_is_refused_leaves_its_name_for_the_corrected_one(
    command: Callable[..., int], refused: Callable[..., str], capfd: pytest.CaptureFixture[str], small_shards: Path,
    small_model: ModelConfig,
) -> None:  # fmt: skip
    shard = shutil.copytree(small_shards, Path("tokens")) / "train/000000-000.arrow"
    flags = ["--suite", "memory", "--rungs", "checkpointing", "--data", "tokens", "--device", "cpu"]
    flags += ["--model", small_model.text, "--steps", "8", "--cycle", "8+0"]
    assert "no micro-batch fits" in refused(
        ladder.main, *flags, "--name", "first", "--fit-batch", "--memory-limit", "1MB"
    )
    shard.rename("taken away")
    assert "000000-000.arrow" in refused(ladder.main, *flags, "--name", "first")
    Path("taken away").rename(shard)
    assert "RUNNING" not in {run.info.status for run in MlflowClient(store_uri()).search_runs(["1"])}
    assert command(ladder.main, *flags, "--name", "first") == 0

    rows = {path.name[:10]: path for path in Path("runs/first/trials").iterdir()}
    rows["01-checkpo"].unlink()
    shard.unlink()
    assert command(ladder.main, "--resume", "first") == 0, "a rung that failed is a row with its reason"
    assert "checkpointing: skipped" in capfd.readouterr().out
    assert rows["control-00"].exists(), "an earlier command's work stays"


def test_a_ladder_in_object_storage_is_continued_from_what_was_sent(
    command: Callable[..., int], set_scratch: Callable[[Path], None], small_shards: Path, small_model: ModelConfig,
    tmp_path: Path, bucket: str, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    set_scratch(tmp_path)
    out = f"s3://places/{tmp_path.name}{bucket}"
    flags = ["--suite", "memory", "--rungs", "checkpointing", "--data", str(small_shards), "--device", "cpu"]
    flags += ["--model", small_model.text, "--steps", "8", "--cycle", "8+0", "--name", "one", "--out", out]
    assert command(ladder.main, *flags) == 0
    (folder,) = tmp_path.glob("throughline-*")
    shutil.rmtree(folder)
    directory = StorageDir.of(out) / "one"
    directory.remove(["rungs.json"])
    capfd.readouterr()
    assert command(ladder.main, "--resume", "one", "--out", out) == 0
    assert "3 finished trials" in capfd.readouterr().out
    assert {"best.json", "ladder.json", "loss.png", "speed.png", "rungs.json", "summary.md"} <= set(
        directory.list_files()
    )


def test_a_damaged_ladder_to_compare_with_is_named(refused: Callable[..., str]) -> None:
    Path("runs/one").mkdir(parents=True)
    for text in ("{", "{}", json.dumps({"device": "cpu", "rows": [{"name": "baseline", "speed": "fast"}]})):
        Path("runs/one/rungs.json").write_text(text)
        assert "rungs.json is corrupt" in refused(ladder.main, "--compare", "one")


def test_two_ladders_are_compared_wherever_they_are(tmp_path: Path) -> None:
    record = b'{"device": "cpu", "commit": "", "rows": [{"name": "baseline", "speed": 5}]}'
    for folder, content in (("one", record), ("others/one", record.replace(b"5", b"6"))):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rungs.json").write_bytes(content)
    other_out = f"{tmp_path}/others"
    for text, out, speed in (("one", str(tmp_path), 5.0), (f"{tmp_path}/one", "runs", 5.0), ("one", other_out, 6.0)):
        loaded = report.load_reference(text, out)
        assert isinstance(loaded, dict)
        assert loaded["rows"] == [{"name": "baseline", "speed": speed}]
    with pytest.raises(UserError, match="--compare two: no finished ladder"):
        report.load_reference("two", "runs")


def test_a_dry_run_says_what_would_run(
    command: Callable[..., int], capfd: pytest.CaptureFixture[str], small_shards: Path
) -> None:
    flags = ["--suite", "a100", "--rungs", "tensor cores", "flash attention", "--data", str(small_shards)]
    assert command(ladder.main, *flags, "--device", "cpu", "--dry-run", "--compare", "study") == 0
    printed = capfd.readouterr().out
    assert all(expected in printed for expected in ("TF32", "flash attention", "37.0"))
    assert not Path("runs").exists()


def test_two_ladders_stand_side_by_side_with_their_commits() -> None:
    def ladder(name: str, commit: str, **speeds: float | None) -> dict[str, object]:
        rows = [{"name": rung, "speed": speed} for rung, speed in speeds.items()]
        return {"name": name, "device": "cpu", "commit": commit, "rows": rows}

    earlier_ladder = ladder("old", "0123456789abcdef", baseline=100.0, compile=None)
    now = ladder("new", "", baseline=150.0, compile=300.0, flash=400.0)
    table = report.comparison(earlier_ladder, now)
    assert table.columns == ("rung", "tokens/s: old (cpu, 012345678)", "tokens/s: new (cpu)", "speedup")
    assert table.rows == [
        ("baseline", "100", "150", "x1.50"),
        ("compile", "-", "300", "-"),
        ("flash", "-", "400", "-"),
    ]
