"""Entry: ``python -m tune.search`` finds the fastest way to execute a training under a memory limit."""

import dataclasses

from infra import command, flags
from infra.progress import IMPORTING, doing
from train.config import load_config
from tune.config import SearchConfig
from tune.folder import kept_config, place_of


def main() -> None:
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
        from tune.report import introduce, publish
        from tune.session import conduct

    return conduct(config, make_search, introduce, publish)


if __name__ == "__main__":
    main()
