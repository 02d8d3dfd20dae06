"""Entry: ``python -m tune.ladder`` measures how much each change of a suite gains, compared with a repeated control."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.cli import command, flags
from infra.cli.progress import IMPORTING_ACTIVITY, status
from infra.storage.directory import StorageDir
from tune.config import LadderConfig
from tune.experiment.folder import read_config


def main() -> None:
    command.run(run, LadderConfig, module="tune.ladder", default=defaults)


def defaults() -> LadderConfig:
    """Return the config that flags override: the defaults, or the settings of the ladder to resume."""
    options = flags.parse_only(LadderConfig, "resume", "out")
    config = read_config(StorageDir.of(options.out, options.resume), LadderConfig) if options.resume else LadderConfig()
    return replace(config, out=options.out)


def run(config: LadderConfig) -> int:
    """Run a ladder, and return the exit code.

    torch, Ray and MLflow are imported after the flags are checked, so that invalid flags are reported at once.
    """
    with status(IMPORTING_ACTIVITY):
        from tune.experiment.session import run_experiment
        from tune.suite.plan import introduce, make_ladder
        from tune.suite.report import load_reference, publish

    reference = load_reference(config.compare, config.out) if config.compare else None
    name = config.resume or config.name or f"{Path(config.suite).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = replace(config, name=name)
    print_introduction = partial(introduce, reference=reference)
    return run_experiment(config, make_ladder, print_introduction, partial(publish, reference=reference))


if __name__ == "__main__":
    main()
