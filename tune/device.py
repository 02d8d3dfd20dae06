"""The machines that trials run on, and whether the limit makes sense there: asked before anything is started.

Raises ``UserError`` in one sentence for what cannot work, because a search that starts anyway wastes hours.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import psutil

from infra import host
from infra.errors import UserError
from infra.gpu import read_gpu
from infra.hardware import DeviceFacts, cpu_facts, device_facts
from infra.machines import (
    accelerator_resource,
    ask_nodes,
    await_accelerator,
    cores_each,
    eligible_nodes,
    is_this_machine_alone,
)
from infra.storage_dir import StorageDir
from infra.units import format_size
from pipeline.shards import read_manifest
from train.config import TrainConfig
from train.estimate.memory import known_peak, predict_peak
from train.model_config import format_model
from tune.space import Candidate, Space
from tune.strategy.curves import Prior

ANSWER_SECONDS = 60.0
"""How long the machines of a cluster may take to describe themselves: a process must start there, with their GPU."""


@dataclass(frozen=True)
class Machine:
    """A machine for trials, as a process on it sees it."""

    name: str
    device: DeviceFacts
    memory: int
    """Bytes of the GPU, or what trials on the CPU may use of the machine's memory."""
    busy: tuple[str, ...] = ()
    """Other processes on its GPU."""
    data: str | None = None
    """Fingerprint of the token shards in the search's local folder, as this machine sees it; None without any."""


def look(data: str | None = None, *, cpu: bool, own: Sequence[int] = ()) -> Machine:
    """This machine, with ``data`` if that is a folder. The processes ``own`` do not count as others on its GPU."""
    state = None if cpu else read_gpu()
    fingerprint = None
    if data and not StorageDir.of(data).remote:
        with suppress(UserError):  # a folder of another machine
            fingerprint = read_manifest(data).fingerprint
    return Machine(
        socket.gethostname(),
        cpu_facts() if state is None else device_facts(),
        state.memory_total if state else host.total_memory(),
        tuple(_process(pid) for pid in state.other_processes if pid not in own) if state else (),
        fingerprint,
    )


def trial_machines(
    training: TrainConfig, fingerprint: str, *, cluster: str | None, parallel: int = 1
) -> tuple[Machine, ...]:
    """The machines on which trials may run: this one, or those of the connected Ray that have the most room.

    Its data have this ``fingerprint``.
    """
    if cluster and training.accelerator:
        await_accelerator(training.accelerator)
    here = not cluster or is_this_machine_alone()
    if here:
        above = [process.pid for process in psutil.Process().parents()]  # a notebook or test run that waits for us
        found = [look(cpu=training.device == "cpu", own=above)]
    else:
        found = _ask(training)
    idle = [machine for machine in found if not machine.busy]
    if not idle:
        raise UserError(
            f"{found[0].device.name} is in use by process {', '.join(found[0].busy)}, which would share its memory and "
            "time with the trials: end it, or choose another GPU with CUDA_VISIBLE_DEVICES."
        )
    if training.device == "cuda" and idle[0].device.kind != "cuda":
        raise UserError("--device cuda: there is no GPU here; use --device cpu, or --address of a cluster with one.")
    data = StorageDir.of(training.data)
    if not (here or data.remote):
        blind = [machine.name for machine in idle if machine.data != fingerprint]
        if blind:
            raise UserError(
                f"--data {data} is not on {', '.join(blind)}, where trials would run: put it in object storage, for "
                "example with 'python -m pipeline.tokenize --out s3://bucket/tokens', and give that as --data."
            )
    if parallel > len(idle):
        raise UserError(
            f"--parallel {parallel} needs as many machines for trials and there "
            f"{'is' if len(idle) == 1 else 'are'} {len(idle)}: {', '.join(machine.name for machine in idle)}."
        )
    return tuple(idle)


def _ask(training: TrainConfig) -> list[Machine]:
    """What the machines for trials say about themselves. Raises ``UserError`` when none of them answers."""
    nodes = eligible_nodes(accelerator=training.accelerator)
    gpu = training.device != "cpu" and any(node.get("GPU") for node in nodes.values())
    there = trial_nodes(trial_resources(training, use_gpu=gpu))
    needs = {node: {"num_gpus": 1} for node in there.values()} if gpu else None  # without one Ray hides it from a task
    answers = ask_nodes(
        list(there.values()), look, StorageDir.of(training.data).address, cpu=not gpu, seconds=ANSWER_SECONDS,
        needs=needs,
    )  # fmt: skip
    found = [answer for answer in answers.values() if isinstance(answer, Machine)]
    if not found:
        why = next((f": {answer}" for answer in answers.values()), "")
        raise UserError(
            f"{', '.join(there)} did not describe {'their GPUs' if gpu else 'themselves'} within "
            f"{ANSWER_SECONDS:.0f} s{why}: stop other work there, or use --device cpu."
        )
    return sorted(found, key=lambda machine: machine.name)


def trial_resources(training: TrainConfig, *, use_gpu: bool) -> dict[str, float]:
    """What a run gets on the machine with the most room: a trial has it to itself, as the run that it stands for.

    On a stream of books it leaves cores to Ray Data, which encodes them.
    """
    if training.accelerator:
        await_accelerator(training.accelerator)
    nodes = eligible_nodes(accelerator=training.accelerator)
    cores = cores_each(nodes.values(), 1, gpu=use_gpu)
    if not cores:
        raise UserError(
            "the Ray cluster has no cores for trials: start it with 'ray start --head --num-cpus=1' or more."
        )
    if training.stream:
        from train.launch.placement import READERS

        cores = max(1, cores - READERS)
    return {"CPU": float(cores)} | ({"GPU": 1.0} if use_gpu else {}) | accelerator_resource(training.accelerator)


def trial_nodes(resources: dict[str, float]) -> dict[str, str]:
    """The live machines of the connected Ray that have these ``resources``, busy or not: node ids by machine name."""
    import ray

    return {
        node["NodeManagerHostname"]: node["NodeID"]
        for node in sorted(ray.nodes(), key=lambda node: node["NodeManagerHostname"])
        if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items())
    }


def _process(number: int) -> str:
    """A process by its number and, where this user and container can see it, its command."""
    try:
        return f"{number} ({' '.join(psutil.Process(number).cmdline())[:80]})"
    except psutil.Error:
        return str(number)


def memory_limit(asked: int | None, training: TrainConfig, available: int) -> int:
    """The limit in bytes: as ``asked`` for, else all that is ``available`` to the resolved ``training``."""
    limit = asked or available
    parts = predict_peak(replace(training, micro_batch=1))
    needed = parts.weights + parts.gradients + parts.optimizer
    if needed > limit:
        given, step = f"the memory for trials, {available / 1e9:.2f} GB,", ""
        if asked:
            given, step = f"--memory-limit {format_size(asked)}", "raise the limit or "
        raise UserError(
            f"{given} is less than the {needed / 1e9:.2f} GB that the weights, gradients and optimizer state of "
            f"{format_model(training.model)} take: {step}choose a smaller --model."
        )
    return limit


def make_prior(space: Space) -> Prior:
    """Predicted peak bytes of a candidate's process, by formulas alone."""

    @cache  # all knobs of a GPU make forty thousand candidates, and many are looked at before every trial
    def prior(candidate: Candidate) -> float:
        config = space.config(candidate)
        base = replace(space.base, micro_batch=config.micro_batch, global_batch=config.global_batch)
        anatomy = known_peak(config) or predict_peak(base)  # trials correct what was measured with the base's knobs
        return float(anatomy.total)

    return prior
