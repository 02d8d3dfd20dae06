"""Entry: ``python -m tune.search`` finds the fastest way to execute a training under a memory limit.

In: the flags of a training run, a limit, and what to search. Out: ``OUT/NAME/``, a folder or in object storage, with
trials.csv, best.json (for ``python -m train.run --config``) and summary.md, and in MLflow one parent run with one child
per trial.
"""

import dataclasses
from contextlib import nullcontext

from infra import command, flags
from infra.cluster import connected
from infra.console import console
from infra.progress import IMPORTING, doing
from infra.units import format_size
from train.config import load_config
from train.model_config import format_model
from tune.config import SearchConfig
from tune.folder import kept_config, place_of


def main() -> None:
    """Parse, search, report, exit."""
    command.run(run, SearchConfig, module="tune.search", default=defaults)


def defaults() -> SearchConfig:
    """The config whose values flags override: that of the search to resume, with a file's."""
    given = flags.given(SearchConfig, "config", "resume", "out")
    kept = kept_config(place_of(given.out, given.resume), SearchConfig) if given.resume else SearchConfig()
    training = load_config(given.config) if given.config else kept.training
    return dataclasses.replace(kept, out=given.out, training=training)


def run(config: SearchConfig) -> int:
    """Search; torch, Ray and MLflow are imported only now, when the flags are known to be right."""
    with doing(IMPORTING):
        from tune.plan import make_search
        from tune.report import print_control, print_plan, publish
        from tune.session import conduct

    with connected(config.address) if config.cluster else nullcontext():
        search = make_search(config)
        if config.cluster:
            search.resources()  # of a cluster without any, before anything is made
        limit = format_size(search.limit) if config.memory_limit else f"{search.limit / 1e9:.1f} GB (all there is)"
        where = f" of {', '.join(machine.name for machine in search.machines)}" if config.cluster else ""
        console.print(
            f"[bold]{format_model(config.training.model)}[/bold]: {len(search.space.candidates())} candidates for "
            f"{search.space.batch_label}, limit {limit} per process, on {search.device}{where}"
        )
        print_control(search)
        if config.dry_run:
            print_plan(search)
            return 0
        return conduct(search, publish)


if __name__ == "__main__":
    main()
