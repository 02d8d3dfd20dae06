"""A run's folder: its log of cycles while the worker is killed and begins again further back, its key, its name."""

import json
import os
import resource
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from infra.tracking.run_ref import RunRef
from train.result import CycleReport
from train.run_files.lookup import find_checkpoint, find_run, format_resume_command
from train.run_files.progress import Progress
from train.run_files.run_folder import RunFolder, new_directory, new_run, resume_command


def report(step: int, loss: float = 3.0) -> CycleReport:
    """A cycle of ten steps that ended at ``step``."""
    return CycleReport(
        step=step, batches=step, train_loss=loss, val_loss=None, train_tokens=step, val_tokens=0, books_seen=1,
        cycle_seconds=1.0, train_seconds=1.0, data_wait_seconds=0.0, optimizer_seconds=0.1, elapsed=1.0,
        cycle_tokens=10, epoch_seconds=1.0, learning_rate=1e-3, gradient_norm=1.0, step_losses=[loss] * 10,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def steps(cycles: list[dict[str, Any]]) -> list[int]:
    return [cycle["step"] for cycle in cycles]


def test_rewinding_forgets_later_cycles_and_a_line_cut_short(home: RunFolder) -> None:
    home.truncate_after(0)  # without a log there is nothing to forget
    assert not home.cycles.exists()
    for step in (10, 20, 30):
        home.append_report(report(step))
    with home.cycles.open("a") as log:
        log.write('{"step": 3')
    assert steps(list(home.cycles_until(25))) == [10, 20]
    home.truncate_after(30)
    assert steps([json.loads(line) for line in home.cycles.read_text().splitlines()]) == [10, 20, 30]
    home.truncate_after(20)
    assert steps([json.loads(line) for line in home.cycles.read_text().splitlines()]) == [10, 20]


def test_only_a_finished_run_is_finished(home: RunFolder) -> None:
    assert not home.is_finished(10)
    for left in ('{"outcome": "diverged", "steps": 10}', '{"outcome": "interrupted", "steps": 10}', '{"outcome', "[]"):
        home.result.write_text(left)
        assert not home.is_finished(10)
    home.result.write_text('{"outcome": "finished", "steps": 10}')
    assert home.is_finished(10)
    assert not home.is_finished(20), "it was continued, and killed before it had another result"


def test_the_key_of_a_run_is_found_again(home: RunFolder) -> None:
    assert home.run_ref() is None
    key = RunRef("http://127.0.0.1:5000", "1", "abc")
    home.save_run_ref(key)
    assert home.run_ref() == replace(key, run_dir=str(home.path))


def test_a_cycle_is_on_the_disk_when_it_is_told(home: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        sync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", watched)
    home.append_report(report(10))
    assert synced == [(home.cycles.stat().st_ino, home.cycles.stat().st_size)]


def test_a_cycle_that_a_full_disk_does_not_take_is_one_sentence_and_the_ones_before_it_stay(home: RunFolder) -> None:
    home.append_report(report(10))
    old, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (home.cycles.stat().st_size + 100, hard_limit))
    try:
        with pytest.raises(UserError, match=r"cycles\.jsonl: File too large.*--resume"):
            home.append_report(report(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, hard_limit))
    assert steps(list(home.cycles_until(30))) == [10]


def checkpoint(run: Path, step: int) -> Path:
    """A checkpoint of a run, of which only the progress is looked at."""
    made = RunFolder(run).checkpoints / f"step-{step:08d}"
    made.mkdir(parents=True)
    progress = Progress(step, data_fingerprint="", tokenizer_sha256="", config={})
    write_json(made / "progress.json", asdict(progress))
    RunFolder(run).config.touch()
    return made


def test_a_run_continues_from_its_newest_checkpoint_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One before it can be asked, but to train on from there would leave those behind it to be mistaken for its own."""
    older, newer = (checkpoint(tmp_path / "one", step) for step in (10, 20))
    with pytest.raises(UserError, match=r"not the newest .* delete .* step-00000020"):
        find_run(str(older), tmp_path)
    for named in ("one", str(tmp_path / "one"), str(newer)):
        assert find_run(named, tmp_path)[0].path == (tmp_path / "one").resolve()
        assert find_checkpoint(named, tmp_path)[1].resolve() == newer.resolve()
    assert find_checkpoint(str(older), tmp_path)[1] == older
    newer.joinpath("progress.json").unlink()
    capfd.readouterr()
    assert find_checkpoint("one", tmp_path)[1].resolve() == older.resolve()
    assert capfd.readouterr().err.count("step-00000020 is damaged") == 1


def test_a_checkpoint_outside_of_its_run_can_be_used_but_not_continued(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path / "one", 10)
    for copy in (tmp_path / kept.name, tmp_path / "copy", kept.with_name("copy")):
        copytree(kept, copy)
        assert find_checkpoint(str(copy), tmp_path)[1] == copy
        with pytest.raises(UserError, match=r"outside its run folder.*runs/NAME/checkpoints"):
            find_run(str(copy), tmp_path)


def test_a_name_is_first_looked_for_among_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path("one"), Path("runs/one"), Path("two")):
        checkpoint(folder, 10)
    assert find_run("one", "runs")[0].path == (tmp_path / "runs/one").resolve()
    assert find_run("two", "runs")[0].path == (tmp_path / "two").resolve()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"one: Not a directory.*--out"), RunFolder(tmp_path / "file/one").create():
        pass
    with pytest.raises(UserError, match=r"already exists.*--name"), RunFolder(tmp_path).create():
        pass


def test_a_run_that_was_killed_before_its_first_checkpoint_is_not_to_be_resumed(tmp_path: Path) -> None:
    """Which would be refused."""
    run = new_run(str(tmp_path), "one")
    run.checkpoints.mkdir(parents=True)
    run.config.touch()
    with pytest.raises(UserError, match=r"one already exists. Use another --name\.$"):
        new_run(str(tmp_path), "one")
    checkpoint(run.path, 10)
    with pytest.raises(UserError, match=r"one already exists.*--resume one, .*--name"):
        new_run(str(tmp_path), "one")


def test_a_folder_that_a_command_only_began_may_be_taken(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "lock").touch()
    assert new_directory(tmp_path, "one", allowed_leftovers=["lock", "config.json"]) == StorageDir.of(folder)
    with pytest.raises(UserError, match="already exists"):
        new_directory(tmp_path, "one", allowed_leftovers=["config.json"])
    (folder / "config.json").touch()
    assert new_directory(tmp_path, "one", allowed_leftovers=["lock", "config.json"]) == StorageDir.of(folder)
    for leftovers in ([], ["lock"], ["config.json"]):
        with pytest.raises(UserError, match=r"already exists.*--resume one, .*--name"):
            new_directory(tmp_path, "one", allowed_leftovers=leftovers)


def test_a_run_elsewhere_is_continued_by_its_whole_path(tmp_path: Path) -> None:
    assert format_resume_command(StorageDir.of("runs/my run")) == "python -m train.run --resume 'my run'"
    assert (
        format_resume_command(StorageDir.of("s3://bucket/runs/one"))
        == "python -m train.run --resume s3://bucket/runs/one"
    )
    assert format_resume_command(StorageDir.of(tmp_path / "one")) == f"python -m train.run --resume {tmp_path / 'one'}"
    assert resume_command("tune.search", StorageDir.of("runs/one")) == "python -m tune.search --resume one"
    command_elsewhere = resume_command("tune.search", StorageDir.of(tmp_path / "one"))
    assert command_elsewhere == f"python -m tune.search --resume one --out {tmp_path}"
