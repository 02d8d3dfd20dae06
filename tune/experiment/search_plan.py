"""The plan of a search: its space and strategy resolved for the device, checked before the first trial."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from infra.cli.console import console
from infra.cli.units import GB, format_duration
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.tracking.names import non_default_params
from pipeline.shards import Manifest, read_manifest
from train.config import Cycle, TrainConfig
from train.data.sources import source_of
from train.estimate.memory import predict_peak
from train.reporting.report import print_device_lines
from train.resolved import check_device_support, prepare, prepare_for_plan, resolve
from train.run_files.run_folder import new_directory
from tune.config import SearchConfig
from tune.experiment.folder import TRIALS, read_record
from tune.experiment.machines import Machine, choose_memory_limit, make_prior, planned_machine, trial_machines
from tune.experiment.trials import Experiment
from tune.space import ACCUMULATION, Candidate, Space, make_space, without_accumulation
from tune.strategy.base import ConfirmBest, GridStrategy, RetryShortTrials, Strategy, trial_time_limit
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.nodes import normalize_speeds, pending_control, reference_row, slowdown_factor
from tune.strategy.ranking import rank
from tune.trial.row import Proposal, TrialRow
from tune.trial.run import StopRule, TrialRequest, pending_row

MAX_LIMIT_MULTIPLE = 1.25
"""Multiple of the memory limit up to which micro-batches are candidates, because predictions may be too high."""

TRIAL_CYCLE = Cycle(1, 0)
"""Cycle of a trial: one step without validation, so that its time is reported after every step."""


@dataclass(frozen=True)
class Search(Experiment):
    """A search with all its settings resolved."""

    config: SearchConfig
    """Settings of the search."""
    limit: int
    """Memory limit of a trial's process in bytes."""
    space: Space
    """Space of the candidates, with a base that is resolved for the device of the trials."""
    memory: MemorySearcher
    """Memory-aware searcher, which predicts memory and speed of candidates for every strategy."""
    strategy: Strategy
    """Strategy that chooses candidates."""

    mlflow_experiment = "tune"

    @property
    def parallel(self) -> int:
        return self.config.max_concurrent_trials

    @property
    def space_label(self) -> str:
        """Label of the space, for best.json and a tag in MLflow."""
        return "free global batch" if self.space.is_accumulation_searched else "fixed global batch"

    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[TrialRequest]
    ) -> TrialRequest | None:
        if running and reference_row(rows) is None:
            return None  # The first trial is the reference for all others.
        proposal = pending_control(machine, rows)
        if proposal is None:
            proposal = self.strategy.propose(normalize_speeds([*rows, *map(pending_row, running)]))
            if proposal and proposal.stage == "confirm" and running:
                return None  # Confirmations run one after another on one machine, so that they can be compared.
        return proposal and self.trial(proposal, machine, number, rows)

    def trial(self, proposal: Proposal, machine: str, number: int, rows: Sequence[TrialRow]) -> TrialRequest:
        """Create the request for the trial ``number`` of ``proposal`` on ``machine``, with its predictions."""
        if proposal.predicted_memory is None:  # Only the memory-aware searcher predicts it.
            predicted = self.memory.curves(normalize_speeds(rows)).memory(proposal.candidate)
            proposal = replace(proposal, predicted_memory=predicted)
        factor = slowdown_factor(machine, rows)
        proposal = replace(
            proposal, predicted_speed=proposal.predicted_speed and proposal.predicted_speed / factor,
            speed_threshold=proposal.speed_threshold and proposal.speed_threshold / factor,
        )  # fmt: skip
        config = self.config
        seconds = trial_time_limit(rows, config.trial_time)
        if seconds > config.trial_time:
            more_time = format_duration(round(seconds, 1))
            console.print(f"    --trial-time was too short; this trial has a limit of {more_time} for its steps")
        trial = self.space.config(proposal.candidate).replace(
            data=str(self.data), steps=config.trial_steps, tokens=None, time_budget=None, cycle=TRIAL_CYCLE,
        )  # fmt: skip
        return TrialRequest(
            proposal.key(self.directory.name), number, self.space.short_label(proposal.candidate),
            proposal, trial,
            machine, self.limit, StopRule(seconds, config.speed_tolerance), config.compile_time + seconds,
            self.labels(proposal.candidate),
        )  # fmt: skip

    def labels(self, candidate: Candidate) -> dict[str, str]:
        """Return the additional columns of a trial in MLflow's list of runs."""
        knobs = without_accumulation(candidate.knobs)
        is_searched = self.space.is_accumulation_searched
        batch = {"global_batch": str(self.space.global_batch(candidate))} if is_searched else {}
        return batch | ({"knobs": self.space.knobs_label(knobs) or "same as control"} if knobs else {})

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return self.strategy.remaining(normalize_speeds(rows))

    def describe_best(self, rows: Sequence[TrialRow]) -> str:
        """Format the best candidate so far, ranked without the unfinished confirmation round."""
        rows = normalize_speeds(rows)
        ranked = rank([row for row in rows if row.stage != "confirm" or row.round < rows[-1].round])
        best = [f"{self.space.long_label(entry.candidate)}, {entry.speed.middle:,.0f} tokens/s" for entry in ranked[:1]]
        return f"best so far: {''.join(best) or 'none'} | "

    def trial_label(self, row: TrialRow) -> str:
        return f"{row.stage:7s} {self.space.long_label(row.candidate)}"

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.strategy.propose(normalize_speeds(rows)) is None

    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """Find the machines on which the control did not fail, because other machines' speeds cannot be compared."""
        without_control = {row.node for row in rows if row.stage == "control" and not row.speed}
        usable = set(machines) - without_control
        if without_control and not usable:
            row = reference_row(rows)
            reference = row.node if row else "the other machines"
            raise UserError(
                f"The control failed on {', '.join(sorted(without_control))}, so trials there cannot be compared with "
                f"those of {reference}. Resume with --resume {self.directory.name} when {reference} is back."
            )
        return usable

    def params(self) -> dict[str, object]:
        return search_params(self.config, self.data, self.limit)


def search_name(config: SearchConfig) -> str:
    """Return the name of the search, by default with the time."""
    return config.resume or config.name or f"search-{time.strftime('%Y%m%d-%H%M%S')}"


def make_search(config: SearchConfig, machines: tuple[Machine, ...] = ()) -> Search:
    """Resolve the search of ``config`` from the data's manifest and the machines, without writing anything.

    ``machines`` run its trials; by default this machine, or the machines of the cluster.
    """
    training, manifest = prepare_for_data(config, config.training)
    directory = search_directory(config)
    machines = machines or machines_of(config, training, manifest)
    if config.gpu:
        training = training.replace(device="cuda")
    requested, available = requested_limit(config, directory), min(machine.memory for machine in machines)
    device_info = replace(machines[0].device, memory=requested or available)
    training = resolve(training, device_info)
    print_device_lines(training, device_info)
    source, context_length = source_of(training.dataset), training.model.context_length
    source.check_lengths(context_length, TRIAL_CYCLE, manifest)
    source.check_enough_tokens(training.batch.global_batch, context_length, manifest)
    smallest_peak = predict_peak(training.step.replace(micro_batch=1))
    limit = choose_memory_limit(requested, available, smallest_peak, training.model.text)
    sequences = manifest.splits["train"]["tokens"] // training.model.context_length
    space = make_space(training, config.knobs, config.accumulations, sequences)
    prior = make_prior(space)
    if space.is_accumulation_searched:  # With a fixed global batch, its few divisors are all candidates.
        space = space.restrict(lambda candidate: prior(candidate) <= MAX_LIMIT_MULTIPLE * limit)
    for knobs in space.combinations:  # A value that the device does not support is reported before the first trial.
        candidate = Candidate(space.micro_batches_for(knobs)[0], knobs)
        check_device_support(space.config(candidate).execution, device_info)
    memory = MemorySearcher(space, prior, limit)
    for number in config.accumulations:
        smallest = [
            Candidate(space.micro_batches_for(k)[0], k) for k in space.combinations if (ACCUMULATION, number) in k
        ]
        if not any(map(memory.curves([]).fits, smallest)):
            raise UserError(
                f"--accumulations {number}: no micro-batch is predicted to fit {limit / GB:.2f} GB. Remove {number}, "
                "or increase --memory-limit."
            )
    explorer = _make_explorer(config, space, memory)
    strategy = ConfirmBest(RetryShortTrials(explorer), space, config.confirm_rounds)
    control = space.config(space.control)
    return Search(config, directory, machines, manifest, control, limit, space, memory, strategy)


def prepare_for_data(config: SearchConfig, training: TrainConfig) -> tuple[TrainConfig, Manifest]:
    """Prepare the settings of the control for its data, which a dry run assumes if there are none."""
    if config.dry_run:
        return prepare_for_plan(training)
    manifest = read_manifest(training.dataset.data)
    return prepare(training, manifest), manifest


def search_params(config: SearchConfig, data: StorageDir, limit: int) -> dict[str, object]:
    """Return a search's params in MLflow: settings that differ from the defaults, model, data and memory limit."""
    settings, defaults = (
        config.identity() | {"model": config.training.model.text} for config in (config, SearchConfig())
    )
    limit_text = f"{limit / GB:.2f} GB"
    return non_default_params(settings, defaults) | {
        "model": settings["model"], "data": str(data), "memory_limit": limit_text,
    }  # fmt: skip


def search_directory(config: SearchConfig) -> StorageDir:
    """Return the folder of the search. Raises ``UserError`` if a new search cannot use it."""
    name = search_name(config)
    if not (config.resume or config.dry_run):
        new_directory(config.out, name, allowed_leftovers=(TRIALS, StorageDir.LOCK_FILE))
    return StorageDir.of(config.out, name)


def machines_of(config: SearchConfig, training: TrainConfig, manifest: Manifest) -> tuple[Machine, ...]:
    """Find the machines that run the trials: this one, those of the cluster, or one with the GPU of a plan."""
    if config.gpu:
        return (planned_machine(config.gpu, config.memory_limit),)
    dataset, execution = training.dataset, training.execution
    cluster, parallel = config.cluster, config.max_concurrent_trials
    return trial_machines(dataset, execution, manifest.fingerprint, cluster=cluster, parallel=parallel)


def requested_limit(config: SearchConfig, directory: StorageDir) -> int | None:
    """Return the memory limit in bytes that the user requested now or, for a resumed search, at its start.

    The machines may have changed since then, but the limit is part of the search's identity.
    """
    if config.resume and not config.memory_limit:
        return read_record(directory, config.kind).identity.get("memory_limit")
    return config.memory_limit


def _make_explorer(config: SearchConfig, space: Space, memory: MemorySearcher) -> Strategy:
    if config.searcher == "memory":
        return memory
    if config.searcher == "grid":
        return GridStrategy(space)
    from tune.strategy.optuna_tpe import OptunaSearcher, optuna_trials

    return OptunaSearcher(space, optuna_trials(space), config.training.dataset.seed)
