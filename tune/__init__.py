"""Runs in, comparisons out: the fastest way to execute a global batch under a memory limit, and what each change gains.

From Python: ``find_fastest(SearchConfig(...))``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.config import TrainConfig
    from tune.config import SearchConfig


def find_fastest(config: "SearchConfig") -> "TrainConfig":
    """Search, as ``python -m tune.search`` does, and return the fastest configuration, for ``train.train``.

    Raises ``infra.errors.UserError`` for what a user can correct, and where no trial was within the limit, and
    ``KeyboardInterrupt`` after Ctrl-C, with what was found kept for ``SearchConfig(resume=...)``.
    """
    import dataclasses
    import json

    from infra.command import INTERRUPTED, for_a_program
    from infra.errors import UserError
    from train.config import config_from_json
    from tune.folder import place_of
    from tune.plan import search_name
    from tune.search import run

    named = dataclasses.replace(config, name=search_name(config))
    with for_a_program():
        code = run(named)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    place = place_of(named.out, search_name(named))
    if not place.exists("best.json"):
        raise UserError(f"the search in {place} has no winner: its summary.md lists the outcome of every trial.")
    return config_from_json(json.loads(place.read("best.json"))["config"], f"{place}/best.json")
