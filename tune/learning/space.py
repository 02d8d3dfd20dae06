"""The space of a search for the lowest loss: the values to try of settings of the mathematics."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from train.config import ResolvedConfig, TrainConfig
from train.model_config import parse_model
from train.resolved import resolve
from tune.knobs import SHAPE, parse_learning_knobs
from tune.space import Candidate, KnobValues

SPEED_KNOBS = ("global_batch", "optimizer", "layers", "heads", "width", "dropout")
"""Knobs on which the speed depends. Candidates that differ only in others have the same speed."""


def with_knobs(config: TrainConfig, knobs: KnobValues) -> TrainConfig:
    """Return ``config`` with the values of ``knobs``. Raises ``UserError`` if they are not possible."""
    shape = {name: value for name, value in knobs if name in SHAPE}
    if shape:
        changes = "".join(f",{name}={value}" for name, value in shape.items())
        config = config.with_model(parse_model(config.model.text + changes))
    return config.replace(**{name: value for name, value in knobs if name not in SHAPE})


@dataclass(frozen=True)
class LearningSpace:
    """The candidates of a search, each with the config that trains it."""

    configs: dict[Candidate, ResolvedConfig]
    """Configuration of each candidate; the first one is the control."""
    values: dict[str, tuple[Any, ...]]
    """Values by knob, numbers in ascending order."""

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates; the first one is the control."""
        return list(self.configs)

    @property
    def control(self) -> Candidate:
        """The candidate with the settings of the flags."""
        return next(iter(self.configs))

    def config(self, candidate: Candidate) -> ResolvedConfig:
        """Return the training config of ``candidate``, without a length."""
        return self.configs[candidate]

    def label(self, candidate: Candidate) -> str:
        """Format the knobs of ``candidate``, such as ``learning_rate=0.0006 global_batch=64``."""
        return " ".join(f"{name}={format_value(value)}" for name, value in candidate.knobs)

    def speed_key(self, candidate: Candidate) -> KnobValues:
        """Return the knobs on which the speed of ``candidate`` depends."""
        return tuple(knob for knob in candidate.knobs if knob[0] in SPEED_KNOBS)

    def choices(self, candidate: Candidate) -> KnobValues:
        """Return the knobs of ``candidate`` that are not numbers, such as the optimizer."""
        return tuple(knob for knob in candidate.knobs if not _is_number(knob[1]))

    def neighbors(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates near ``candidate``, the nearest first.

        They differ in one or two numbers, by the next smaller or larger value, because the best learning rate depends
        on the batch; or in one setting that is not a number.
        """
        distances = {c: self._distance(c, candidate) for c in self.candidates}
        own = self.choices(candidate)
        nearby = [c for c in self.candidates if 0 < distances[c] <= (2 if self.choices(c) == own else 1)]
        return sorted(nearby, key=lambda c: distances[c])

    def edges(self, candidate: Candidate) -> list[tuple[str, Any]]:
        """Return the knobs of ``candidate`` whose value is the smallest or largest of several numbers."""
        numbers = [knob for knob in candidate.knobs if _is_number(knob[1]) and len(self.values[knob[0]]) > 1]
        return [(name, value) for name, value in numbers if value in (self.values[name][0], self.values[name][-1])]

    def _distance(self, first: Candidate, second: Candidate) -> int:
        """Count the knobs that differ; a number that is not next to the other one counts as many."""
        total = 0
        for (name, a), (_, b) in zip(first.knobs, second.knobs, strict=True):
            if a != b:
                values = self.values[name]
                is_next = not _is_number(a) or abs(values.index(a) - values.index(b)) == 1
                total += 1 if is_next else len(self.configs)
        return total


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def format_value(value: Any) -> str:
    """Format the value of a knob as a user would type it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def make_learning_space(training: TrainConfig, words: Sequence[str], device_info: DeviceInfo) -> LearningSpace:
    """Create the space of all combinations of the knobs in ``words`` with the values of ``training``, the control.

    Each candidate is resolved as a run. Raises ``UserError`` if a value is possible in no combination.
    """
    parsed = parse_learning_knobs(words)
    flat = training.flat()
    values = {}
    for name, listed in parsed.items():
        own = getattr(training.model, name, None) if name in SHAPE else flat[name]
        if own is None:
            raise UserError(f"--knobs {name}: --model {training.model.text} has no {name} to change. Remove it.")
        every = list(dict.fromkeys([own, *listed]))
        values[name] = tuple(sorted(every) if all(map(_is_number, every)) else every)
    control = tuple((name, getattr(training.model, name) if name in SHAPE else flat[name]) for name in values)
    combinations = dict.fromkeys([control, *product(*([(n, value) for value in vs] for n, vs in values.items()))])
    configs: dict[Candidate, ResolvedConfig] = {}
    for knobs in combinations:
        try:
            config = resolve(with_knobs(training, knobs), device_info)
        except UserError:
            if knobs == control:
                raise
            continue
        configs[Candidate(config.batch.micro_batch, knobs)] = config
    possible = {knob for candidate in configs for knob in candidate.knobs}
    for name, vs in values.items():
        for value in vs:
            if (name, value) not in possible:
                resolve(with_knobs(training, _changed(control, name, value)), device_info)  # This raises UserError.
    return LearningSpace(configs, values)


def _changed(knobs: KnobValues, name: str, value: Any) -> KnobValues:
    return tuple((n, value if n == name else v) for n, v in knobs)
