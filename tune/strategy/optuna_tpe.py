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
        """Optuna's next candidate that has no row yet."""
        candidates = self.space.candidates()
        seen = {row.candidate: row for row in rows}
        if len(seen) >= min(self.trials, len(candidates)):
            return None
        optuna = _optuna()
        sampler = optuna.samplers.TPESampler(seed=self.seed + len(rows))
        study = optuna.create_study(sampler=sampler, direction="maximize")
        choices = self._choices()
        spaces = {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()}
        for row in rows:
            study.add_trial(
                optuna.trial.create_trial(
                    params=self._parameters(row.candidate), distributions=spaces, value=row.tokens_per_second or 0.0
                )
            )
        for _ in range(ASKS):
            asked = study.ask(spaces)
            values: dict[str, Any] = asked.params
            knobs = tuple((name, values[name]) for name, _ in self.space.combinations[0])
            candidate = Candidate(values["micro_batch"], knobs)
            if candidate in candidates and candidate not in seen:
                return Proposal(candidate, "probe")
            known = seen.get(candidate)
            study.tell(asked, (known.tokens_per_second or 0.0) if known else 0.0)
        return Proposal(next(c for c in candidates if c not in seen), "probe")

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """What is left of the budget."""
        return max(0, min(self.trials, len(self.space.candidates())) - len({row.candidate for row in rows}))

    def _choices(self) -> dict[str, list[Any]]:
        choices: dict[str, list[Any]] = {"micro_batch": list(self.space.sizes)}
        for place, (name, _) in enumerate(self.space.combinations[0]):
            choices[name] = list(dict.fromkeys(knobs[place][1] for knobs in self.space.combinations))
        return choices

    def _parameters(self, candidate: Candidate) -> dict[str, Any]:
        return {"micro_batch": candidate.micro_batch} | dict(candidate.knobs)


def _optuna() -> Any:
    """The package, quiet. Raises ``UserError`` where it is not installed."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UserError("--searcher optuna needs Optuna: pip install optuna, or use --searcher memory.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
