"""Entry: ``python -m tune.ladder`` measures what each change of a suite gains, against a control that is repeated."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra import command, flags
from infra.progress import IMPORTING, doing
from tune.config import LadderConfig
from tune.folder import kept_config, place_of


def main() -> None:
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
        from tune.suite.plan import introduce, make_ladder
        from tune.suite.report import load, publish

    before = load(config.compare, config.out) if config.compare else None
    name = config.resume or config.name or f"{Path(config.suite).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = replace(config, name=name)
    return conduct(config, make_ladder, partial(introduce, before=before), partial(publish, before=before))


if __name__ == "__main__":
    main()
