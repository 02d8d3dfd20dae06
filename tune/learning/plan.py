"""A search for the lowest loss: its space and strategy resolved for the device, and its trials."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from infra.cli.units import format_duration
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from train.config import ResolvedConfig
from train.data.sources import source_of
from train.estimate.memory import predict_peak
from train.intervals import Estimate
from train.reporting.report import memory_fact, print_device_lines
from train.search_reference import read_measured_speeds
from tune.config import SearchConfig
from tune.experiment.machines import Machine, choose_memory_limit
from tune.experiment.search_plan import (
    TRIAL_CYCLE,
    machines_of,
    prepare_for_data,
    requested_limit,
    search_directory,
    search_params,
)
from tune.experiment.trials import Experiment
from tune.knobs import parse_learning_knobs
from tune.learning.space import LearningSpace, format_value, make_learning_space
from tune.learning.strategy import EXPLORED_SEARCH_FRACTION, LearningStrategy
from tune.learning.text import format_time, loss_text
from tune.space import Candidate, KnobValues
from tune.strategy.base import trial_time_limit
from tune.trial.learning import TRUNK_FRACTION, LearningRequest
from tune.trial.row import Proposal, Stage, TrialRow
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

    mlflow_experiment = "learn"

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
        if proposal and proposal.stage == "final" and any(_may_change_finalists(r.proposal, proposal) for r in running):
            return None
        if proposal and proposal.stage == "final" and not any(r.proposal.stage == "final" for r in running):
            self._discard_checkpoints_except(self.strategy.finalists(rows), rows)
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
        location = self._location(proposal.candidate, proposal.round)
        return LearningRequest(
            *common, config, machine, self.limit, None, None, self.labels(name), seconds=tuple(seconds),
            tokens_per_second=speed.middle, val_batches=val_batches, location=location,
            measures_noise=is_control and proposal.stage == "learn",
        )  # fmt: skip

    def _location(self, candidate: Candidate, seed: int = 0) -> StorageDir:
        """Return the folder of a candidate's trials with this seed; a finalist continues that of its exploration."""
        return self.directory / LEARNED / Proposal(candidate, "learn", seed).key(self.directory.name)

    def _discard_checkpoints_except(self, finalists: Sequence[Candidate], rows: Sequence[TrialRow]) -> None:
        """Remove the checkpoints of candidates that have been explored and are not finalists."""
        for candidate in {row.candidate for row in rows if row.stage == "learn"} - set(finalists):
            Workspace.of(self._location(candidate)).remove()

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
        # Ray takes half a second, which a dry run need not wait for.
        from tune.learning.scheduler import make_scheduler

        return make_scheduler(self.train_time, rows)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return self.strategy.remaining(rows)

    def trial_seconds(self, stage: Stage, seed: int = 0) -> float:
        """Return the maximum time of a trial's training, without its start and validation, in seconds."""
        if stage == "speed":
            return self.config.trial_time
        trunk = TRUNK_FRACTION[self.training.optimization.schedule]
        rungs = self.strategy.rung_seconds(stage, seed)[0 if trunk else -1 :]
        seconds = trunk * rungs[-1] + (1 - trunk) * sum(rungs)
        if stage == "final" and not seed and trunk:  # It continues from the rung at which ASHA stopped it.
            seconds -= rungs[0]
        return seconds

    def seconds_left(self, rows: Sequence[TrialRow]) -> float:
        if self.is_finished(rows):
            return 0.0
        seeds = self.strategy.remaining_finals(rows)
        # Validation, the start of processes and other work on the machine take as much longer as they did so far.
        learned = [row for row in rows if row.stage in ("learn", "final") and row.outcome == "ok"]
        expected = sum(self.trial_seconds(row.stage, row.round) for row in learned)
        ratio = sum(row.seconds for row in learned) / expected if learned else 1.0
        explored = max(0, self.remaining(rows) - len(seeds)) * ratio * self.trial_seconds("learn")
        if self.config.search_time is not None:
            elapsed = sum(row.seconds for row in rows)
            explored = min(explored, max(0.0, EXPLORED_SEARCH_FRACTION * self.config.search_time - elapsed))
        return (explored + ratio * sum(self.trial_seconds("final", seed) for seed in seeds)) / self.parallel

    def describe_best(self, rows: Sequence[TrialRow]) -> str:
        results = self.strategy.results(rows)
        winner = results.winner
        if winner is None:
            return "best so far: none | "
        loss, time = winner.loss(self.train_time), format_duration(self.train_time)
        prediction = f", {loss_text(loss)} predicted after {time}" if loss else ""
        warning = ""
        if results.is_target_out_of_reach:
            warning = f"a loss of {self.config.target_loss:g} seems out of reach, in however much time | "
        return f"{warning}best so far: {self.space.label(winner.candidate)}{prediction} | "

    def describe_running(self, request: TrialRequest) -> str:
        stage, seed = request.proposal.stage, request.proposal.round
        time = format_time(self.trial_seconds(stage, seed))
        return f"running trial {request.number} ({stage}, at most {time} of training): {request.name}"

    def measurements(self, row: TrialRow) -> list[str]:
        if row.stage == "speed":
            return super().measurements(row)
        memory = [] if row.memory is None else [memory_fact(row.memory, self.limit)]
        scale = [f"gradient noise scale {row.noise_scale.middle:,.0f} sequences"] if row.noise_scale else []
        return [*memory, *scale]

    def describe_part(self, row: TrialRow) -> str:
        return f"    {row.name}: {format_rung(row)}" if row.rungs else ""

    def trial_label(self, row: TrialRow) -> str:
        seed = f" seed {row.round}" if row.stage == "final" else ""
        return f"{row.stage:5s} {row.name}{seed}{f' | {format_rung(row)}' if row.rungs else ''}"

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.strategy.propose(rows) is None

    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        return set(machines)

    def params(self) -> dict[str, object]:
        return search_params(self.config, self.data, self.limit)


def _may_change_finalists(running: Proposal, final: Proposal) -> bool:
    """Return whether the result of a ``running`` trial may decide which candidates ``final`` and others are of."""
    return running.stage == "learn" or (running.stage == "final" and running.round == 0 < final.round)


def format_rung(row: TrialRow) -> str:
    """Format the loss of a trial at its last rung, such as ``loss 3.52 after 30m``."""
    return f"loss {row.rungs[-1].loss:.3f} after {format_time(row.rungs[-1].seconds)}"


def make_learning_search(config: SearchConfig, machines: tuple[Machine, ...] = ()) -> LearningSearch:
    """Resolve the search of ``config`` from the data's manifest and the machines, without writing anything."""
    assert config.train_time is not None, "a search for the lowest loss has the time of the final run"
    training = config.training.replace(steps=None, tokens=None, time_budget=None)
    if "schedule" not in parse_learning_knobs(config.knobs):
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
    if manifest.longest_shard("val") <= length:
        raise UserError(
            f"{source.dataset.source} has no held-out window of {length + 1:,} tokens, by which candidates are "
            "compared. Tokenize more books, or with a larger --val-fraction."
        )
    for candidate in space.candidates:
        source.check_enough_tokens(space.config(candidate).batch.global_batch, length, manifest)
    smallest_peak = predict_peak(control.step.replace(micro_batch=1))
    limit = choose_memory_limit(requested, available, smallest_peak, control.model.text)
    windows = sum((shard.tokens - 1) // length for shard in manifest.shards if shard.split == "val")
    batches = {space.config(candidate).batch.global_batch for candidate in space.candidates}
    multiple = math.lcm(*batches)
    val_windows = min(windows, math.ceil(MIN_VAL_TOKENS / length / multiple) * multiple)
    speeds = read_speeds(config, space, device_info.name)
    strategy = LearningStrategy(space, config.train_time, config.target_loss, config.search_time, speeds)
    return LearningSearch(config, directory, machines, manifest, control, limit, space, strategy, val_windows)


def read_speeds(config: SearchConfig, space: LearningSpace, device: str) -> dict[KnobValues, Estimate]:
    """Read the speeds that the search of ``--config`` measured on this device, of candidates with their settings."""
    if config.config is None:
        return {}
    speeds = read_measured_speeds(str(config.config), device, map(space.config, space.candidates))
    return {space.speed_key(c): speed for c, speed in zip(space.candidates, speeds, strict=True) if speed}


def describe_knobs(space: LearningSpace) -> str:
    """Format the values of all knobs, as in ``--knobs``."""
    return " ".join(f"{name}={','.join(map(format_value, values))}" for name, values in space.values.items())
