"""The scaling law of one's own runs: their compute and validation losses, and the chart of loss over compute."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infra import charts
from infra.errors import UserError
from infra.schema import from_json
from infra.storage.directory import StorageDir
from infra.storage.files import atomic_file
from train.config import config_from_json
from train.data.assumed import TOKENS_PER_PARAMETER
from train.estimate.flops import PF_DAY
from train.estimate.scaling import ScalingLaw
from train.result import RunResult
from train.run_files.run_folder import CONFIG, RESULT

CHART = "loss-over-compute.png"
"""Name of the chart's file."""
MAX_RATIO_FACTOR = 2
"""Factor by which tokens per parameter may differ from the optimum before there is a warning."""


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run with a validation loss."""

    run_dir: StorageDir
    """Folder of the run."""
    result: RunResult
    """Result of the run."""
    parameters: int | None
    """Number of the model's parameters; None for a custom model."""

    @property
    def compute(self) -> float:
        """FLOPs of the run's training."""
        return self.result.train_tokens * self.result.flops_per_token

    @property
    def tokens_per_parameter(self) -> float | None:
        """Training tokens per parameter; None for a custom model."""
        return self.result.train_tokens / self.parameters if self.parameters else None


@dataclass(frozen=True)
class MeasuredLaw:
    """The scaling law of runs, with its unit and its runs."""

    runs: Sequence[MeasuredRun]
    """Runs to which the law is fitted."""
    law: ScalingLaw
    """Law of their losses."""
    unit: str
    """Unit of the losses."""

    @property
    def devices(self) -> str:
        """Names of the devices on which the runs trained."""
        return ", ".join(sorted({run.result.device for run in self.runs}))

    @property
    def warnings(self) -> list[str]:
        """Reasons why the law may not hold for a planned run, as sentences."""
        texts = []
        ratios = [ratio for run in self.runs if (ratio := run.tokens_per_parameter)]
        bounds = TOKENS_PER_PARAMETER / MAX_RATIO_FACTOR, TOKENS_PER_PARAMETER * MAX_RATIO_FACTOR
        if ratios and not (bounds[0] <= min(ratios) and max(ratios) <= bounds[1]):
            texts.append(
                f"the runs have {min(ratios):.3g} to {max(ratios):.3g} tokens per parameter, but the law "
                f"and its interval hold for runs with about {TOKENS_PER_PARAMETER}"
            )
        if len({run.result.data_fingerprint for run in self.runs}) > 1:
            texts.append("the runs were validated on different data")
        return texts

    def loss_text(self, compute: float) -> str:
        """Format the loss to expect of a run with ``compute`` FLOPs, with its 95% interval."""
        loss = self.law.loss(compute)
        interval = f"95% CI {loss.low:.3g} to {loss.high:.3g}"
        return f"{loss.middle:.3g} {self.unit} ({interval}), by the law of {len(self.runs)} runs"


def read_law(locations: Sequence[str]) -> MeasuredLaw:
    """Read the runs of ``--from-runs`` and fit the law to their validation losses.

    Losses per token are compared between runs on the same data, else losses per byte. Raises ``UserError`` if a run is
    missing or unfinished, or if the losses cannot be compared.
    """
    runs = list({str(run.run_dir): run for text in locations for run in _read_location(text)}.values())
    losses, unit = [run.result.val_loss or 0.0 for run in runs], "nats/token"
    if len({run.result.data_fingerprint for run in runs}) > 1:
        unit = "bits/byte"
        per_byte = [run.result.val_bits_per_byte for run in runs]
        if without := next((run for run in runs if run.result.val_bits_per_byte is None), None):
            raise UserError(
                f"--from-runs: {without.run_dir} has no loss in bits per byte, in which runs on different data are "
                "compared. Use runs on the same data."
            )
        losses = [loss for loss in per_byte if loss is not None]
    return MeasuredLaw(runs, ScalingLaw([run.compute for run in runs], losses), unit)


def _read_location(text: str) -> list[MeasuredRun]:
    """Read a run, or all finished runs with a validation loss in a folder of runs."""
    directory = StorageDir.of(text)
    if directory.exists(CONFIG):
        run = _read_run(directory)
        if isinstance(run, str):
            raise UserError(f"--from-runs {text} {run}.")
        return [run]
    names = directory.entries()
    folders = [directory / name for name in sorted(names or ())]
    runs = [_read_run(folder) for folder in folders if folder.exists(CONFIG)]
    if not runs:
        raise UserError(f"--from-runs {text} is neither a run nor a folder of runs. Use for example --from-runs runs.")
    return [run for run in runs if isinstance(run, MeasuredRun)]


def _read_run(run_dir: StorageDir) -> MeasuredRun | str:
    """Read the run in ``run_dir``, or return why it has no final validation loss, with advice."""
    try:
        result = from_json(RunResult, json.loads(run_dir.read(RESULT)), f"{run_dir}/{RESULT}")
        settings = json.loads(run_dir.read("start.json"))["config"]
    except FileNotFoundError:
        return "has not finished. Resume it with 'python -m train.run --resume', or remove it"
    if result.outcome != "finished":
        return f"has not finished ({result.outcome}). Resume it with 'python -m train.run --resume', or remove it"
    if result.val_loss is None:
        return "has no validation loss. Use runs with validation batches, such as --cycle 200+20"
    return MeasuredRun(run_dir, result, _parameters(settings))


def _parameters(settings: dict[str, object]) -> int | None:
    """Return the number of parameters of the model in the resolved ``settings`` of a run; None for a custom model."""
    model = config_from_json(settings, "start.json").model
    return None if model.needs_inspection else model.parameters


@charts.styled
def draw_law(measured: MeasuredLaw, planned: Sequence[float]) -> str:
    """Draw the losses over compute of the runs, the law with its interval, and the ``planned`` runs in FLOPs.

    The chart is written beside the first run, or to the current folder if the run is in object storage. Returns its
    path.
    """
    days, planned_days = [run.compute / PF_DAY for run in measured.runs], [compute / PF_DAY for compute in planned]
    title = f"Loss over compute: {len(days)} runs and their law"
    figure, (axes,) = charts.new_figure(title, charts.describe_conditions(measured.devices, None))
    curve = np.geomspace(min(*days, *planned_days) / 1.5, max(*days, *planned_days) * 1.5, 60)
    losses = [measured.law.loss(float(day) * PF_DAY) for day in curve]
    interval = [loss.low for loss in losses], [loss.high for loss in losses]
    axes.plot(curve, [loss.middle for loss in losses], label="fitted law")
    axes.fill_between(curve, *interval, alpha=0.15, linewidth=0, label="95% CI")
    axes.plot(days, measured.law.losses, "o", color=charts.ORANGE, label="runs")
    expected = [measured.law.loss(compute) for compute in planned]
    bars = np.array([[loss.middle - loss.low, loss.high - loss.middle] for loss in expected]).T
    middles = [loss.middle for loss in expected]
    axes.errorbar(planned_days, middles, yerr=bars, fmt="s", color=charts.GREEN, label="planned")
    axes.set(xscale="log", xlabel="compute (PF-days)", ylabel=f"validation loss ({measured.unit})")
    charts.label_points(
        axes, list(zip(days, measured.law.losses, strict=True)), [run.run_dir.name for run in measured.runs]
    )
    charts.add_legend(axes)
    folder = measured.runs[0].run_dir.parent.local_path or Path()
    with atomic_file(folder / CHART) as file:
        charts.save(figure, file)
    return str(folder / CHART)
