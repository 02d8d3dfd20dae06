"""Entry: ``python -m tune.search`` finds the fastest way to execute a training under a memory limit."""

import dataclasses

from infra.cli import command, flags
from infra.cli.progress import IMPORTING_ACTIVITY, status
from infra.storage.directory import StorageDir
from train.config import load_config
from tune.config import SearchConfig
from tune.experiment.folder import read_config


def main() -> None:
    command.run(run, SearchConfig, module="tune.search", default=defaults)


def defaults() -> SearchConfig:
    """Return the config that flags override: the defaults or the settings of the search to resume, and those of
    --config."""
    options = flags.parse_only(SearchConfig, "config", "resume", "out")
    config = read_config(StorageDir.of(options.out, options.resume), SearchConfig) if options.resume else SearchConfig()
    training = load_config(options.config) if options.config else config.training
    return dataclasses.replace(config, out=options.out, training=training)


def run(config: SearchConfig) -> int:
    """Run a search, and return the exit code.

    torch, Ray and MLflow are imported after the flags are checked, so that invalid flags are reported at once.
    """
    if config.objective == "loss":
        with status(IMPORTING_ACTIVITY):
            from tune.experiment.session import run_experiment
            from tune.learning.introduction import introduce_learning
            from tune.learning.plan import make_learning_search
            from tune.learning.report import publish_learning

        return run_experiment(config, make_learning_search, introduce_learning, publish_learning)
    with status(IMPORTING_ACTIVITY):
        from tune.experiment.search_plan import make_search
        from tune.experiment.session import run_experiment
        from tune.reporting.report import introduce, publish

    return run_experiment(config, make_search, introduce, publish)


if __name__ == "__main__":
    main()
