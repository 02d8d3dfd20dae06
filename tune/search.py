"""Entry: ``python -m tune.search`` finds the fastest way to execute a global batch under a memory limit.

In: the flags of a training run, a limit, and the knobs to search. Out: ``OUT/NAME/``, a folder or in object storage,
with trials.csv, best.json (for ``python -m train.run --config``) and summary.md, and in MLflow one parent run with one
child per trial. Wiring only.
"""

import dataclasses
from contextlib import nullcontext

from infra import command
from infra.cluster import connected
from infra.console import console
from infra.errors import UserError
from infra.help import Sections
from infra.progress import IMPORTING, doing
from infra.units import format_size
from train.config import GROUPS, load_config
from train.model_config import format_model
from tune.config import SearchConfig, with_global_batch
from tune.folder import kept_config, place_of

COMMON = (
    "data", "model", "global_batch", "memory_limit", "knobs", "trial_steps", "trial_time", "confirm", "name", "resume",
)  # fmt: skip
"""Flags that most searches are started with."""


def main() -> None:
    """Parse, search, report, exit."""
    defaults = SearchConfig()
    try:
        resume = command.flag_value("--resume")
        if resume:
            out = command.flag_value("--out") or defaults.out
            defaults = dataclasses.replace(kept_config(place_of(out, resume), SearchConfig), out=out)
        path, batch = command.flag_value("--config"), command.flag_value("--global-batch")
        training = load_config(path) if path else defaults.training
        if batch and batch.isdecimal():
            training = with_global_batch(training, int(batch))
        defaults = dataclasses.replace(defaults, training=training)
    except UserError as mistake:
        command.refuse(mistake)
    command.run(
        run,
        SearchConfig,
        module="tune.search",
        description="Find the micro-batch, and the knobs, with the most tokens per second under a memory limit.",
        default=defaults,
        sections=Sections(COMMON, GROUPS),
    )


def run(config: SearchConfig) -> int:
    """Search; torch, Ray and MLflow are imported only now, when the flags are known to be right."""
    with doing(IMPORTING):
        from tune.plan import make_search
        from tune.report import SearchReport, print_control, print_plan
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
        return conduct(search, SearchReport)


if __name__ == "__main__":
    main()
