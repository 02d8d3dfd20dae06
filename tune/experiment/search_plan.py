"""The plan of a search: its space and strategy resolved for the device, checked before the first trial."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from infra.cli.console import console
from infra.cli.units import GB, format_duration
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.tracking.names import changed
from pipeline.shards import read_manifest
from train.config import Cycle
from train.data.source import refuse_short_splits, refuse_vast_steps
from train.data.tokenizer import with_vocabulary_of
from train.estimate.gpu_rates import planned
from train.model_config import format_model
from train.resolved import resolve
from train.run_files.run_folder import new_place
from tune.config import SearchConfig
from tune.experiment.folder import TRIALS, place_of, read_record
from tune.experiment.machines import Machine, make_prior, memory_limit, trial_machines
from tune.experiment.trials import Experiment
from tune.space import ACCUMULATION, Candidate, Space, make_space, settings
from tune.strategy.base import Confirmed, Grid, Retrying, Strategy, enough_seconds
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.nodes import control_of, first_row, scaled_to_first_node, times_slower
from tune.strategy.ranking import rank
from tune.trial.row import Proposal, TrialRow
from tune.trial.run import Early, Request, pending

BEYOND = 1.25
"""Multiple of the memory limit up to which micro-batches are candidates, because predictions may be too high."""

TRIAL_CYCLE = Cycle(1, 0)


@dataclass(frozen=True)
class Search(Experiment):
    """One search with all its settings resolved."""

    config: SearchConfig
    limit: int
    space: Space
    """The candidates; its base is resolved for the device of the trials."""
    memory: MemorySearcher
    """Predicts memory and speed of candidates under the limit, whichever strategy chooses them."""
    strategy: Strategy

    collection = "tune"

    @property
    def parallel(self) -> int:
        return self.config.parallel

    @property
    def study(self) -> str:
        """The property of the space that all candidates share, as a label."""
        return "free global batch" if self.space.free else "fixed global batch"

    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[Request]
    ) -> Request | None:
        if running and first_row(rows) is None:
            return None  # The first trial is the reference for all others.
        proposal = control_of(machine, rows)
        if proposal is None:
            proposal = self.strategy.propose(scaled_to_first_node([*rows, *map(pending, running)]))
            if proposal and proposal.stage == "confirm" and running:
                return None  # Confirmations run one after another on one machine, so that they can be compared.
        return proposal and self.trial(proposal, machine, number, rows)

    def trial(self, proposal: Proposal, machine: str, number: int, rows: Sequence[TrialRow]) -> Request:
        if proposal.predicted_memory is None:  # Only the memory-aware searcher predicts it.
            predicted = self.memory.curves(scaled_to_first_node(rows)).memory(proposal.candidate)
            proposal = replace(proposal, predicted_memory=predicted)
        factor = times_slower(machine, rows)
        proposal = replace(
            proposal, predicted_speed=proposal.predicted_speed and proposal.predicted_speed / factor,
            bar=proposal.bar and proposal.bar / factor,
        )  # fmt: skip
        config = self.config
        seconds = enough_seconds(rows, config.trial_time)
        if seconds > config.trial_time:
            more_time = format_duration(round(seconds, 1))
            console.print(f"    --trial-time was too short; this trial gets {more_time} for its steps")
        trial = replace(
            self.space.config(proposal.candidate), data=str(self.data), steps=config.trial_steps, tokens=None,
            time_budget=None, cycle=TRIAL_CYCLE,
        )  # fmt: skip
        return Request(
            proposal.key(self.place.name), number, self.space.label(proposal.candidate), proposal, trial.to_json(),
            machine, self.limit, Early(seconds, config.trial_precision), config.compile_time + seconds,
        )  # fmt: skip

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return self.strategy.remaining(scaled_to_first_node(rows))

    def best(self, rows: Sequence[TrialRow]) -> str:
        """The best candidate so far, ranked without the confirmation round that is not complete."""
        rows = scaled_to_first_node(rows)
        ranked = rank([row for row in rows if row.stage != "confirm" or row.round < rows[-1].round])
        best = [f"{self.space.name(entry.candidate)}, {entry.speed.middle:,.0f} tokens/s" for entry in ranked[:1]]
        return f"best so far: {''.join(best) or 'none'} | "

    def named(self, row: TrialRow) -> str:
        return f"{row.stage:7s} {self.space.name(row.candidate)}"

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.strategy.propose(scaled_to_first_node(rows)) is None

    def usable(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """Machines on which the control did not fail. Without it, the speeds of a machine cannot be compared."""
        without_control = {row.node for row in rows if row.stage == "control" and not row.tokens_per_second}
        usable = set(machines) - without_control
        if without_control and not usable:
            first = first_row(rows)
            reference = first.node if first else "the other machines"
            raise UserError(
                f"The control failed on {', '.join(sorted(without_control))}, so trials there cannot be compared with "
                f"those of {reference}. Resume with --resume {self.place.name} when {reference} is back."
            )
        return usable

    def params(self) -> dict[str, object]:
        """Settings that differ from the defaults; model, data and memory limit always."""
        settings, defaults = (
            config.identity() | {"model": format_model(config.training.model)}
            for config in (self.config, SearchConfig())
        )
        limit = f"{self.limit / GB:.2f} GB"
        return changed(settings, defaults) | {
            "model": settings["model"], "data": str(self.data), "memory_limit": limit,
        }  # fmt: skip

    def labels(self, row: TrialRow) -> dict[str, str]:
        knobs = settings(row.candidate.knobs)
        batch = {"global batch": str(self.space.global_batch(row.candidate))}
        return batch | ({"knobs": self.space.knobs_label(knobs) or "same as control"} if knobs else {})


def search_name(config: SearchConfig) -> str:
    return config.resume or config.name or f"search-{time.strftime('%Y%m%d-%H%M%S')}"


def make_search(config: SearchConfig) -> Search:
    """The search that ``config`` describes. Reads the data's manifest and the device, and writes nothing."""
    manifest = read_manifest(config.training.data)
    name = search_name(config)
    place = place_of(config.out, name)
    if not (config.resume or config.dry_run):
        new_place(config.out, name, begun=(TRIALS, StorageDir.LOCK))
    if config.gpu:
        config, machines = (
            replace(config, training=replace(config.training, device="cuda")),
            (_planned_machine(config.gpu),),
        )
    else:
        machines = trial_machines(
            config.training, manifest.fingerprint, cluster=config.cluster, parallel=config.parallel
        )
    requested, available = config.memory_limit, min(machine.memory for machine in machines)
    if config.resume and not requested:  # The machines may have changed, but the limit is part of the identity.
        requested = read_record(place, config.kind).identity.get("memory_limit")
    facts = replace(machines[0].device, memory=requested or available)
    training = resolve(with_vocabulary_of(config.training, manifest), facts)
    refuse_short_splits(replace(training, cycle=TRIAL_CYCLE), manifest)
    refuse_vast_steps(training, manifest)
    limit = memory_limit(requested, training, available)
    sequences = manifest.splits["train"]["tokens"] // training.model.context_length
    space = make_space(training, config.knobs, config.accumulations, sequences)
    prior = make_prior(space)
    if space.free:  # With a fixed global batch, its few divisors are all candidates.
        space = space.within(lambda candidate: prior(candidate) <= BEYOND * limit)
    for knobs in space.combinations:  # A value that the device does not support is reported before the first trial.
        resolve(space.config(Candidate(space.sizes_of(knobs)[0], knobs)), facts)
    memory = MemorySearcher(space, prior, limit)
    for number in config.accumulations:
        smallest = [Candidate(space.sizes_of(k)[0], k) for k in space.combinations if (ACCUMULATION, number) in k]
        if not any(map(memory.curves([]).fits, smallest)):
            raise UserError(
                f"--accumulations {number}: no micro-batch is predicted to fit {limit / GB:.2f} GB. Remove {number}, "
                "or raise --memory-limit."
            )
    explorer = _make_explorer(config, space, memory)
    strategy = Confirmed(Retrying(explorer), space, config.confirm)
    control = space.config(space.control)
    return Search(config, place, machines, manifest, control, limit, space, memory, strategy)


def _planned_machine(gpu: str) -> Machine:
    """An idle machine with the GPU of ``--gpu``."""
    facts = planned(gpu).facts
    return Machine(facts.name, facts, facts.memory)


def _make_explorer(config: SearchConfig, space: Space, memory: MemorySearcher) -> Strategy:
    if config.searcher == "memory":
        return memory
    if config.searcher == "grid":
        return Grid(space)
    from tune.strategy.optuna_tpe import OptunaSearcher, optuna_trials

    return OptunaSearcher(space, optuna_trials(space), config.training.seed)
