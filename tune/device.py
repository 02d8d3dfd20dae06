"""What trials will run on, and whether the limit makes sense there: asked before anything is started.

In: a search's config. Out: the device's facts, and the limit in bytes. Raises ``UserError`` in one
sentence for what cannot work, because a search that starts anyway wastes hours.
"""

from dataclasses import replace
from functools import cache

import psutil

from infra.cluster import is_this_machine_alone
from infra.errors import UserError
from infra.gpu import read_gpu
from infra.hardware import DeviceFacts, cpu_facts, device_facts
from infra.units import format_size
from train.config import TrainConfig
from train.estimate.memory import predict_peak
from train.launch.placement import worker_facts
from train.model_config import format_model
from tune.config import SearchConfig
from tune.space import Candidate, Space
from tune.strategy.curves import Prior


def trial_device(config: SearchConfig) -> DeviceFacts:
    """What trials run on. Raises ``UserError`` when a GPU is asked for and absent, or in use by somebody else."""
    wanted = config.training.device
    if wanted == "cpu":
        return cpu_facts()
    if config.cluster:
        facts = worker_facts(config.training)
        state = read_gpu() if is_this_machine_alone() else None
    else:
        facts, state = device_facts(), read_gpu()
    above = {process.pid for process in psutil.Process().parents()}  # a notebook or test run that waits for us
    others = [process for process in state.other_processes if process not in above] if state else []
    if state and others:
        raise UserError(
            f"{state.name} is in use by process {', '.join(map(_process, others))}, which would share its memory "
            "and time with the trials: end it, or choose another GPU with CUDA_VISIBLE_DEVICES."
        )
    if wanted == "cuda" and facts.kind != "cuda":
        raise UserError("--device cuda: there is no GPU here; use --device cpu, or --address of a cluster with one.")
    return facts


def _process(number: int) -> str:
    """A process by its number and, where this user and container can see it, its command."""
    try:
        return f"{number} ({' '.join(psutil.Process(number).cmdline())[:80]})"
    except psutil.Error:
        return str(number)


def memory_limit(asked: int | None, training: TrainConfig) -> int:
    """The limit in bytes: as ``asked`` for, else all there is on the device of the resolved ``training``.

    Raises ``UserError`` when the model's state alone exceeds it.
    """
    state = read_gpu() if training.device == "cuda" else None
    if training.device == "cuda" and state is None and not asked:
        raise UserError("NVML does not tell this machine the GPU's memory: say what a trial may take, --memory-limit.")
    limit = asked or (state.memory_total if state else psutil.virtual_memory().total)
    parts = predict_peak(replace(training, micro_batch=1))
    needed = parts.weights + parts.gradients + parts.optimizer
    if needed > limit:
        raise UserError(
            f"--memory-limit {format_size(limit)} is less than the {needed / 1e9:.2f} GB that the weights, gradients "
            f"and optimizer state of {format_model(training.model)} take: raise the limit or choose a smaller --model."
        )
    return limit


def make_prior(space: Space) -> Prior:
    """Predicted peak bytes of a candidate's process, by formulas alone."""

    @cache  # all knobs of a GPU make forty thousand candidates, and many are looked at before every trial
    def prior(candidate: Candidate) -> float:
        return float(predict_peak(space.config(candidate)).total)

    return prior
