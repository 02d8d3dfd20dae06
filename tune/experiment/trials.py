"""The common part of a search and a ladder: trials in one folder, each decided from the rows of the previous ones."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from infra.cli.console import console
from infra.cli.table import Report
from infra.cli.units import GB
from infra.facts import Fact
from infra.ray.machines import await_accelerator, eligible_nodes
from infra.storage.directory import StorageDir
from infra.storage.files import atomic_file, write_text
from infra.storage.workspace import Workspace
from infra.tracking.tracker import Tracker
from pipeline.shards import Manifest
from train.config import ResolvedConfig
from train.reporting.report import memory_fact, speed_fact
from tune.config import ExperimentConfig
from tune.experiment.folder import TRIALS
from tune.experiment.machines import Machine, trial_resources
from tune.trial.row import TrialRow
from tune.trial.run import TrialRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Experiment(ABC):
    """One search or ladder with all its settings resolved."""

    config: ExperimentConfig
    directory: StorageDir
    """The experiment's folder: NAME in --out."""
    machines: tuple[Machine, ...]
    """The machines on which trials may run."""
    manifest: Manifest
    training: ResolvedConfig
    """The run that all trials are variations of, resolved for their device."""
    limit: int | None
    """Maximum memory of a trial's process in bytes; None without a limit."""

    mlflow_experiment: ClassVar[str]
    """Name of the experiment in MLflow."""

    @abstractmethod
    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[TrialRequest]
    ) -> TrialRequest | None:
        """The trial ``number``, to run on ``machine`` while others are ``running``.

        None if the results of the running trials are needed first, or if the experiment is finished. Raises
        ``UserError`` if it cannot continue.
        """

    @abstractmethod
    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        """Whether no trial is left after ``rows``. Raises ``UserError`` if the experiment cannot continue."""

    @abstractmethod
    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """The machines that can run the next trial. Raises ``UserError`` if none of them ever can."""

    @abstractmethod
    def params(self) -> dict[str, object]:
        """The experiment's params in MLflow."""

    @abstractmethod
    def extra_columns(self, row: TrialRow) -> dict[str, str]:
        """Additional columns of a trial in MLflow's list of runs."""

    @abstractmethod
    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """The approximate number of trials that are left after ``rows``."""

    def identity(self) -> dict[str, Any]:
        """The settings that must be equal for an experiment to be resumed as this one."""
        resolved = {"data": self.manifest.fingerprint, "memory_limit": self.limit, "device": self.device}
        return self.config.identity() | resolved

    def describe_best(self, rows: Sequence[TrialRow]) -> str:
        """The best result so far as the start of the progress line; empty if the experiment has no such result."""
        return ""

    def trial_label(self, row: TrialRow) -> str:
        """The label of a trial in the line that is printed at its end."""
        return row.name

    def trial_columns(self, row: TrialRow) -> dict[str, str]:
        """A trial's columns in MLflow's list of runs: batch, other settings, and speed and memory as texts."""
        columns = {"batch": f"{row.candidate.micro_batch} x {row.accumulation}"} | self.extra_columns(row)
        if row.result and row.result.attention:
            columns["attention"] = row.result.attention
        if row.speed:
            columns["tokens/s"] = speed_fact(row.speed)
        if row.memory is not None:
            columns["memory"] = memory_fact(row.memory, self.limit)
        if row.predicted_memory:
            error = f" ({row.predicted_memory / row.memory - 1:+.0%})" if row.memory else ""
            columns["predicted_memory"] = Fact.of(
                "memory/predicted_gb", row.predicted_memory / GB, f"{{:.2f}} GB{error}"
            )
        return columns

    def is_reusable(self, row: TrialRow) -> bool:
        """Whether ``row`` is reused when the experiment is resumed; otherwise its trial runs again."""
        return True

    @property
    def parallel(self) -> int:
        return 1

    @property
    def folder(self) -> Path:
        return self.workspace.path

    @property
    def workspace(self) -> Workspace:
        """The local folder to which this driver writes the experiment's files."""
        return Workspace.of(self.directory)

    @property
    def trials(self) -> Path:
        return self.folder / TRIALS

    @property
    def data(self) -> StorageDir:
        """The token shards as an absolute path or URI, because trials run in other working directories."""
        return StorageDir.of(self.training.dataset.data)

    @property
    def device(self) -> str:
        return self.training.execution.device

    def resources(self) -> dict[str, float]:
        """Resources that each trial requests from the connected Ray."""
        dataset, execution = self.training.dataset, self.training.execution
        if execution.accelerator:
            await_accelerator(execution.accelerator)
        nodes = eligible_nodes(accelerator=execution.accelerator)
        return trial_resources(nodes.values(), dataset, execution, use_gpu=self.device == "cuda")

    def publish(self, report: Report, files: Sequence[str], figures: Mapping[str, "Figure"], tracker: Tracker) -> None:
        """Print the report, and store it with the folder's ``files`` and the ``figures``, also in MLflow."""
        write_text(self.folder / "summary.md", report.markdown())
        for name, figure in figures.items():
            with atomic_file(self.folder / f"{name}.png") as file:
                figure.savefig(file, format="png", dpi=120)
        tracker.set_description(report.markdown())
        for name in ("summary.md", *files, *(f"{name}.png" for name in figures)):
            tracker.log_file(self.folder / name)
            self.workspace.push(self.folder / name)
        report.show()
        console.print(f"report, charts and trials: {self.directory}", markup=False)
