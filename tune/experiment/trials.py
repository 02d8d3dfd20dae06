"""The common part of a search and a ladder: trials in a folder, each chosen from the rows of the previous trials."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from infra.cli.console import console
from infra.cli.table import Report
from infra.ray.machines import eligible_nodes, wait_for_accelerator
from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.storage.files import atomic_file, write_json, write_text
from infra.storage.workspace import Workspace
from infra.tracking.run_ref import RunRef
from pipeline.shards import Manifest
from train.config import ResolvedConfig
from train.reporting.report import memory_fact
from tune.config import ExperimentConfig
from tune.experiment.folder import RESULT, SUMMARY, TRIALS, ExperimentRecord, ExperimentResult
from tune.experiment.machines import Machine, trial_resources
from tune.trial.row import TrialRow
from tune.trial.run import TrialRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ray.tune.schedulers import TrialScheduler


@dataclass(frozen=True)
class Experiment(ABC):
    """A search or ladder with all its settings resolved."""

    config: ExperimentConfig
    """Settings of the experiment."""
    directory: StorageDir
    """Folder of the experiment: NAME in --out."""
    machines: tuple[Machine, ...]
    """Machines on which trials may run."""
    manifest: Manifest
    """Manifest of the token shards."""
    training: ResolvedConfig
    """Settings that each trial varies, resolved for the trials' device."""
    limit: int | None
    """Maximum memory of a trial's process in bytes; None without a limit."""

    mlflow_experiment: ClassVar[str]
    """Name of the experiment in MLflow."""

    @abstractmethod
    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[TrialRequest]
    ) -> TrialRequest | None:
        """Choose the trial ``number``, to run on ``machine`` while other trials are ``running``.

        Returns None if the results of the running trials are needed first, or if the experiment is finished. Raises
        ``UserError`` if the experiment cannot continue.
        """

    @abstractmethod
    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        """Return whether no trial is left after ``rows``. Raises ``UserError`` if the experiment cannot continue."""

    @abstractmethod
    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """Find the machines that can run the next trial. Raises ``UserError`` if no machine can ever run it."""

    @abstractmethod
    def params(self) -> dict[str, object]:
        """Return the params of the experiment in MLflow."""

    @abstractmethod
    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """Estimate the number of further trials after ``rows``."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that cannot be changed when the experiment is resumed."""
        resolved = {"data": self.manifest.fingerprint, "memory_limit": self.limit, "device": self.device}
        return self.config.identity() | resolved

    def record(self, mlflow_run: RunRef) -> ExperimentRecord:
        """Create the record that is stored when the experiment starts, with its run in MLflow."""
        return ExperimentRecord(
            self.config.kind, self.mlflow_experiment, self.config.to_json(), self.identity(), self.params(),
            str(self.data), self.manifest.fingerprint, self.manifest.splits, self.limit, mlflow_run,
        )  # fmt: skip

    def describe_best(self, rows: Sequence[TrialRow]) -> str:
        """Format the best result so far, as the start of the progress line; empty for a ladder."""
        return ""

    def trial_label(self, row: TrialRow) -> str:
        """Format the label of a trial in the line that is printed at its end."""
        return row.name

    def describe_running(self, request: TrialRequest) -> str:
        """Format the activity while a trial runs."""
        return f"running trial {request.number} ({request.proposal.stage}): {request.name}"

    def measurements(self, row: TrialRow) -> list[str]:
        """Format the measurements in the line that is printed at the end of a trial: speed, memory and losses."""
        result, loss = row.result, ""
        if result and result.train_loss is not None:
            loss = f"loss {result.train_loss:.3f}" + ("" if result.val_loss is None else f"/{result.val_loss:.3f}")
        texts = [
            f"{row.speed} tokens/s" if row.speed else "no speed measured",
            row.memory is not None and memory_fact(row.memory, self.limit),
            result and result.mfu and f"MFU {result.mfu:.1%}",
            row.compile_seconds is not None and f"compile {row.compile_seconds:.1f} s",
            loss,
        ]
        return [text for text in texts if text]

    def seconds_left(self, rows: Sequence[TrialRow]) -> float:
        """Estimate the time of the further trials after ``rows``, of which there is at least one."""
        return sum(row.seconds for row in rows) / len(rows) * self.remaining(rows) / self.parallel

    def describe_part(self, row: TrialRow) -> str:
        """Format the line about the ``row`` so far of a trial that continues; empty for none."""
        return ""

    def is_reusable(self, row: TrialRow) -> bool:
        """Return whether ``row`` is reused when the experiment is resumed; otherwise its trial runs again."""
        return True

    def scheduler(self, rows: Sequence[TrialRow]) -> "TrialScheduler | None":
        """Return the scheduler of Ray Tune that may end trials early, which knows the results in ``rows``; None without
        one."""
        return None

    @property
    def parallel(self) -> int:
        """Maximum number of concurrent trials."""
        return 1

    @property
    def folder(self) -> Path:
        """Local folder of the experiment."""
        return self.workspace.path

    @property
    def workspace(self) -> Workspace:
        """Workspace in which this driver writes the experiment's files."""
        return Workspace.of(self.directory)

    @property
    def trials(self) -> Path:
        """Local folder of the trials' rows."""
        return self.folder / TRIALS

    @property
    def data(self) -> StorageDir:
        """Location of the token shards, as an absolute path or URI, because trials run in other working directories."""
        return StorageDir.of(self.training.dataset.data)

    @property
    def device(self) -> str:
        """Type of the trials' device: cuda or cpu."""
        return self.training.execution.device

    def resources(self) -> dict[str, float]:
        """Return the resources of a trial in the connected Ray."""
        dataset, execution = self.training.dataset, self.training.execution
        if execution.accelerator:
            wait_for_accelerator(execution.accelerator)
        nodes = eligible_nodes(accelerator=execution.accelerator)
        return trial_resources(nodes.values(), dataset, execution, use_gpu=self.device == "cuda")

    def publish(self, report: Report, figures: Mapping[str, "Figure"], result: ExperimentResult) -> None:
        """Print the report, and store it with the ``figures`` and the ``result``, whose files are in the folder."""
        from infra import charts  # matplotlib takes half a second, for which the start of a command must not wait.

        write_text(self.folder / SUMMARY, report.markdown())
        for name, figure in figures.items():
            with atomic_file(self.folder / f"{name}.png") as file:
                charts.save(figure, file)
        files = [SUMMARY, *result.files, *(f"{name}.png" for name in figures)]
        write_json(self.folder / RESULT, to_json(replace(result, files=files)))
        self.workspace.push(*(self.folder / name for name in (*files, RESULT)))
        report.show()
        console.print(f"report, charts and trials: {self.directory}", markup=False)
