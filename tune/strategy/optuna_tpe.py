"""Optuna's TPE sampler as a strategy, for comparison. It needs the package optuna, which is not installed by default.

Optuna's study is rebuilt from the rows for each proposal, so that the strategy has no state. Optuna often repeats a
discrete point. It then gets the speed from the row. If all its proposals are repeated, the first untried candidate is
used.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.errors import UserError
from tune.space import Candidate, Space
from tune.trial.row import Proposal, TrialRow

MAX_PROPOSALS = 20
"""Maximum number of proposals by Optuna for one trial; if none is new, the first untried candidate is used."""


def optuna_trials(space: Space) -> int:
    """Return the number of trials: a quarter of the grid, but at least 8 and at most 50, which take some hours on a
    GPU."""
    return min(50, max(8, len(space.candidates()) // 4))


@dataclass(frozen=True)
class OptunaSearcher:
    """Tries at most ``trials`` candidates of ``space``, chosen by TPE. Raises ``UserError`` without Optuna."""

    space: Space
    trials: int
    seed: int = 0

    def __post_init__(self) -> None:
        _optuna()

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        candidates = self.space.candidates()
        tried = {row.candidate: row for row in rows}
        if len(tried) >= min(self.trials, len(candidates)):
            return None
        optuna = _optuna()
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(rows))
        study = optuna.create_study(sampler=sampler, direction="maximize")
        names = [name for name, _ in self.space.combinations[0]]
        choices = {"micro_batch": list(self.space.micro_batches)} | {
            name: list(dict.fromkeys(dict(knobs)[name] for knobs in self.space.combinations)) for name in names
        }
        spaces = {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()}
        for row in rows:
            parameters = {"micro_batch": row.candidate.micro_batch} | dict(row.candidate.knobs)
            study.add_trial(
                optuna.trial.create_trial(params=parameters, distributions=spaces, value=row.tokens_per_second)
            )
        for _ in range(MAX_PROPOSALS):
            trial = study.ask(spaces)
            candidate = Candidate(trial.params["micro_batch"], tuple((name, trial.params[name]) for name in names))
            if candidate in candidates and candidate not in tried:
                return Proposal(candidate, "probe")
            row = tried.get(candidate)
            study.tell(trial, row.tokens_per_second if row else 0.0)
        return Proposal(next(c for c in candidates if c not in tried), "probe")

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return max(0, min(self.trials, len(self.space.candidates())) - len({row.candidate for row in rows}))


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError(
            "--searcher optuna needs the package optuna. Run 'pip install optuna', or use --searcher memory."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
