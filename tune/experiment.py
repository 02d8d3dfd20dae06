"""What a search and a ladder have in common: trials in one folder, each decided from the rows of those before it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from infra.console import console
from infra.storage import atomic_file, write_text
from infra.storage_dir import StorageDir, WorkingCopy
from infra.table import Report
from infra.tracking.tracker import Tracker
from infra.units import GB
from pipeline.shards import Manifest
from train.config import TrainConfig
from tune.config import ExperimentConfig
from tune.device import Machine, trial_resources
from tune.folder import TRIALS
from tune.trial.row import TrialRow
from tune.trial.run import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Experiment(ABC):
    """One search or ladder, with everything decided that its config leaves open."""

    config: ExperimentConfig
    place: StorageDir
    """Where it belongs: --out and its name."""
    machines: tuple[Machine, ...]
    """The machines on which its trials may run."""
    manifest: Manifest
    training: TrainConfig
    """The run that all trials are variations of, resolved for their device."""
    limit: int | None
    """Most memory that a trial's process may use, in bytes; None where there is no limit."""
    copy: WorkingCopy | None = field(default=None, kw_only=True)
    """The place on this machine, once it is locked."""

    collection: ClassVar[str]
    """MLflow's experiment."""

    @abstractmethod
    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[Request]
    ) -> Request | None:
        """What to run on ``machine`` as the trial of this ``number``, while others are ``running``.

        None where nothing can be decided without them, or the experiment is at its end. Raises ``UserError`` where it
        cannot continue.
        """

    @abstractmethod
    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        """Whether nothing is left to run after ``rows``. Raises ``UserError`` where it cannot continue."""

    @abstractmethod
    def usable(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """Those of these machines that are fit for the next trial. Raises ``UserError`` where none ever will be."""

    @abstractmethod
    def params(self) -> dict[str, object]:
        """What tells it from others in MLflow."""

    @abstractmethod
    def labels(self, row: TrialRow) -> dict[str, str]:
        """Further columns of a trial in MLflow's list."""

    @abstractmethod
    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """About how many trials are left after ``rows``."""

    def identity(self) -> dict[str, Any]:
        """What an experiment must share with this one to be continued as it."""
        found = {"data": self.manifest.fingerprint, "memory_limit": self.limit, "device": self.device}
        return self.config.identity() | found

    def best(self, rows: Sequence[TrialRow]) -> str:
        return ""

    def named(self, row: TrialRow) -> str:
        return row.name

    def words(self, row: TrialRow) -> dict[str, str]:
        """A trial's columns in MLflow's list: batch, other settings, speed and memory with interval and prediction."""
        words = {"batch": f"{row.candidate.micro_batch} x {row.accumulation}"} | self.labels(row)
        if row.attention:
            words["attention"] = row.attention
        if row.speed:
            words["tokens/s"] = str(row.speed)
        if row.memory is not None:
            words["memory"] = f"{row.memory / GB:.2f}" + (f" of {self.limit / GB:.2f} GB" if self.limit else " GB")
        if row.predicted_memory:
            error = f" ({row.predicted_memory / row.memory - 1:+.0%})" if row.memory else ""
            words["predicted memory"] = f"{row.predicted_memory / GB:.2f} GB{error}"
        return words

    def is_kept(self, row: TrialRow) -> bool:
        """Whether ``row`` counts when the experiment is continued; what it is of runs again otherwise."""
        return True

    @property
    def parallel(self) -> int:
        return 1

    @property
    def folder(self) -> Path:
        return self.working_copy.folder

    @property
    def working_copy(self) -> WorkingCopy:
        """Where this driver writes what belongs to the place. Only a locked one in object storage has one."""
        return self.copy or WorkingCopy(self.place, self.place.folder)

    @property
    def trials(self) -> Path:
        return self.folder / TRIALS

    @property
    def data(self) -> StorageDir:
        """The token shards, by a whole path or URI, because trials run elsewhere."""
        return StorageDir.of(self.training.data)

    @property
    def device(self) -> str:
        return self.training.device

    def resources(self) -> dict[str, float]:
        """What each trial asks the connected Ray for."""
        return trial_resources(self.training, use_gpu=self.device == "cuda")

    def publish(self, told: Report, files: Sequence[str], figures: Mapping[str, "Figure"], tracker: Tracker) -> None:
        """Print what was found, and keep it, ``files`` of the folder and ``figures`` with the place and in MLflow."""
        write_text(self.folder / "summary.md", told.markdown())
        for name, figure in figures.items():
            with atomic_file(self.folder / f"{name}.png") as file:
                figure.savefig(file, format="png", dpi=120)
        tracker.note(told.markdown())
        for name in ("summary.md", *files, *(f"{name}.png" for name in figures)):
            tracker.file(self.folder / name)
            self.working_copy.send(name)
        told.show()
        console.print(f"tables, charts and every trial: {self.place}", markup=False)
