"""Entry: ``python -m tune.search`` finds the fastest way to execute a global batch under a memory limit.

In: the flags of a training run, a limit, and the knobs to search. Out: ``OUT/NAME/``, a folder or in object storage,
with trials.csv, best.json (for ``python -m train.run --config``) and summary.md, and in MLflow one parent run with one
child per trial. Wiring only.
"""

import dataclasses

from infra import command
from infra.errors import UserError
from infra.help import Sections
from infra.progress import IMPORTING, doing
from train.config import GROUPS, load_config
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
            defaults = dataclasses.replace(kept_config(place_of(out, resume)), out=out)
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


def run(config: SearchConfig) -> int | None:
    """Search; torch, Ray and MLflow are imported only now, when the flags are known to be right."""
    with doing(IMPORTING):
        from tune.session import search

    return search(config)


if __name__ == "__main__":
    main()
