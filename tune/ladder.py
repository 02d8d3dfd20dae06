"""Entry: ``python -m tune.ladder`` measures what each change of a suite gains, against a control that is repeated.

In: a suite, token shards, and a budget per rung. Out: ``OUT/NAME/``, a folder or in object storage, with
standings.json, best.json (for ``python -m train.run --config``), summary.md and two charts, and in MLflow one parent
run with one child per run.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.markup import escape

from infra import command, flags
from infra.cluster import connected
from infra.console import console
from infra.errors import UserError
from infra.machines import refuse_unshared
from infra.progress import IMPORTING, doing
from tune.config import LadderConfig
from tune.folder import kept_config, place_of


def main() -> None:
    """Parse, run the rungs, print the table, exit."""
    command.run(run, LadderConfig, module="tune.ladder", default=defaults)


def defaults() -> LadderConfig:
    """The config whose values flags override: that of the ladder to resume."""
    given = flags.given(LadderConfig, "resume", "out")
    kept = kept_config(place_of(given.out, given.resume), LadderConfig) if given.resume else LadderConfig()
    return replace(kept, out=given.out)


def run(config: LadderConfig) -> int:
    """Run a ladder; torch, Ray and MLflow are imported only now, when the flags are known to be right."""
    with doing(IMPORTING):
        from tune.session import conduct
        from tune.suite import report
        from tune.suite.plan import make_ladder, print_plan

    before = report.load(config.compare, config.out) if config.compare else None
    config = config.with_ends()
    config = replace(config, name=config.resume or config.name or default_name(config))
    with connected(config.address) if config.cluster else nullcontext():
        ladder = make_ladder(config)
        if before == report.NAME and ladder.suite.name != "a100":
            raise UserError(f"--compare study is of the suite a100, not of {ladder.suite.name}: give --suite a100.")
        if config.cluster:
            ladder.resources()  # of a cluster without any, before anything is made
            if not ladder.place.remote:
                refuse_unshared("--out", ladder.place.folder.parent)
        suite = ladder.suite
        heading = f"[bold]{escape(suite.name)}[/bold]: {escape(suite.title)}; {len(suite.rungs)} rungs in"
        console.print(heading, escape(str(ladder.place)))
        if config.dry_run:
            print_plan(ladder, before)
            return 0
        return conduct(ladder, partial(report.publish, before=before))


def default_name(config: LadderConfig) -> str:
    """The name of a ladder that is given none."""
    return f"{Path(config.suite).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


if __name__ == "__main__":
    main()
