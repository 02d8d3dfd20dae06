"""The command itself: equal bytes with and without Ray, after any kill; one sentence for a mistake."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from infra.cli.command import run
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.config import TokenizeConfig
from pipeline.job import processes
from pipeline.shards import TRACKING_FILE, TokenShards, find_producing_run, read_manifest
from pipeline.tokenize import main

ROOT = Path(__file__).parent.parent.parent


def contents(folder: Path) -> dict[str, str]:
    """Every file of a data set and the hash of its bytes, but for the name of the run that made it."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in (StorageDir.LOCK_FILE, TRACKING_FILE)
    )
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def books(tmp_path: Path, write_books: Callable[..., Path]) -> Path:
    """Forty books, of which one is there twice and one is empty: about 3 MB in three partitions."""
    folder = write_books(tmp_path / "books", 40, words=12_000)
    (folder / "copy.txt").write_bytes((folder / "book 0003.txt").read_bytes())
    (folder / "empty.txt").write_bytes(b"")
    return folder


@pytest.fixture
def make(books: Path, store: str, tmp_path: Path) -> Callable[..., Path]:
    """Run the command in this process; returns the folder of shards."""

    def run(name: str, **settings) -> Path:
        config = {"sources": (str(books),), "shard_size": 1_000_000, "tracking_uri": store}
        main(TokenizeConfig(out=str(tmp_path / name), **config | settings))
        return tmp_path / name

    return run


def test_ray_and_processes_without_it_make_the_same_bytes(
    make: Callable[..., Path], store: str, joined: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = make("alone")
    one, two = make("one", workers=1, address=joined), make("two", workers=2, address=joined)
    assert re.findall(r"local processes|Ray Data", capsys.readouterr().out) == ["local processes", *["Ray Data"] * 2]
    assert contents(alone) == contents(one) == contents(two)
    manifest = read_manifest(one)
    assert manifest.report["books_dropped"] == {"duplicate": 1, "empty": 1}
    assert manifest.report["books_read"] == 42
    assert len(manifest.shards) > 3
    opened = TokenShards(one)
    total = sum(len(shard.tokens) for split in ("train", "val") for shard in opened.open(split))
    assert total == manifest.report["tokens"]
    reasons = [json.loads(line)["reason"] for line in (one / "quarantine.jsonl").read_text().splitlines()]
    assert reasons == ["duplicate", "empty"]
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("pipeline")
    assert experiment
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert runs[0].info.status == "FINISHED"
    assert runs[0].data.metrics["books/kept"] == 40
    assert "throughput/tokens_per_second" in runs[0].data.metrics
    newest = [find_producing_run(folder) for folder in (two, one)]
    assert [key and key.run_id for key in newest] == [run.info.run_id for run in runs[:2]], (
        "other tests share the store"
    )
    assert "slowest" in runs[0].data.tags["mlflow.note.content"].lower()
    assert [file.path for file in client.list_artifacts(runs[0].info.run_id)] == [
        "config.json", "manifest.json", "quarantine.jsonl",
    ]  # fmt: skip


def test_a_finished_folder_is_untouched_and_a_missing_shard_is_made_again(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("tokens")
    before = contents(folder)
    make("tokens")
    assert "nothing to do" in capsys.readouterr().out
    (folder / "train" / "000001-000.arrow").unlink()
    run_partitions = processes.run_partitions
    with monkeypatch.context() as patch:  # workers on another machine, whose --out is another disk
        patch.setattr(
            processes,
            "run_partitions",
            lambda todo, _, *rest, **how: run_partitions(todo, StorageDir.of(tmp_path), *rest, **how),
        )
        with pytest.raises(UserError, match=r"2 of 3 partitions .*partitions/000001\.json.* --out that all workers"):
            make("tokens")
    undone = {"train/000001-000.arrow", "partitions/000001.json", "partitions/000002.json"}  # the last held a duplicate
    assert undone <= contents(tmp_path).keys()
    assert contents(folder).keys() == before.keys() - undone - {"manifest.json"}
    make("tokens")
    assert contents(folder) == before


def test_an_unusable_store_is_refused_before_anything_is_replaced(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make("tokens")
    before = contents(folder)
    with pytest.raises(UserError, match=r"sqlite:///\S+ is a folder"):
        make("tokens", overwrite=True, tracking_uri=f"sqlite:///{tmp_path}")
    assert contents(folder) == before


def test_the_reason_is_given_when_no_book_can_be_kept(make: Callable[..., Path], store: str, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"content": "a book"}\n')
    with pytest.raises(UserError, match=r"No book was kept .*lines\.jsonl#0: the field 'text'"):
        make("nothing", sources=(str(tmp_path / "lines.jsonl"),))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("pipeline")
    assert experiment
    (run, *_) = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert run.info.status == "FAILED"
    assert run.data.tags["reason"].startswith("No book was kept")


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_stopped_or_killed_command_is_continued_to_the_same_bytes(
    make: Callable[..., Path], books: Path, tmp_path: Path, store: str, request: pytest.FixtureRequest, on_ray: bool
) -> None:
    whole = contents(make("whole", encoder="tiktoken"))  # slow, so that it is not done before it is stopped
    out = tmp_path / "killed"
    begun = out / "partitions" / "settings.json"  # written anew when the work begins
    command = [
        sys.executable, "-m", "pipeline.tokenize", str(books), "--out", str(out), "--shard-size", "1MB",
        "--tracking-uri", store, "--encoder", "tiktoken",
        *(["--address", request.getfixturevalue("cluster")] if on_ray else []),
    ]  # fmt: skip
    for way, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        started = time.time()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not (begun.exists() and begun.stat().st_mtime >= started) and time.time() < started + 60:
            time.sleep(0.002)
        own = [] if on_ray else children(process, 2)
        process.send_signal(way)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == code
        assert "Traceback" not in said
        assert "SIGTERM" not in said, "Ray's words, before it aborts"
        assert way == signal.SIGKILL or "run the same command again to continue" in said
        assert not (out / "manifest.json").exists()
        assert psutil.wait_procs(own, timeout=10)[1] == [], "would write beside the next command"
        assert on_ray or way == signal.SIGKILL or not list(out.rglob(".partial-*"))
    make("killed", encoder="tiktoken")
    assert contents(out) == whole


def children(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """The first ``count`` processes that a command has started."""
    deadline = time.monotonic() + 30
    while len(found := psutil.Process(process.pid).children()) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def test_a_user_mistake_is_one_sentence_and_exit_code_two(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "holes.gpt2.tiktoken").write_text("IQ== 1\n")
    for arguments, named in (
        (("nowhere",), "nowhere"),
        (("sample", "--out", "file/tokens"), "file/tokens"),
        (("sample", "--tokenizer", "holes.gpt2.tiktoken"), "holes.gpt2.tiktoken"),
    ):
        assert named in refused(partial(run, main, TokenizeConfig, "pipeline.tokenize"), *arguments)
