"""Optuna's TPE as a strategy, for comparison. Needs the package, which is not installed by default.

Its study is rebuilt from the rows at every proposal, so that it, too, has no state of its own. Optuna
proposes discrete points again and again; what has run already is answered from its row, and when it
cannot think of anything new the first untried candidate is taken.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.errors import UserError
from tune.space import Candidate, Space
from tune.trial.row import Proposal, TrialRow

ASKS = 20
"""Proposals without a new candidate after which Optuna is no longer asked."""


def optuna_trials(space: Space) -> int:
    """Optuna's budget: a quarter of the grid, at least eight trials and at most fifty, some hours on a GPU."""
    return min(50, max(8, len(space.candidates()) // 4))


@dataclass(frozen=True)
class OptunaSearcher:
    """At most ``trials`` trials of ``space``, chosen by TPE from ``seed``. Raises ``UserError`` without Optuna."""

    space: Space
    trials: int
    seed: int = 0

    def __post_init__(self) -> None:
        _optuna()

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        candidates = self.space.candidates()
        seen = {row.candidate: row for row in rows}
        if len(seen) >= min(self.trials, len(candidates)):
            return None
        optuna = _optuna()
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(rows))
        study = optuna.create_study(sampler=sampler, direction="maximize")
        names = [name for name, _ in self.space.combinations[0]]
        choices = {"micro_batch": list(self.space.sizes)} | {
            name: list(dict.fromkeys(dict(knobs)[name] for knobs in self.space.combinations)) for name in names
        }
        spaces = {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()}
        for row in rows:
            parameters = {"micro_batch": row.candidate.micro_batch} | dict(row.candidate.knobs)
            study.add_trial(
                optuna.trial.create_trial(params=parameters, distributions=spaces, value=row.tokens_per_second or 0.0)
            )
        for _ in range(ASKS):
            asked = study.ask(spaces)
            candidate = Candidate(asked.params["micro_batch"], tuple((name, asked.params[name]) for name in names))
            if candidate in candidates and candidate not in seen:
                return Proposal(candidate, "probe")
            known = seen.get(candidate)
            study.tell(asked, (known.tokens_per_second or 0.0) if known else 0.0)
        return Proposal(next(c for c in candidates if c not in seen), "probe")

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return max(0, min(self.trials, len(self.space.candidates())) - len({row.candidate for row in rows}))


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError("--searcher optuna needs Optuna: pip install optuna, or use --searcher memory.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
