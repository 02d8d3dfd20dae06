"""Comparisons of runs: searches for the fastest configuration under a memory limit, and ladders (ablation studies).

From Python: ``find_fastest(SearchConfig(...))``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.config import ResolvedConfig
    from tune.config import SearchConfig


def find_fastest(config: "SearchConfig", *, verbose: bool = False) -> "ResolvedConfig":
    """Run a search as ``python -m tune.search`` does, and return the best configuration, for ``train.train``.

    That is the fastest one or, with ``objective="loss"``, the one that learns fastest.

    With ``verbose`` it prints what the command prints. Raises ``infra.errors.UserError`` for invalid settings and if
    the search has no winner. Raises ``KeyboardInterrupt`` after Ctrl-C; the search can then be resumed with
    ``SearchConfig(resume=...)``.
    """
    import dataclasses
    import json

    from infra.cli.console import quiet
    from infra.cli.interrupts import EXIT_INTERRUPTED, interrupts
    from infra.errors import UserError
    from infra.storage.directory import StorageDir
    from train.config import ResolvedConfig, config_from_json
    from tune.experiment.search_plan import search_name
    from tune.search import run

    config = dataclasses.replace(config, name=search_name(config))
    with interrupts.handled(), quiet(not verbose):
        code = run(config)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    directory = StorageDir.of(config.out, search_name(config))
    if not directory.exists("best.json"):
        raise UserError(
            f"The search in {directory} has no winner. Read the outcome of each trial in {directory}/summary.md."
        )
    settings = json.loads(directory.read("best.json"))["config"]
    return ResolvedConfig.from_resolved(config_from_json(settings, f"{directory}/best.json"))
