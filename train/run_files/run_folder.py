"""A run's folder, ``runs/NAME``, on disk or in object storage: its contents.

The worker appends each cycle to ``cycles.jsonl``, which together with the newest checkpoint tells how far a run has got
after the driver or the worker was killed. A run in object storage has a working copy of its small files on the driver's
machine and its checkpoints, while they are made, in scratch on the worker's.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.cli.console import errors
from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir, WorkingCopy, check_object_name
from infra.storage.files import atomic_file, lock, write_json
from infra.storage.lease import exclusive_use
from infra.storage.object_storage import is_remote
from infra.tracking.run_ref import RunRef
from train.result import CycleReport
from train.run_files.progress import PROGRESS, checkpoints_in, describe_skipped, newest

KEY = "tracking.json"

HANDOVER_SECONDS = 60.0
"""How long to wait for an earlier worker that is being killed; Ray's workers outlive their driver by a few seconds."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path
    remote: StorageDir | None = None
    """The run's place in object storage, of which ``path`` is this machine's copy; None where ``path`` is its place."""

    @property
    def run_dir(self) -> StorageDir:
        return self.remote or StorageDir.of(self.path)

    def send(self, *files: Path) -> None:
        """Send these files of ``path`` to the run's place. Raises ``UserError`` when storage keeps failing."""
        if self.remote is None:
            return
        WorkingCopy(self.run_dir, self.path).push(*(file.relative_to(self.path).as_posix() for file in files))

    @property
    def config(self) -> Path:
        """The run's settings, which ``--config`` and ``--resume`` read."""
        return self.path / "config.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

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
        write_json(self.path / KEY, run_ref.to_json_for(self.run_dir.address))
        self.send(self.path / KEY)

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
            return replace(run_ref, store=store) if run_ref.home == self.run_dir.address else None
        if self.remote and not run_ref.is_reachable:
            return None
        return run_ref.check_belongs_to(self.run_dir, "name a store for its run with --tracking-uri")

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Lock the folder for the worker that trains; waits for an earlier one that is ending."""
        refusal = f"another process is training in {self.path}: stop it, or give another --name."
        with lock(self.path / "lock", refusal, patience=HANDOVER_SECONDS):
            yield

    def command_lock(self) -> AbstractContextManager[None]:
        """Hold the run's place for the command that runs or continues this run."""
        return exclusive_use(self.run_dir, _in_use(self.run_dir))

    def newest(self) -> Path:
        """The newest intact checkpoint of a run from :func:`find_run`, which has one; prints which ones are skipped.

        Of a run in object storage only its progress is here.
        """
        if self.remote:
            return checkpoints_in(self.checkpoints)[-1]
        checkpoint = newest(self.checkpoints)
        assert checkpoint is not None, "find_run refuses a run without an intact checkpoint"
        for line in describe_skipped(checkpoint):
            errors.print(line, markup=False)
        return checkpoint

    def checkpoint_address(self, checkpoint: Path) -> str:
        """The address of ``checkpoint`` for a sentence."""
        return str(self.run_dir / f"checkpoints/{checkpoint.name}")

    def has_checkpoint(self) -> bool:
        return any(name.endswith(PROGRESS) for name in self.run_dir.list_files())

    @contextmanager
    def remove_unless_started(self) -> Iterator[None]:
        """Remove this new folder, which frees its name, when the block fails before the first cycle or checkpoint."""
        try:
            yield
        except BaseException:
            has_started = self.cycles.exists() or self.result.exists() or checkpoints_in(self.checkpoints)
            if not (has_started or self.has_checkpoint()):
                shutil.rmtree(self.path, ignore_errors=True)
                if self.remote:
                    self.remote.remove(self.remote.list_files())
            raise

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


def new_folder(out: Path, name: str, *, resumable: bool = True, allowed_leftovers: Sequence[str] = ()) -> Path:
    """The folder of a new run, ladder, search or profile. Raises ``UserError`` when ``name`` is not a valid name.

    It must not exist, unless it contains nothing but ``allowed_leftovers``: the names of files that a command leaves
    when it fails at the beginning.
    """
    _refuse_name(name)
    folder = (out / name).resolve()
    if folder.exists() and not (
        allowed_leftovers and folder.is_dir() and {path.name for path in folder.iterdir()} <= set(allowed_leftovers)
    ):
        resume = f"continue it with --resume {name}, or " if resumable else ""
        raise UserError(f"{folder} exists already: {resume}give another --name.")
    return folder


def new_experiment_dir(out: str, name: str, *, allowed_leftovers: Sequence[str] = ()) -> StorageDir:
    """The place of a new ladder or search in ``out``, a path or a URI. Raises ``UserError`` as :func:`new_folder`."""
    if not is_remote(out):
        return StorageDir.of(new_folder(Path(out), name, allowed_leftovers=allowed_leftovers))
    check_object_name(name)
    return _unused(StorageDir.of(out) / name)


def resume_command(module: str, directory: StorageDir) -> str:
    """The command that continues the ladder or search in ``directory``, which ``python -m module`` began."""
    out = [] if directory.parent == StorageDir.of("runs") else ["--out", str(directory.parent)]
    return shlex.join(["python", "-m", module, "--resume", directory.name, *out])


def new_run(out: str, name: str) -> RunFolder:
    """The folder of a new run in ``out``, a path or a URI. Raises ``UserError`` as :func:`new_folder` does."""
    _refuse_name(name)
    if not is_remote(out):
        return RunFolder(new_folder(Path(out), name, resumable=RunFolder(Path(out) / name).has_checkpoint()))
    return working_copy(_unused(StorageDir.of(out) / name, PROGRESS), fresh=True)


def _unused(directory: StorageDir, ending: str = "") -> StorageDir:
    """``directory``, in object storage. Raises ``UserError`` when it is taken, or cannot be written.

    ``ending`` is that of a file without which what is there cannot be continued.
    """
    directory.check_writable("--out")
    if files := directory.list_files():
        resumable = any(name.endswith(ending) for name in files)
        resume = f"continue it with --resume {directory.name}, or " if resumable else ""
        raise UserError(f"{directory} exists already: {resume}give another --name.")
    return directory


def working_copy(run_dir: StorageDir, *, fresh: bool) -> RunFolder:
    """This machine's copy of the small files of the run in object storage at ``run_dir``; empty where ``fresh``."""
    there = {name for name in run_dir.list_files() if "/" not in name} if not fresh else set[str]()
    with run_dir.lock(_in_use(run_dir)):
        return RunFolder(WorkingCopy.of(run_dir, empty=fresh, include=there.__contains__).local_path, run_dir)


def _in_use(directory: StorageDir) -> str:
    return f"another command is training in {directory}: wait for it, or stop it."


def _refuse_name(name: str) -> None:
    if not re.fullmatch(r"[^/\0]+", name) or name in (".", "..") or len(os.fsencode(name)) > 200:
        raise UserError(f"--name {name!r} is not the name of a folder: write for example --name first.")


def create_folder(folder: Path) -> None:
    """Create a new ``folder``. Raises ``UserError`` when that fails, or another command was faster."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists already: give another --name.") from None
    except OSError as refused:
        raise UserError(f"{folder} cannot be created ({refused.strerror}): give another --out.") from refused
