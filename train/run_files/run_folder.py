"""A run's folder, ``runs/NAME``, and its files.

The worker appends each cycle to ``cycles.jsonl``. This log and the newest checkpoint are enough to resume the run after
the driver or the worker was killed. If the run is in object storage, the driver has a local copy of the small files,
and the worker has one of the checkpoints.
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
    CYCLES,
    download_checkpoint,
    download_newest,
    download_progress,
    list_uploaded,
)

KEY, CONFIG, RESULT = "tracking.json", "config.json", "result.json"
"""Files of a run with the reference to its MLflow run, its requested settings, and its result."""

HANDOVER_TIMEOUT_SECONDS = 60.0
"""Time limit for an earlier worker to exit, because Ray's workers outlive their driver by a few seconds."""


@dataclass(frozen=True)
class RunFolder(Workspace):
    """The workspace of one run, and the files in it."""

    @property
    def config(self) -> Path:
        """File of the run's requested settings, which ``--config`` and ``--resume`` read."""
        return self.path / CONFIG

    @property
    def start(self) -> Path:
        """File of the resolved settings at the last start or resume: a :class:`train.reporting.tracking.RunStart`."""
        return self.path / "start.json"

    @property
    def result(self) -> Path:
        """File of the run's :class:`train.result.RunResult`, written when the run ends."""
        return self.path / RESULT

    @property
    def summary(self) -> Path:
        """File of the run's report."""
        return self.path / "summary.md"

    @property
    def curves(self) -> Path:
        """File of the chart of losses and speed."""
        return self.path / "curves.png"

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def cycles(self) -> Path:
        """File of the log of cycles, with a JSON line per cycle."""
        return self.path / CYCLES

    @property
    def stream(self) -> Path:
        """File of the summary of books that a run with ``--stream`` has read."""
        return self.path / "stream.json"

    def is_finished(self, step: int) -> bool:
        """Return whether the run finished at ``step`` or later, according to its result."""
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
            return result["outcome"] == "finished" and result["steps"] >= step
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def save_run_ref(self, run_ref: RunRef) -> None:
        """Store the reference to the MLflow run, which a resumed run continues."""
        write_json(self.path / KEY, run_ref.to_json_for(self.location.address))
        self.push(self.path / KEY)

    def run_ref(self, store: str | None = None) -> RunRef | None:
        """Read the reference to the MLflow run that :meth:`save_run_ref` stored, for another ``store`` if it is set.

        None if a new MLflow run must be created: if no reference is stored, if the folder was copied or moved and
        ``store`` is set, or if the store is a file on another machine. Raises ``UserError`` if a copied or moved folder
        needs a ``store``.
        """
        try:
            run_ref = from_json(RunRef, json.loads((self.path / KEY).read_text(encoding="utf-8")), self.path)
        except (OSError, ValueError, UserError):
            return None
        if store:
            return replace(run_ref, store=store) if run_ref.run_dir == self.location.address else None
        if self.copy_of and not run_ref.is_reachable:
            return None
        return run_ref.check_belongs_to(self.location, "Use --tracking-uri to start a new MLflow run")

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Lock the workspace for the worker that trains, after waiting for an earlier worker to exit."""
        message = f"Another process is training in {self.path}. Stop it, or use another --name."
        with lock(self.path / "lock", message, timeout=HANDOVER_TIMEOUT_SECONDS):
            yield

    def command_lock(self) -> AbstractContextManager[None]:
        """Lock the run for the command that resumes it."""
        return self.exclusive_use(self._in_use)

    @contextmanager
    def create(self) -> Iterator[None]:
        """Create the folder of a new run, and lock it against other commands.

        If the block fails before the first cycle or checkpoint, the folder is removed, so that its name can be reused.
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
        return f"Another command is training in {self.location}. Wait for it to finish, or stop it."

    def checkpoint_names(self) -> list[str]:
        """Return the names of all checkpoints from oldest to newest, including damaged ones."""
        return list_uploaded(self.copy_of) if self.copy_of else [path.name for path in checkpoints_in(self.checkpoints)]

    def newest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """Find the newest intact checkpoint. For a run in object storage it is downloaded and replaces other copies.

        Returns: (checkpoint or None, one message per newer checkpoint that is damaged).
        """
        if self.copy_of:
            return download_newest(self.copy_of, self.checkpoints)
        checkpoint = newest(self.checkpoints)
        return checkpoint, list(describe_skipped(checkpoint)) if checkpoint else []

    def pull_checkpoint(self, location: StorageDir) -> Path:
        """Return the local checkpoint for ``location``, which is downloaded from object storage if it is there.

        Raises ``UserError`` if the download is damaged.
        """
        checkpoint = self.path / location.parent.name / location.name
        if self.copy_of:
            download_checkpoint(location, checkpoint)
            if fault := find_damage(checkpoint):
                raise UserError(f"{location} is damaged: {fault}.")
        return checkpoint

    def newest_progress(self) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint, but only download its progress and small files from object storage.

        A downloaded checkpoint is not checked for damage, because the worker that resumes the run does that.

        Returns: (checkpoint or None, one message per newer checkpoint that is damaged).
        """
        if not self.copy_of:
            return self.newest_checkpoint()
        with self.location.lock(self._in_use):
            self.refresh(lambda name: "/" not in name)
        checkpoint = download_progress(self.copy_of, self.checkpoints)
        if checkpoint:
            # Training reported more cycles while the checkpoint was uploaded. They will be repeated.
            self.truncate_after(read_progress(checkpoint).last_reported_step)
        return checkpoint, []

    def checkpoint_address(self, checkpoint: Path) -> str:
        """Return the location of ``checkpoint`` for a message."""
        return str(self.location / f"{CHECKPOINTS}/{checkpoint.name}")

    def has_checkpoint(self) -> bool:
        """Return whether the run can be resumed."""
        return any(name.endswith(PROGRESS) for name in self.location.list_files())

    def append_report(self, report: CycleReport) -> dict[str, Any]:
        """Append a cycle to the log durably, and return the logged values."""
        cycle = to_json(report) | {"line": report.format_line()}
        self.append_cycle(cycle)
        return cycle

    def append_cycle(self, cycle: dict[str, Any]) -> None:
        """Append a cycle that :meth:`append_report` returned to the log durably.

        Raises ``UserError`` if the disk is full.
        """
        try:
            with self.cycles.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cycle) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as failure:
            raise UserError(
                f"Cannot write {self.cycles}: {failure.strerror}. Free disk space or fix the folder's permissions, "
                "then resume with --resume."
            ) from failure

    def receive_cycle(self, cycle: dict[str, Any]) -> None:
        """Append a cycle that the worker has logged in its copy of the run; without copies, do nothing."""
        if self.copy_of:
            self.append_cycle(cycle)

    def cycles_until(self, step: int) -> Iterator[dict[str, Any]]:
        """Return the logged cycles up to ``step``."""
        return (json.loads(json_line) for json_line in self._lines_until(step))

    def truncate_after(self, step: int) -> None:
        """Remove cycles after ``step``, which will be repeated, and an incomplete last line."""
        if self.cycles.exists():
            json_lines = self._lines_until(step)
            with atomic_file(self.cycles) as file:
                file.writelines(json_lines)

    def _lines_until(self, step: int) -> list[bytes]:
        if not self.cycles.exists():
            return []
        json_lines = self.cycles.read_bytes().splitlines(keepends=True)
        return [line for line in json_lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]


def new_directory(
    out: Path | str, name: str, *, resumable_with: str | None = "", allowed_leftovers: Sequence[str] = ()
) -> StorageDir:
    """Check the directory ``name`` in ``out`` for a new run, ladder, search or profile; it is not created yet.

    Raises ``UserError`` if the name is invalid, ``out`` is not writable, or the directory exists. An existing directory
    is accepted if it only contains ``allowed_leftovers``, the files of a command that failed at its start. The message
    suggests ``--resume`` if the name of a file ends with ``resumable_with``.
    """
    if not re.fullmatch(r"[^/\0]+", name) or name in (".", "..") or len(os.fsencode(name)) > 200:
        raise UserError(f"--name {name!r} is not a valid folder name. Use a name such as --name first.")
    directory = StorageDir.of(out, name)
    directory.check_writable("--out")
    entries = directory.entries()
    if entries is not None and not (allowed_leftovers and entries <= set(allowed_leftovers)):
        resumable = resumable_with is not None and any(file.endswith(resumable_with) for file in directory.list_files())
        advice = f"Resume it with --resume {name}, or use" if resumable else "Use"
        raise UserError(f"{directory} already exists. {advice} another --name.")
    return directory


def new_run(out: str, name: str) -> RunFolder:
    """Return the folder of a new run in ``out``. Raises ``UserError`` as :func:`new_directory` does."""
    return RunFolder.of(new_directory(out, name, resumable_with=PROGRESS))


def resume_command(module: str, directory: StorageDir) -> str:
    """Format the command that resumes the ladder or search in ``directory``, which ``python -m module`` started."""
    out = [] if directory.parent == StorageDir.of("runs") else ["--out", str(directory.parent)]
    return shlex.join(["python", "-m", module, "--resume", directory.name, *out])
