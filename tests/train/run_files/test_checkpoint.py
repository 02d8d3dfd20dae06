"""Checkpoints: written whole or not at all, the newest intact one is found, and a diverged state is never kept."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainers import make_trainer

from infra.errors import UserError
from pipeline.shards import checksum
from train.config import Cycle, ResolvedConfig
from train.loop.cycle import divergence_reason
from train.model_config import ModelConfig
from train.result import CycleReport
from train.run_files.checkpoint import Checkpoints, Snapshot, take_snapshot, write
from train.run_files.lookup import find_run
from train.run_files.progress import Progress, check_not_finished, checkpoints_in, describe_skipped, find_damage, newest
from train.run_files.run_folder import RunFolder, new_directory


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=30, cycle=Cycle(10, 1),
        precision="fp32", device="cpu", learning_rate=3e-3, warmup_steps=5, checkpoint_every=7,
        compile="off", loss="plain",
    )  # fmt: skip


def steps_kept(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(folder)]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_are_kept(config: ResolvedConfig, tmp_path: Path, keep: int) -> None:
    leftover = tmp_path / ".partial-1-step-00000003"
    leftover.mkdir()
    result = make_trainer(config.replace(keep_checkpoints=keep), checkpoints=tmp_path).run()
    assert steps_kept(tmp_path) == [14, 21, 28, 30][-keep:]
    assert result.checkpoint == str(tmp_path / "step-00000030")
    assert not leftover.exists()


def test_none_are_kept_when_none_are_wanted(config: ResolvedConfig, tmp_path: Path) -> None:
    result = make_trainer(config.replace(keep_checkpoints=0), checkpoints=tmp_path / "none").run()
    assert result.checkpoint is None
    assert not (tmp_path / "none").exists()


def test_every_checkpoint_continues_exactly(config: ResolvedConfig, tmp_path: Path) -> None:
    straight: list[CycleReport] = []
    make_trainer(config.replace(keep_checkpoints=9), checkpoints=tmp_path, on_cycle=straight.append).run()
    for step in (7, 14, 21, 28):
        resumed: list[CycleReport] = []
        make_trainer(config, on_cycle=resumed.append, resume=tmp_path / f"step-{step:08d}").run()
        expected = [(r.step, r.step_losses, r.val_loss, r.train_loss) for r in straight if r.step > step]
        assert [(r.step, r.step_losses, r.val_loss, r.train_loss) for r in resumed] == expected


def test_a_damaged_checkpoint_is_skipped(config: ResolvedConfig, tmp_path: Path) -> None:
    make_trainer(config, checkpoints=tmp_path).run()
    assert steps_kept(tmp_path) == [28, 30]
    weights = tmp_path / "step-00000030" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert newest(tmp_path) == tmp_path / "step-00000028"
    with pytest.raises(UserError, match=r"step-00000030 is damaged: model.safetensors does not match its checksum"):
        make_trainer(config.replace(steps=40), resume=tmp_path / "step-00000030")
    (tmp_path / "step-00000028" / "progress.json").unlink()
    assert newest(tmp_path) is None


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(config.replace(steps=60), checkpoints=tmp_path)
    step = trainer.optimizer.step

    def poisoned(*arguments: object) -> None:
        step()
        if trainer.state.step == 16:
            with torch.no_grad():
                trainer.model.norm.weight[0] = float("nan")

    monkeypatch.setattr(trainer.optimizer, "step", poisoned)
    result = trainer.run()
    assert result.outcome == "diverged"
    assert result.reason == "the loss is nan at step 18"
    assert steps_kept(tmp_path)[-1] == 14
    assert all(value.isfinite().all() for value in load_file(tmp_path / "step-00000014" / "model.safetensors").values())


def test_a_spike_is_trouble() -> None:
    assert divergence_reason([3.0, 3.5, 5.9], 3.0, 3.0, 100) is None
    reason = divergence_reason([3.0, 6.1], 3.0, 3.0, 100) or ""
    assert all(number in reason for number in ("3.000", "6.100", "step 102", "--max-loss-spike 3"))
    assert divergence_reason([9.0], 3.0, 0, 100) is None
    assert divergence_reason([9.0], None, 3.0, 100) is None
    assert "inf at step 102" in (divergence_reason([3.0, math.inf], None, 0, 100) or ""), (
        "also where no spike is looked for"
    )


def test_a_full_disk_is_said_in_one_sentence(config: ResolvedConfig, tmp_path: Path) -> None:
    trainer = make_trainer(config, checkpoints=tmp_path)
    assert trainer.checkpoints is not None
    trainer.checkpoints.folder = tmp_path / "step-file"  # a folder that is not there fails like a disk that is full
    with pytest.raises(UserError, match=r"Cannot write .* --resume"):
        trainer.run()


def test_another_run_is_refused(config: ResolvedConfig, tmp_path: Path) -> None:
    saved = make_trainer(config, checkpoints=tmp_path).run().checkpoint
    assert saved
    for change, named in [
        ({"seed": 1}, "--seed 0, not 1"),
        ({"global_batch": 8}, "--global-batch 4, not 8"),
        ({"mask_books": True}, "--mask-books False, not True"),
        ({"optimizer": "adamw"}, "--optimizer adamw-fused, not adamw"),
        ({"model": dataclasses.replace(config.model, layers=3)}, "layers=2, not 3"),
    ]:
        with pytest.raises(UserError, match=named):
            make_trainer(config.replace(**{"steps": 40} | change), resume=Path(saved))
    killed_at_its_end = make_trainer(config.replace(steps=30), checkpoints=tmp_path, resume=Path(saved)).run()
    assert (killed_at_its_end.outcome, killed_at_its_end.steps) == ("finished", 30)
    assert killed_at_its_end.checkpoint == saved
    fine = config.replace(steps=40, micro_batch=1, loss_chunks=2, checkpointing="full")
    assert make_trainer(fine, resume=Path(saved)).run().steps == 40


def test_a_checkpoint_behind_a_damaged_one_is_kept(config: ResolvedConfig, tmp_path: Path) -> None:
    config = config.replace(checkpoint_every=5, keep_checkpoints=2, steps=10)
    make_trainer(config, checkpoints=tmp_path).run()
    older, damaged = checkpoints_in(tmp_path)
    (damaged / "model.safetensors").write_bytes(b"")
    assert newest(tmp_path) == older
    again = config.replace(keep_checkpoints=1, checkpoint_every=2)
    result = make_trainer(again, checkpoints=tmp_path, resume=older, should_stop=lambda: True).run()
    assert result.outcome == "interrupted"
    assert result.checkpoint == str(newest(tmp_path))
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000006"]


def test_a_run_without_a_whole_checkpoint_cannot_be_continued(config: ResolvedConfig, tmp_path: Path) -> None:
    make_trainer(config.replace(steps=7), checkpoints=tmp_path / "one" / "checkpoints").run()
    (saved,) = checkpoints_in(tmp_path / "one" / "checkpoints")
    (saved / "model.safetensors").write_bytes(b"")
    (tmp_path / "one" / "config.json").touch()
    for text in ("one", str(saved)):
        with pytest.raises(UserError, match=r"has no intact checkpoint.*--name"):
            find_run(text, tmp_path)


def test_a_resumed_run_decays_as_it_is_told_now(config: ResolvedConfig, tmp_path: Path) -> None:
    saved = make_trainer(config, checkpoints=tmp_path).run().checkpoint
    assert saved
    changed_config = config.replace(steps=40, weight_decay=0.5, beta2=0.999)
    groups = make_trainer(changed_config, resume=Path(saved)).optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
    assert {group["betas"] for group in groups} == {(0.9, 0.999)}


@pytest.fixture
def taken(config: ResolvedConfig) -> tuple[Snapshot, Progress]:
    """A state of two steps, two of whose losses are not yet reported, and its place."""
    trainer = make_trainer(config.replace(steps=2))
    trainer.run()
    state = take_snapshot(trainer.model, trainer.optimizer, trainer.scaler, torch.tensor([5.0, 6.0]))
    progress = Progress(
        2, 8, 0, None, 0, 1.0, data_fingerprint="fingerprint", tokenizer_sha256="vocab_size", config=config.to_json(),
    )  # fmt: skip
    return state, progress


@pytest.mark.parametrize(
    ("end", "longer", "expected_text"),
    [
        ({"steps": 20}, {"steps": 21}, "step 20 of 20"), ({"tokens": 2687}, {"tokens": 21 * 128}, "step 20 of 20"),
        ({"time_budget": 60.0}, {"time_budget": 60.5}, "--time-budget"), ({}, {"steps": 21}, "end of its epoch"),
    ],
)  # fmt: skip
def test_a_finished_run_continues_only_for_longer(
    config: ResolvedConfig, end: dict[str, float], longer: dict[str, float], expected_text: str
) -> None:
    progress = Progress(20, 80, 20, None, 0, 60.0, data_fingerprint="", tokenizer_sha256="", config={})
    endless = config.replace(steps=None)
    ended, longer_config = endless.replace(**end), endless.replace(**longer)
    with pytest.raises(UserError, match=expected_text):
        check_not_finished("one", progress, ended.duration, ended.total_steps)
    check_not_finished("one", progress, longer_config.duration, longer_config.total_steps)


def test_a_run_that_left_time_for_its_end_has_used_its_budget(config: ResolvedConfig) -> None:
    """It trained for 50 of 60 s; the rest was its last validation and checkpoint."""
    progress = Progress(
        20, 80, 20, None, 0, 50.0, data_fingerprint="", tokenizer_sha256="", config={"time_budget": 60.0}
    )
    with pytest.raises(UserError, match="--time-budget"):
        check_not_finished("one", progress, config.replace(steps=None, time_budget=60.0).duration, None)
    check_not_finished("one", progress, config.replace(steps=None, time_budget=61.0).duration, None)


@pytest.mark.parametrize("wrong", ["", "weights", "losses"])
def test_an_unsound_state_is_not_written(tmp_path: Path, taken: tuple[Snapshot, Progress], wrong: str) -> None:
    """The last good one stays: infinite weights whose loss is not yet known, or a loss that is a spike."""
    state, progress = taken
    good = Checkpoints(tmp_path, 1)
    good.save(state, dataclasses.replace(progress, step=1), lambda losses: losses == [5.0, 6.0])
    first = good.wait()
    if wrong == "weights":
        state.weights["norm.weight"][3] = float("inf")
    good.save(state, progress, lambda losses: wrong != "losses")
    assert good.wait() == (tmp_path / "step-00000002" if not wrong else first)
    assert steps_kept(tmp_path) == [1 if wrong else 2]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, taken: tuple[Snapshot, Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        order.append(os.fstat(descriptor).st_ino)
        if order[-1] != tmp_path.stat().st_ino:
            assert steps_kept(tmp_path) == []
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    made = write(tmp_path, *taken)
    files = {path.name: path.stat().st_ino for path in made.iterdir()}
    assert set(files) == {"model.safetensors", "state.pt", "progress.json"}
    assert set(files.values()) <= set(order)
    assert order.index(files["progress.json"]) > max(map(order.index, (files["model.safetensors"], files["state.pt"])))
    assert order[-1] == tmp_path.stat().st_ino, "the folder's own entry last"


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o077, 0o700, 0o600), (0o022, 0o755, 0o644)])
def test_the_umask_decides_who_can_read_a_checkpoint(
    umask: int, folder: int, file: int, tmp_path: Path, taken: tuple[Snapshot, Progress]
) -> None:
    umask_before = os.umask(umask)
    try:
        made = write(tmp_path, *taken)
    finally:
        os.umask(umask_before)
    assert made.stat().st_mode & 0o777 == folder
    assert {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()} == dict.fromkeys(
        ("model.safetensors", "state.pt", "progress.json"), file
    )


def test_weights_that_read_back_otherwise_are_refused_and_removed(
    tmp_path: Path, taken: tuple[Snapshot, Progress]
) -> None:
    """As from a disk that loses a bit."""

    class Losing(dict[str, torch.Tensor]):
        """Weights that are written with other values than they are compared with."""

        def __getitem__(self, name: str) -> torch.Tensor:
            return super().__getitem__(name) + (name == "norm.weight")

    state, progress = taken
    checkpoints = Checkpoints(tmp_path, 2)
    losing = dataclasses.replace(state, weights=Losing(state.weights))
    checkpoints.save(losing, progress, lambda losses: True)
    with pytest.raises(UserError, match="differs from the written weights"):
        checkpoints.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_of_its_moment(config: ResolvedConfig) -> None:
    """It is written while training continues with the same tensors."""
    trainer = make_trainer(config.replace(steps=2))
    trainer.run()
    taken = take_snapshot(trainer.model, trainer.optimizer, trainer.scaler, torch.tensor([5.0]))
    weight = taken.weights["norm.weight"].clone()
    moment = taken.state["optimizer"]["state"][0]["exp_avg"].clone()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1)
        for values in trainer.optimizer.state.values():
            values["exp_avg"].add_(1)
    assert torch.equal(taken.weights["norm.weight"], weight)
    assert torch.equal(taken.state["optimizer"]["state"][0]["exp_avg"], moment)


def test_only_what_is_newer_than_the_checkpoint_in_use_is_said_to_be_skipped(
    tmp_path: Path, taken: tuple[Snapshot, Progress]
) -> None:
    state, progress = taken
    first, second, third = (write(tmp_path, state, dataclasses.replace(progress, step=step)) for step in (1, 2, 3))
    for damaged, file in ((first, "model.safetensors"), (third, "state.pt")):
        (damaged / file).unlink()
        assert find_damage(damaged) == f"{file} is missing"
    assert newest(tmp_path) == second
    (text,) = describe_skipped(second)
    assert text.startswith(f"{third} is damaged: state.pt is missing")


def test_a_file_that_changes_after_it_was_found_intact_is_damaged(
    tmp_path: Path, taken: tuple[Snapshot, Progress]
) -> None:
    """Also in its place and of its size: checksums are remembered only as long as a file's time stays."""
    weights = write(tmp_path, *taken) / "model.safetensors"
    assert find_damage(weights.parent) is None
    stat_before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(weights, ns=(stat_before.st_atime_ns, stat_before.st_mtime_ns + 1_000_000))
    assert find_damage(weights.parent) == "model.safetensors does not match its checksum"


def test_a_checkpoint_that_names_a_file_outside_is_damaged(tmp_path: Path, taken: tuple[Snapshot, Progress]) -> None:
    (tmp_path / "outside").write_text("text")
    progress = write(tmp_path, *taken) / "progress.json"
    values = json.loads(progress.read_text())
    for file in ("../outside", str(tmp_path / "outside")):
        progress.write_text(json.dumps(values | {"files": {file: checksum(tmp_path / "outside")}}))
        assert find_damage(progress.parent) == f"progress.json refers to '{file}', which is outside the checkpoint"


def test_the_loss_scale_continues(config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16's, which a config for the CPU refuses; the scaler itself works there. Here it doubles every third step."""
    made = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: made(kind, init_scale=8.0, growth_interval=3))
    trainer = make_trainer(config.replace(steps=7), checkpoints=tmp_path)
    saved = trainer.run().checkpoint
    assert saved
    assert trainer.scaler.state_dict()["scale"] == 32.0
    resumed = make_trainer(config, resume=Path(saved)).scaler
    assert resumed.state_dict() == trainer.scaler.state_dict()


def test_one_command_drives_a_run(tmp_path: Path) -> None:
    home = RunFolder(tmp_path)
    with home.command_lock(), pytest.raises(UserError, match="is training in"), home.command_lock():
        pass
    with home.command_lock():
        pass


@pytest.mark.parametrize("left", ["config.json", "cycles.jsonl", "result.json", "checkpoints/step-00000007"])
def test_a_new_run_that_fails_leaves_its_folder_only_where_it_trained(tmp_path: Path, left: str) -> None:
    home = RunFolder(tmp_path / "one")

    def fail() -> None:
        with home.create():
            home.checkpoints.mkdir()
            (home.path / left).touch()
            raise UserError("no GPU")

    with pytest.raises(UserError, match="no GPU"):
        fail()
    assert home.path.exists() is (left != "config.json")


def test_what_cannot_be_a_folders_name_is_refused(tmp_path: Path) -> None:
    for name in ("", ".", "..", "a/b", "x" * 300, "é" * 150):
        with pytest.raises(UserError, match=r"--name .* is not a valid folder name"):
            new_directory(tmp_path, name)
