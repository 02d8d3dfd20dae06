"""A run's folder, ``runs/NAME``: its contents, and how driver and worker share it.

The worker appends each cycle to ``cycles.jsonl``. The driver follows that file for its output, and together with the
newest checkpoint it tells how far a run has got after either side was killed. The driver asks for a clean stop by
creating ``STOP``, because Ray Train runs the loop in a thread, where signals do not arrive. Neither needs an actor or
a call into Ray during training.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.command import errors
from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage import atomic_file, lock, write_json, write_text
from infra.tracking.key import RunKey
from train.checkpoint.progress import checkpoints_in, newest, skipped
from train.result import CycleReport

HANDOVER_SECONDS = 60.0
"""How long to wait for an earlier worker that is being killed; Ray's workers outlive their driver by a few seconds."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The run's settings, which ``--config`` and ``--resume`` read."""
        return self.path / "config.json"

    @property
    def result(self) -> Path:
        """The ``RunResult`` of a run that has ended."""
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def cycles(self) -> Path:
        """A JSON line for every reported cycle."""
        return self.path / "cycles.jsonl"

    @property
    def stream(self) -> Path:
        """What a run straight from books has read."""
        return self.path / "stream.json"

    @property
    def stop(self) -> Path:
        """A file that asks the run to stop after its current step."""
        return self.path / "STOP"

    @property
    def refused(self) -> Path:
        """The reason why one of several workers gave up, which all of them read when they are restarted."""
        return self.path / "REFUSED"

    def starts_of(self, command: str) -> list[int] | None:
        """The steps that workers of ``command`` started from; None where neither it nor they have used this disk."""
        try:
            first, *steps = (self.path / "starts").read_text(encoding="utf-8").split()
            return [int(step) for step in steps] if first == command else None
        except (FileNotFoundError, ValueError):
            return None

    def keep_starts(self, command: str, steps: Sequence[int]) -> None:
        """Save ``steps`` for :meth:`starts_of`, in place of those of an earlier command."""
        write_text(self.path / "starts", "\n".join([command, *map(str, steps)]) + "\n")

    def is_finished(self) -> bool:
        """Whether the run finished, by the settings that it had then."""
        try:
            return json.loads(self.result.read_text(encoding="utf-8"))["outcome"] == "finished"
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def keep_key(self, key: RunKey) -> None:
        """Save the key of the MLflow run, in which a resumed run continues."""
        write_json(self.path / "tracking.json", key.kept_in(self.path))

    def key(self, store: str | None = None) -> RunKey | None:
        """The key of the MLflow run that :meth:`keep_key` saved, in ``store`` if that is given; None without one.

        Raises ``UserError`` when the folder was copied or moved without its store.
        """
        try:
            kept = from_json(RunKey, json.loads((self.path / "tracking.json").read_text(encoding="utf-8")), self.path)
        except (OSError, ValueError):
            return None
        return kept.found_in(self.path, "name a store for the run with --tracking-uri", store=store)

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Lock the folder for the worker that trains; waits for an earlier one that is ending. Raises ``UserError``."""
        refusal = f"another process is training in {self.path}: stop it, or give another --name."
        with lock(self.path / "lock", refusal, patience=HANDOVER_SECONDS):
            yield

    @contextmanager
    def command_lock(self) -> Iterator[None]:
        """Lock the folder for the command that runs or continues this run. Raises ``UserError``."""
        with lock(self.path / ".command", f"another command is training in {self.path}: wait for it, or stop it."):
            yield

    def newest(self) -> Path:
        """The newest intact checkpoint of a run from :func:`find_run`, which has one; prints which ones are skipped."""
        found = newest(self.checkpoints)
        assert found is not None, "find_run refuses a run without an intact checkpoint"
        for line in skipped(found):
            errors.print(line, markup=False)
        return found

    @contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Remove this new folder, which frees its name, when the block fails before the first cycle or checkpoint."""
        try:
            yield
        except BaseException:
            if not (self.cycles.exists() or self.result.exists() or checkpoints_in(self.checkpoints)):
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def append(self, report: CycleReport) -> None:
        """Add a cycle to the log, durably."""
        cycle = to_json(report) | {"line": report.line()}
        with self.cycles.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cycle) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Remove cycles after ``step``, which are about to be repeated, and an incomplete last line."""
        if not self.cycles.exists():
            return
        lines = self.cycles.read_bytes().splitlines(keepends=True)
        with atomic_file(self.cycles) as file:
            file.writelines(line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step)


class Follower:
    """Reads a log of cycles while it grows; passes each step on once, even when the log is rewound."""

    def __init__(self, path: Path, on_cycle: Callable[[dict[str, Any]], None]) -> None:
        self.path = path
        self.on_cycle = on_cycle
        self.last = 0
        self._file = 0
        self._position = 0

    def poll(self) -> None:
        """Pass new cycles on."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if self._file != os.fstat(file.fileno()).st_ino:  # rewinding replaces the file
                self._file, self._position = os.fstat(file.fileno()).st_ino, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                cycle = json.loads(line)
                if cycle["step"] > self.last:
                    self.last = cycle["step"]
                    self.on_cycle(cycle)


def new_folder(out: Path, name: str, *, resumable: bool = True, begun: Sequence[str] = ()) -> Path:
    """The folder of a new run, ladder, search or profile. Raises ``UserError`` when ``name`` is not a valid name.

    It must not exist, unless it contains nothing but ``begun``: the names of files that a command leaves when it fails
    at the beginning.
    """
    if not re.fullmatch(r"[^/\0]+", name) or name in (".", "..") or len(os.fsencode(name)) > 200:
        raise UserError(f"--name {name!r} is not the name of a folder: write for example --name first.")
    folder = (out / name).resolve()
    if folder.exists() and not (begun and folder.is_dir() and {path.name for path in folder.iterdir()} <= set(begun)):
        resume = f"continue it with --resume {name}, or " if resumable else ""
        raise UserError(f"{folder} exists already: {resume}give another --name.")
    return folder


def make(folder: Path) -> None:
    """Create a new ``folder``. Raises ``UserError`` when that fails, or another command was faster."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists already: give another --name.") from None
    except OSError as refused:
        raise UserError(f"{folder} cannot be created ({refused.strerror}): give another --out.") from refused
