"""What a search will do, decided before anything runs.

In: a search's config. Out: a :class:`Search`, which whoever runs, records or reports the search is handed whole.
Raises ``UserError`` in one sentence for what cannot work, because a search that starts anyway wastes hours.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.place import Place, WorkingCopy
from pipeline.shards import Manifest, read_manifest
from train.checkpoint.run_folder import new_place
from train.resolve import resolve
from tune.config import SearchConfig
from tune.device import Machine, make_prior, memory_limit, trial_machines, trial_resources
from tune.folder import TRIALS, kept_identity, place_of
from tune.space import Space, make_space, parse_knobs
from tune.strategy.base import Confirmed, Grid, Retrying, Strategy
from tune.strategy.memory_aware import MemorySearcher


@dataclass(frozen=True)
class Search:
    """One search, with everything decided that its config leaves open."""

    config: SearchConfig
    place: Place
    """Where it belongs: --out and its name."""
    machines: tuple[Machine, ...]
    """The machines on which its trials may run."""
    manifest: Manifest
    space: Space
    """The candidates, around a training that is resolved for the device of the trials."""
    memory: MemorySearcher
    """What is expected of candidates, whichever strategy chooses them; it has the limit."""
    strategy: Strategy
    copy: WorkingCopy | None = None
    """The place on this machine, once it is locked."""

    @property
    def folder(self) -> Path:
        """The place on this machine."""
        return self.working_copy.folder

    @property
    def working_copy(self) -> WorkingCopy:
        """Where this driver writes what belongs to the place. Only a locked search in object storage has one."""
        return self.copy or WorkingCopy(self.place, self.place.folder)

    @property
    def trials(self) -> Path:
        """The folder of the rows."""
        return self.folder / TRIALS

    @property
    def data(self) -> Place:
        """The token shards, by a whole path or URI, because trials run elsewhere."""
        return Place.of(self.config.training.data)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.space.base.device

    def resources(self) -> dict[str, float]:
        """What each trial asks the connected Ray for."""
        return trial_resources(self.config.training, use_gpu=self.device == "cuda")

    def send(self, *names: str) -> None:
        """Send files of the folder to the place; nothing to do where that is the folder itself."""
        self.working_copy.send(*names)

    @property
    def limit(self) -> int:
        """Most memory that a trial's process may use, in bytes."""
        return int(self.memory.limit)

    @property
    def study(self) -> str:
        """What the candidates have in common."""
        return "free global batch" if self.space.free else "fixed global batch"

    def identity(self) -> dict[str, Any]:
        """What a search must share with this one to be continued as it."""
        found = {"data": self.manifest.fingerprint, "memory_limit": self.limit, "device": self.device}
        return self.config.identity() | found


def search_name(config: SearchConfig) -> str:
    """The name of the search and of its folder."""
    return config.resume or config.name or f"search-{time.strftime('%Y%m%d-%H%M%S')}"


def make_search(config: SearchConfig) -> Search:
    """The search that ``config`` describes; reads the data's manifest and the device, and writes nothing."""
    manifest = read_manifest(config.training.data)
    name = search_name(config)
    place = place_of(config.out, name)
    if not (config.resume or config.dry_run):
        new_place(config.out, name, begun=(TRIALS, Place.LOCK))
    machines = trial_machines(config)
    training = resolve(config.training, machines[0].device)
    asked = config.memory_limit
    if config.resume and not asked:  # or another set of machines would make it another search
        asked = kept_identity(place).get("memory_limit")
    limit = memory_limit(asked, training, min(machine.memory for machine in machines))
    space = make_space(training, parse_knobs(config.knobs), free=config.free_global_batch)
    memory = MemorySearcher(space, make_prior(space), limit)
    explore = _explorer(config, space, memory)
    strategy = Confirmed(Retrying(explore), space, config.confirm)
    return Search(config, place, machines, manifest, space, memory, strategy)


def _explorer(config: SearchConfig, space: Space, memory: MemorySearcher) -> Strategy:
    """The strategy that ``--searcher`` names. Raises ``UserError`` when Optuna is not installed."""
    if config.searcher == "memory":
        return memory
    if config.searcher == "grid":
        return Grid(space)
    from tune.strategy.optuna_tpe import OptunaSearcher, optuna_trials

    return OptunaSearcher(space, optuna_trials(space), config.training.seed)
