"""A run's folder, ``runs/NAME``, on disk or in object storage: its contents.

The worker appends each cycle to ``cycles.jsonl``, which together with the newest checkpoint tells how far a run has got
after the driver or the worker was killed. A run in object storage has a working copy of its small files on the driver's
machine and its checkpoints, while they are made, in scratch on the worker's.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir
from infra.storage.files import atomic_file, lock, write_json
from infra.storage.workspace import Workspace
from infra.tracking.run_ref import RunRef
from train.result import CycleReport
from train.run_files.progress import PROGRESS, checkpoints_in, describe_skipped, find_damage, newest, read_progress
from train.run_files.uploads import (
    CHECKPOINTS,
    download_checkpoint,
    download_newest,
    download_progress,
    list_uploaded,
)

KEY, CONFIG, RESULT = "tracking.json", "config.json", "result.json"

HANDOVER_SECONDS = 60.0
"""How long to wait for an earlier worker that is being killed; Ray's workers outlive their driver by a few seconds."""


@dataclass(frozen=True)
class RunFolder(Workspace):
    """The files of one run."""

    @property
    def config(self) -> Path:
        """The run's settings, which ``--config`` and ``--resume`` read."""
        return self.path / CONFIG

    @property
    def start(self) -> Path:
        """What the last start or resume of the run decided: :class:`train.reporting.tracking.RunStart`."""
        return self.path / "start.json"

    @property
    def result(self) -> Path:
        return self.path / RESULT

    @property
    def summary(self) -> Path:
        return self.path / "summary.md"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def cycles(self) -> Path:
        """A JSON line for every reported cycle."""
        return self.path / "cycles.jsonl"

    @property
    def stream(self) -> Path:
        """What a run straight from books has read."""
        return self.path / "stream.json"

    def is_finished(self, step: int) -> bool:
        """Whether the run, which is at ``step``, finished there, by the settings that it had then."""
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
            return result["outcome"] == "finished" and result["steps"] >= step
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def save_run_ref(self, run_ref: RunRef) -> None:
        """Save the key of the MLflow run, in which a resumed run continues."""
        write_json(self.path / KEY, run_ref.to_json_for(self.location.address))
        self.push(self.path / KEY)

    def run_ref(self, store: str | None = None) -> RunRef | None:
        """The key of the MLflow run that :meth:`save_run_ref` saved, in ``store`` if that is given; None without one.

        None as well where only a new run can be recorded: in another ``store`` by a folder that was copied or moved, or
        on another machine than that of the store's file. Raises ``UserError`` for a ``store`` to be named.
        """
        try:
            run_ref = from_json(RunRef, json.loads((self.path / KEY).read_text(encoding="utf-8")), self.path)
        except (OSError, ValueError, UserError):
            return None
        if store:
            return replace(run_ref, store=store) if run_ref.home == self.location.address else None
        if self.copy_of and not run_ref.is_reachable:
            return None
        return run_ref.check_belongs_to(self.location, "name a store for its run with --tracking-uri")

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Lock the folder for the worker that trains; waits for an earlier one that is ending."""
        refusal = f"another process is training in {self.path}: stop it, or give another --name."
        with lock(self.path / "lock", refusal, patience=HANDOVER_SECONDS):
            yield

    def command_lock(self) -> AbstractContextManager[None]:
        """Hold the run for the command that resumes it."""
        return self.exclusive_use(self._in_use)

    @contextmanager
    def create(self) -> Iterator[None]:
        """Create the folder of a new run, and hold it.

        It is removed, which frees its name, if the block fails before the first cycle or checkpoint.
        """
        with self.location.create(self._in_use):
            self.discard_copy()
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                yield
            except BaseException:
                has_started = self.cycles.exists() or self.result.exists() or checkpoints_in(self.checkpoints)
                if not (has_started or self.has_checkpoint()):
                    self.remove()
                raise

    @property
    def _in_use(self) -> str:
        return f"another command is training in {self.location}: wait for it, or stop it."

    def checkpoint_names(self) -> list[str]:
        """The names of the run's checkpoints, oldest first; damaged ones, too."""
        return list_uploaded(self.copy_of) if self.copy_of else [path.name for path in checkpoints_in(self.checkpoints)]

    def newest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The newest intact checkpoint. It is downloaded to a copy, which then has no other.

        Returns: (checkpoint or None, one message per newer checkpoint that is damaged).
        """
        if self.copy_of:
            return download_newest(self.copy_of, self.checkpoints)
        checkpoint = newest(self.checkpoints)
        return checkpoint, list(describe_skipped(checkpoint)) if checkpoint else []

    def pull_checkpoint(self, location: StorageDir) -> Path:
        """The checkpoint at ``location``, downloaded to a copy. Raises ``UserError`` if the download is damaged."""
        checkpoint = self.path / location.parent.name / location.name
        if self.copy_of:
            download_checkpoint(location, checkpoint)
            if fault := find_damage(checkpoint):
                raise UserError(f"{location} is damaged: {fault}.")
        return checkpoint

    def newest_progress(self) -> tuple[Path | None, list[str]]:
        """As :meth:`newest_checkpoint`, but of the checkpoint a copy gets its progress alone.

        The run's small files are downloaded, too. The worker that resumes the run checks the checkpoint.
        """
        if not self.copy_of:
            return self.newest_checkpoint()
        with self.location.lock(self._in_use):
            self.refresh(lambda name: "/" not in name)
        checkpoint = download_progress(self.copy_of, self.checkpoints)
        if checkpoint:
            # Training continued, and reported cycles, while the checkpoint was uploaded.
            self.truncate_after(read_progress(checkpoint).reported)
        return checkpoint, []

    def checkpoint_address(self, checkpoint: Path) -> str:
        """The address of ``checkpoint`` for a message."""
        return str(self.location / f"{CHECKPOINTS}/{checkpoint.name}")

    def has_checkpoint(self) -> bool:
        """Whether the run can be resumed."""
        return any(name.endswith(PROGRESS) for name in self.location.list_files())

    def append_report(self, report: CycleReport) -> dict[str, Any]:
        """Add a cycle to the log, durably; returns what was added."""
        cycle = to_json(report) | {"line": report.format_line()}
        self.append_cycle(cycle)
        return cycle

    def append_cycle(self, cycle: dict[str, Any]) -> None:
        """Add a cycle that :meth:`append_report` returned to the log, durably. Raises ``UserError`` when the disk is
        full."""
        try:
            with self.cycles.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cycle) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as refused:
            raise UserError(
                f"{self.cycles} cannot be written ({refused.strerror}): make room or fix the folder, then continue "
                "with --resume."
            ) from refused

    def receive_cycle(self, cycle: dict[str, Any]) -> None:
        """Add a cycle that a worker has logged; its log is this one unless both work in copies."""
        if self.copy_of:
            self.append_cycle(cycle)

    def cycles_until(self, step: int) -> Iterator[dict[str, Any]]:
        """The logged cycles up to ``step``; later ones are about to be repeated."""
        return (json.loads(line) for line in self._lines_until(step))

    def truncate_after(self, step: int) -> None:
        """Remove cycles after ``step``, which are about to be repeated, and an incomplete last line."""
        if self.cycles.exists():
            lines = self._lines_until(step)
            with atomic_file(self.cycles) as file:
                file.writelines(lines)

    def _lines_until(self, step: int) -> list[bytes]:
        if not self.cycles.exists():
            return []
        lines = self.cycles.read_bytes().splitlines(keepends=True)
        return [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]


def new_directory(
    out: Path | str, name: str, *, resumable_with: str | None = "", allowed_leftovers: Sequence[str] = ()
) -> StorageDir:
    """The directory ``name`` in ``out`` for a new run, ladder, search or profile, which is not created yet.

    It must not exist, unless it contains nothing but ``allowed_leftovers``: the names of files that a command leaves
    when it fails at the beginning. The message says how to resume what exists if that has a file whose name ends in
    ``resumable_with``. Raises ``UserError`` also for an invalid ``name``, or if ``out`` is not writable.
    """
    if not re.fullmatch(r"[^/\0]+", name) or name in (".", "..") or len(os.fsencode(name)) > 200:
        raise UserError(f"--name {name!r} is not the name of a folder: write for example --name first.")
    directory = StorageDir.of(out, name)
    directory.check_writable("--out")
    entries = directory.entries()
    if entries is not None and not (allowed_leftovers and entries <= set(allowed_leftovers)):
        resumable = resumable_with is not None and any(file.endswith(resumable_with) for file in directory.list_files())
        resume = f"continue it with --resume {name}, or " if resumable else ""
        raise UserError(f"{directory} exists already: {resume}give another --name.")
    return directory


def new_run(out: str, name: str) -> RunFolder:
    """The folder of a new run in ``out``, a path or a URI. Raises ``UserError`` as :func:`new_directory` does."""
    return RunFolder.of(new_directory(out, name, resumable_with=PROGRESS))


def resume_command(module: str, directory: StorageDir) -> str:
    """The command that continues the ladder or search in ``directory``, which ``python -m module`` began."""
    out = [] if directory.parent == StorageDir.of("runs") else ["--out", str(directory.parent)]
    return shlex.join(["python", "-m", module, "--resume", directory.name, *out])
