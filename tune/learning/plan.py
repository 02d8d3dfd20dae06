"""A search for the lowest loss: its space and strategy resolved for the device, and its trials."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from infra.cli.units import GB, format_duration
from infra.errors import UserError
from infra.storage.workspace import Workspace
from infra.tracking.names import non_default_params
from train.config import ResolvedConfig
from train.data.sources import source_of
from train.estimate.memory import predict_peak
from train.intervals import Estimate
from train.reporting.report import print_device_lines
from train.search_reference import read_search_reference
from tune.config import SearchConfig
from tune.experiment.machines import Machine, choose_memory_limit
from tune.experiment.search_plan import (
    TRIAL_CYCLE,
    machines_of,
    prepare_for_data,
    requested_limit,
    search_directory,
)
from tune.experiment.trials import Experiment
from tune.learning.space import LearningSpace, format_value, make_learning_space
from tune.learning.strategy import LearningStrategy
from tune.space import KnobValues
from tune.strategy.base import trial_time_limit
from tune.trial.learning import LearningRequest
from tune.trial.row import Proposal, TrialRow
from tune.trial.run import StopRule, TrialRequest, pending_row

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler

LEARNED = "learned"
"""Folder of the learning trials' checkpoints in the search's folder; empty once the search has ended."""

MIN_VAL_TOKENS = 2**16
"""Minimum number of held-out tokens on which candidates are compared, if the data have as many."""


@dataclass(frozen=True)
class LearningSearch(Experiment):
    """A search for the lowest loss with all its settings resolved."""

    config: SearchConfig
    """Settings of the search."""
    limit: int
    """Memory limit of a trial's process in bytes."""
    space: LearningSpace
    """Candidates of the search."""
    strategy: LearningStrategy
    """Strategy that chooses candidates."""
    val_windows: int
    """Number of held-out windows on which candidates are compared."""

    mlflow_experiment = "tune"

    @property
    def parallel(self) -> int:
        return self.config.max_concurrent_trials

    @property
    def train_time(self) -> float:
        """Time of the final run in seconds."""
        return self.strategy.train_time

    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[TrialRequest]
    ) -> TrialRequest | None:
        if any(request.proposal.stage == "speed" for request in running):
            return None  # The number of steps of the next trial follows from the speed.
        proposal = self.strategy.propose([*rows, *map(pending_row, running)])
        if proposal and proposal.stage == "final" and any(r.proposal.stage == "learn" for r in running):
            return None  # They may become finalists.
        return proposal and self.trial(proposal, machine, number, rows)

    def trial(self, proposal: Proposal, machine: str, number: int, rows: Sequence[TrialRow]) -> TrialRequest:
        """Create the request for the trial ``number`` of ``proposal`` on ``machine``."""
        name, config = self.space.label(proposal.candidate), self.space.config(proposal.candidate)
        config = config.replace(data=str(self.data), tokens=None, time_budget=None)
        key, search = proposal.key(self.directory.name), self.config
        common = (key, number, name, proposal)
        if proposal.stage == "speed":
            seconds = trial_time_limit(rows, search.trial_time)
            config = config.replace(steps=search.trial_steps, cycle=TRIAL_CYCLE)
            rule = StopRule(seconds, search.speed_tolerance)
            timeout = search.compile_time + seconds
            return TrialRequest(*common, config, machine, self.limit, rule, timeout, self.labels(name))
        speed = self.strategy.speed(proposal.candidate, rows)
        assert speed, "a learning trial follows the trial that measures its speed"
        seconds = self.strategy.rung_seconds(proposal.stage, proposal.round)
        config = self.final_config(config, speed.middle, proposal.round)
        val_batches = math.ceil(self.val_windows / config.batch.global_batch)
        is_control = proposal.candidate == self.space.control
        key = replace(proposal, stage="learn").key(self.directory.name)  # A finalist continues its exploration.
        return LearningRequest(
            *common, config, machine, self.limit, None, None, self.labels(name), seconds=tuple(seconds),
            tokens_per_second=speed.middle, val_batches=val_batches, location=self.directory / LEARNED / key,
            measures_noise=is_control and proposal.stage == "learn",
        )  # fmt: skip

    def discard_checkpoints(self) -> None:
        """Remove the checkpoints of the learning trials, which only serve to continue them."""
        Workspace.of(self.directory / LEARNED).remove()

    def final_config(self, config: ResolvedConfig, tokens_per_second: float, seed: int = 0) -> ResolvedConfig:
        """Return the final run of ``config`` at this speed, with its number of steps and a warm-up that is short enough
        for the first rung."""
        steps_per_second = tokens_per_second / config.step_tokens
        warmup = config.optimization.warmup_steps
        if "warmup_steps" not in self.space.values:
            warmup = min(warmup, max(1, int(0.4 * self.strategy.rung_seconds("learn")[0] * steps_per_second)))
        steps = max(1, int(self.train_time * steps_per_second))
        return config.replace(steps=steps, warmup_steps=warmup, seed=config.dataset.seed + seed)

    def labels(self, name: str) -> dict[str, str]:
        """Return the additional columns of a trial in MLflow's list of runs."""
        return {"settings": name}

    def scheduler(self, rows: Sequence[TrialRow]) -> "TrialScheduler | None":
        from tune.learning.scheduler import (
            make_scheduler,  # Ray takes half a second, which a dry run need not wait for.
        )

        return make_scheduler(self.train_time, rows)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return self.strategy.remaining(rows)

    def describe_best(self, rows: Sequence[TrialRow]) -> str:
        best = self.strategy.best(rows)
        return f"best so far: {self.space.label(best) if best else 'none'} | "

    def describe_part(self, row: TrialRow) -> str:
        return f"    {row.name}: loss {format_rungs(row)}" if row.rungs else ""

    def trial_label(self, row: TrialRow) -> str:
        losses = f", loss {format_rungs(row)}" if row.rungs else ""
        return f"{row.stage:5s} {row.name}{f' seed {row.round}' if row.stage == 'final' else ''}{losses}"

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.strategy.propose(rows) is None

    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        return set(machines)

    def params(self) -> dict[str, object]:
        settings, defaults = (
            config.identity() | {"model": config.training.model.text} for config in (self.config, SearchConfig())
        )
        return non_default_params(settings, defaults) | {
            "model": settings["model"], "data": str(self.data), "memory_limit": f"{self.limit / GB:.2f} GB",
        }  # fmt: skip


def format_rungs(row: TrialRow) -> str:
    """Format the losses of a trial by the time of the final run."""
    return ", ".join(f"{rung.loss:.3f} after {format_duration(round(rung.seconds, 1))}" for rung in row.rungs[-1:])


def make_learning_search(config: SearchConfig, machines: tuple[Machine, ...] = ()) -> LearningSearch:
    """Resolve the search of ``config`` from the data's manifest and the machines, without writing anything."""
    assert config.train_time is not None, "a search for the lowest loss has the time of the final run"
    training = config.training.replace(steps=None, tokens=None, time_budget=None)
    if "schedule" not in " ".join(config.knobs):
        training = training.replace(schedule="wsd")
    training, manifest = prepare_for_data(config, training)
    directory = search_directory(config)
    machines = machines or machines_of(config, training, manifest)
    if config.gpu:
        training = training.replace(device="cuda")
    requested, available = requested_limit(config, directory), min(machine.memory for machine in machines)
    device_info = replace(machines[0].device, memory=requested or available)
    space = make_learning_space(training, config.knobs, device_info)
    control = space.config(space.control)
    print_device_lines(control, device_info)
    source, length = source_of(control.dataset), control.model.context_length
    source.check_lengths(length, TRIAL_CYCLE, manifest)
    for candidate in space.candidates:
        source.check_enough_tokens(space.config(candidate).batch.global_batch, length, manifest)
    smallest_peak = predict_peak(control.step.replace(micro_batch=1))
    limit = choose_memory_limit(requested, available, smallest_peak, control.model.text)
    windows = manifest.splits["val"]["tokens"] // (length + 1)
    batches = {space.config(candidate).batch.global_batch for candidate in space.candidates}
    multiple = math.lcm(*batches)
    val_windows = min(windows, math.ceil(MIN_VAL_TOKENS / length / multiple) * multiple)
    if not windows:
        raise UserError(
            f"{source.dataset.source} has no held-out windows, by which candidates are compared. Tokenize more books."
        )
    speeds = read_speeds(config, space, device_info.name)
    strategy = LearningStrategy(space, config.train_time, config.target_loss, config.search_time, speeds)
    return LearningSearch(config, directory, machines, manifest, control, limit, space, strategy, val_windows)


def read_speeds(config: SearchConfig, space: LearningSpace, device: str) -> dict[KnobValues, Estimate]:
    """Read the speed that the search of ``--config`` measured on this device, for the candidates with this speed."""
    speeds: dict[KnobValues, Estimate] = {}
    for candidate in space.candidates if config.config else ():
        reference = read_search_reference(str(config.config), space.config(candidate).flat())
        if reference and reference.device == device:
            speeds[space.speed_key(candidate)] = reference.speed
    return speeds


def describe_knobs(space: LearningSpace) -> str:
    """Format the values of all knobs, as in ``--knobs``."""
    return " ".join(f"{name}={','.join(map(format_value, values))}" for name, values in space.values.items())
