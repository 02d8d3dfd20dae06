"""A search before it is paid for: which sizes should fit, how many trials to expect, and how long at most."""

from infra.command import console
from infra.units import format_duration
from tune.config import SearchConfig
from tune.searcher import MemorySearcher
from tune.space import Candidate, Space
from tune.strategies import Strategy

START_SECONDS = 10.0
"""A fresh process with torch, in Ray: 4 to 12 s where this was measured."""
COMPILE_SECONDS = {"off": 0.0, "blocks": 20.0, "whole": 40.0, "max-autotune": 150.0, "reduce-overhead": 40.0}
"""Roughly what a first step takes longer than the others, for GPT-2 124M on an idle machine with an empty cache."""


def optuna_trials(space: Space) -> int:
    """Optuna's budget: a quarter of the grid, at least eight trials and at most fifty, some hours on a GPU."""
    return min(50, max(8, len(space.candidates()) // 4))


def print_plan(config: SearchConfig, space: Space, memory: MemorySearcher, strategy: Strategy) -> None:
    """Print the control and its neighbours with the sizes that are predicted to fit, and what the search may cost."""
    curves = memory.curves([])
    control = space.control.knobs
    near = [control, *space.neighbours(control)]
    for knobs in near:
        sizes = space.sizes_of(knobs)
        fit = [size for size in sizes if curves.fits(Candidate(size, knobs))]
        name = space.knobs_label(knobs) or " ".join(["the control", *(f"{knob}={value}" for knob, value in control)])
        largest = f"; {memory.prior(Candidate(fit[-1], knobs)) / 1e9:.2f} GB at {fit[-1]}" if fit else ""
        console.print(f"{name}: {len(fit)} of {len(sizes)} sizes should fit: {', '.join(map(str, fit))}{largest}")
    if further := len(space.combinations) - len(near):
        console.print(f"{further} further combinations differ from the control in more than one knob")
    trials = strategy.remaining([])
    compiling = max(COMPILE_SECONDS[space.config(Candidate(space.sizes_of(k)[0], k)).compile] for k in near)
    most = trials * (START_SECONDS + compiling + config.trial_time)
    counted = f", {format_duration(compiling)} a trial for compilation" if compiling else ""
    console.print(
        f"about {trials} trials of at most {config.trial_steps} steps or {format_duration(config.trial_time)} each, "
        f"at most {format_duration(round(most))} in all{counted}; nothing was run"
    )
