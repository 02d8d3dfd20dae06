"""The machines that run trials, and their memory limit, which are checked before the first trial."""

import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import psutil

from infra.cli.units import format_size
from infra.device import host
from infra.device.gpu import GpuState
from infra.device.hardware import DeviceInfo, cpu_info, examine_device
from infra.errors import UserError
from infra.ray.machines import (
    Node,
    accelerator_resource,
    eligible_nodes,
    is_only_machine,
    max_cores_per_worker,
    run_on_nodes,
    wait_for_accelerator,
)
from infra.storage.directory import StorageDir
from pipeline.shards import read_manifest
from train.config import DatasetConfig, ExecutionConfig
from train.data.sources import source_of
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.memory import peak_if_known, predict_peak
from tune.space import Candidate, Space
from tune.strategy.curves import Prior

RESPONSE_TIMEOUT_SECONDS = 60.0
"""Time limit for the machines of a cluster to describe themselves, by a process on each that has its GPU."""

Examine = Callable[[], tuple[GpuState | None, DeviceInfo]]
"""Function that returns the state of a machine's GPU and the properties of its device."""


@dataclass(frozen=True)
class Machine:
    """A machine for trials, as described by a process on it."""

    name: str
    """Host name of the machine."""
    device: DeviceInfo
    """Device on which the machine's trials run."""
    memory: int
    """Memory of the GPU in bytes, or of the machine if trials run on its CPU."""
    busy: tuple[str, ...] = ()
    """Descriptions of other processes on the GPU."""
    data: str | None = None
    """Fingerprint of the token shards at ``--data`` on the machine; None if there are none."""


def describe_machine(
    data: str | None = None,
    *,
    cpu: bool,
    own_processes: Sequence[int] = (),
    examine: Examine = examine_device,
) -> Machine:
    """Describe this machine and its token shards at ``data``; the processes ``own_processes`` do not count as busy."""
    state, device = (None, cpu_info()) if cpu else examine()
    fingerprint = None
    if data:
        with suppress(UserError):  # The folder may only exist on another machine.
            fingerprint = read_manifest(data).fingerprint
    return Machine(
        socket.gethostname(),
        device,
        state.memory_total if state else host.total_memory(),
        tuple(_describe_process(pid) for pid in state.other_processes if pid not in own_processes) if state else (),
        fingerprint,
    )


def planned_machine(gpu: str, memory_limit: int | None) -> Machine:
    """Create an idle machine with the GPU of ``--gpu``, of whose memory a process may use ``memory_limit`` bytes.

    Raises ``UserError`` if the GPU is unknown or has less memory.
    """
    info = replace(load_gpu_rates(gpu).with_memory_limit(memory_limit).device_info, compile_blocker="")
    return Machine(info.name, info, info.memory)


def trial_machines(
    dataset: DatasetConfig,
    execution: ExecutionConfig,
    fingerprint: str,
    *,
    cluster: str | None,
    parallel: int = 1,
    examine: Examine = examine_device,
) -> tuple[Machine, ...]:
    """Find the machines for trials: this one, or the machines of the connected Ray with the most resources.

    Raises ``UserError`` if too few are available, or if one has no token shards with this ``fingerprint``.
    """
    if cluster and execution.accelerator:
        wait_for_accelerator(execution.accelerator)
    is_local = not cluster or is_only_machine()
    if is_local:
        # A parent, such as a notebook, may hold memory of the GPU, but only waits for this process.
        parents = [process.pid for process in psutil.Process().parents()]
        machines = [describe_machine(cpu=execution.device == "cpu", own_processes=parents, examine=examine)]
    else:
        machines = _describe_cluster(dataset, execution)
    idle = [machine for machine in machines if not machine.busy]
    if not idle:
        raise UserError(
            f"{machines[0].device.name} is in use by process {', '.join(machines[0].busy)}, which would distort memory "
            "and speed of the trials. Stop that process, or choose another GPU with CUDA_VISIBLE_DEVICES."
        )
    if execution.device == "cuda" and idle[0].device.kind != "cuda":
        absence = idle[0].device.gpu_absence or "there is none"
        raise UserError(
            f"--device cuda: no GPU found, because {absence}. Use --device cpu, or --address of a cluster with a GPU."
        )
    data = StorageDir.of(dataset.data)
    if not is_local:
        without_data = [machine.name for machine in idle if machine.data != fingerprint]
        if without_data:
            raise UserError(
                f"--data {data} is not available on {', '.join(without_data)}, where trials would run. Write it to "
                "object storage, for example with 'python -m pipeline.tokenize --out s3://bucket/tokens', and use that "
                "address as --data."
            )
    if parallel > len(idle):
        raise UserError(
            f"--max-concurrent-trials {parallel} needs {parallel} machines for trials; only {len(idle)} "
            f"{'is' if len(idle) == 1 else 'are'} available: {', '.join(machine.name for machine in idle)}. Use a "
            "smaller --max-concurrent-trials."
        )
    return tuple(idle)


def _describe_cluster(dataset: DatasetConfig, execution: ExecutionConfig) -> list[Machine]:
    """Describe the machines for trials by a process on each. Raises ``UserError`` if none of them responds."""
    nodes = eligible_nodes(accelerator=execution.accelerator)
    gpu = execution.device != "cpu" and any(node.get("GPU") for node in nodes.values())
    node_ids = trial_nodes(trial_resources(nodes.values(), dataset, execution, use_gpu=gpu))
    # Ray hides the GPU from a task that does not request one.
    needs = {node: {"num_gpus": 1} for node in node_ids.values()} if gpu else None
    responses = run_on_nodes(
        list(node_ids.values()), describe_machine, StorageDir.of(dataset.data).address, cpu=not gpu,
        seconds=RESPONSE_TIMEOUT_SECONDS, needs=needs,
    )  # fmt: skip
    machines = [response for response in responses.values() if isinstance(response, Machine)]
    if not machines:
        reason = next((f" ({response})" for response in responses.values()), "")
        raise UserError(
            f"{', '.join(node_ids)} did not {'report their GPUs' if gpu else 'respond'} within "
            f"{RESPONSE_TIMEOUT_SECONDS:.0f} s{reason}. Stop other work there, or use --device cpu."
        )
    return sorted(machines, key=lambda machine: machine.name)


def trial_resources(
    nodes: Collection[Node], dataset: DatasetConfig, execution: ExecutionConfig, *, use_gpu: bool
) -> dict[str, float]:
    """Return the resources of a trial in Ray: all cores of the largest of ``nodes``, as for a run, and one GPU if
    trials use GPUs.

    If trials read books, some cores are left for Ray Data, which encodes the books.
    """
    cores = max_cores_per_worker(nodes, 1, gpu=use_gpu)
    if not cores:
        raise UserError(
            "The Ray cluster has no CPU cores for trials. Start it with 'ray start --head --num-cpus=1' or more."
        )
    if source_of(dataset).reads_on_ray:
        from train.launch.cluster import READER_CORES

        cores = max(1, cores - READER_CORES)
    return {"CPU": float(cores)} | ({"GPU": 1.0} if use_gpu else {}) | accelerator_resource(execution.accelerator)


def trial_nodes(resources: dict[str, float]) -> dict[str, str]:
    """Return the node ids by machine name of the connected Ray's live nodes that have these ``resources``, free or in
    use."""
    import ray

    return {
        node["NodeManagerHostname"]: node["NodeID"]
        for node in sorted(ray.nodes(), key=lambda node: node["NodeManagerHostname"])
        if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items())
    }


def _describe_process(pid: int) -> str:
    """Format the number of a process and its command, if this user may read it."""
    try:
        return f"{pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
    except psutil.Error:
        return str(pid)


def choose_memory_limit(requested: int | None, available: int, smallest: MemoryBreakdown, model: str) -> int:
    """Return the memory limit in bytes: the ``requested`` limit, or all ``available`` memory.

    Raises ``UserError`` if the limit is too small for the ``model``. The memory of its run with one sequence is
    ``smallest``.
    """
    limit = requested or available
    minimum = smallest.weights + smallest.gradients + smallest.optimizer
    if minimum > limit:
        subject, advice = f"The memory for trials, {available / 1e9:.2f} GB,", "Use"
        if requested:
            subject, advice = f"--memory-limit {format_size(requested)}", "Increase the limit, or use"
        raise UserError(
            f"{subject} is less than the {minimum / 1e9:.2f} GB that the weights, gradients and optimizer state of "
            f"{model} need. {advice} a smaller --model."
        )
    return limit


def make_prior(space: Space) -> Prior:
    """Create the function that predicts the peak memory of a candidate's process by formulas."""

    @cache  # All knobs of a GPU have forty thousand candidates, and many are compared before every trial.
    def prior(candidate: Candidate) -> float:
        step = space.config(candidate).step
        if breakdown := peak_if_known(step):
            return float(breakdown.total)
        # Memory of a custom model is only known with the knobs of the base; trials correct the prediction.
        batch = step.batch
        base = space.base.step.replace(micro_batch=batch.micro_batch, global_batch=batch.global_batch)
        return float(predict_peak(base).total)

    return prior
