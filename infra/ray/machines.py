"""Machines of the connected Ray cluster: their resources, calls on each of them, and waiting for free resources.

A wait prints which resources it waits for and which are available. Ctrl-C ends every wait.
"""

import ipaddress
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from infra.background import repeated
from infra.cli.console import errors
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY_PREFIX

RESPONSE_TIMEOUT_SECONDS = 20.0
"""Time limit for a machine of the cluster to start a process and return its result."""

LOSS_POLL_SECONDS = 2.0
"""Interval between two checks of the live machines."""

WARN_AFTER_SECONDS = 5.0
"""Time after which a wait for free resources is reported; Ray may take two seconds to return those of a process."""

RESOURCE_POLL_SECONDS = 0.2
"""Interval between two checks for free resources."""

T = TypeVar("T")

Node = Mapping[str, float]
"""Resources of a machine by the names that Ray uses."""


def eligible_nodes(*, accelerator: str | None = None) -> dict[str, Node]:
    """Return the live machines of the connected Ray by node id; with ``accelerator``, only machines with this GPU."""
    import ray

    nodes: dict[str, Node] = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {
        name: node for name, node in nodes.items() if not accelerator or node.get(f"accelerator_type:{accelerator}")
    }


def wait_for_accelerator(accelerator: str) -> None:
    """Wait until the connected Ray has a machine with an accelerator of this type, which an autoscaler may add.

    Raises ``UserError`` on a local Ray without the accelerator, because other machines cannot join it.
    """
    import ray.util

    if eligible_nodes(accelerator=accelerator):
        return
    if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        raise UserError(
            f"This machine has no {accelerator} (--accelerator). Remove the flag, or join a cluster with --address."
        )
    wait_for_resources(f"--accelerator {accelerator}", [accelerator_resource(accelerator)])


def accelerator_resource(accelerator: str | None) -> dict[str, float]:
    """Return the resource request that places work on a machine with this accelerator; empty for None."""
    return {f"accelerator_type:{accelerator}": 0.001} if accelerator else {}


def is_only_machine() -> bool:
    """Return whether this machine is the only live machine of the connected Ray."""
    import ray

    return [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]] == [socket.gethostname()]


def max_cores_per_worker(nodes: Collection[Node], workers: int, *, gpu: bool) -> int:
    """Return the maximum number of cores that each of ``workers`` can have on ``nodes`` at once; 0 if they do not fit.

    A worker runs on one machine, so the sum of the cluster's cores does not matter. With ``gpu`` each worker has a GPU
    and at most that GPU's share of its machine's cores, because workers on the other GPUs need cores, too.
    """
    machines = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    machines = [(cores, gpus) for cores, gpus in machines if cores and (gpus or not gpu)]
    options = {max(1, cores // max(count, gpus * gpu)) for cores, gpus in machines for count in range(1, workers + 1)}
    for per_worker in sorted(options, reverse=True):
        capacities = (min(cores // per_worker, gpus) if gpu else cores // per_worker for cores, gpus in machines)
        if sum(capacities) >= workers:
            return per_worker
    return 0


def driver_node_strategy() -> Any:
    """Return the scheduling strategy of work that must run on the driver's machine, to use its files or end with it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def run_on_nodes(
    nodes: Sequence[str],
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    needs: Mapping[str, Mapping[str, float]] | None = None,
    **keyword_arguments: Any,
) -> dict[str, Any]:
    """Call ``function`` on machines of the connected Ray and return the results by node id.

    A machine that raises has the exception as its result. A machine without a result within ``seconds`` is missing.

    Args:
        nodes: node ids of the machines.
        function: function to call with ``arguments`` and ``keyword_arguments``.
        seconds: time limit for all machines together.
        needs: required ``num_cpus`` and ``num_gpus`` by node id; by default none, so that a machine responds even if
            other work uses all its cores.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote_function: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    node_by_task: dict[Any, str] = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = remote_function.options(scheduling_strategy=strategy, **(needs or {}).get(node, {}))
        node_by_task[task.remote(*arguments, **keyword_arguments)] = node
    finished_tasks, pending_tasks = (
        ray.wait(list(node_by_task), num_returns=len(node_by_task), timeout=seconds) if node_by_task else ([], [])
    )
    results: dict[str, Any] = {}
    for task in finished_tasks:
        try:
            results[node_by_task[task]] = ray.get(task)
        except Exception as failure:  # noqa: BLE001 the process of a machine may raise any exception
            results[node_by_task[task]] = failure
    for task in pending_tasks:
        ray.cancel(task, force=True)
    return results


def check_shared(flag: str, directory: StorageDir) -> None:
    """Raise ``UserError`` if a machine of the connected Ray that may get work does not share ``directory``.

    Each machine looks for a file that this one has just created there, because a different disk may have the same path.
    Machines that do not respond within ``RESPONSE_TIMEOUT_SECONDS`` are ignored, because they cannot get work either.
    """
    folder = directory.local_path
    if folder is None or is_only_machine():
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, probe = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=folder)
    os.close(descriptor)
    try:
        missing_on = sorted(name for name, has_probe in run_on_other_nodes(os.path.exists, probe) if not has_probe)
    finally:
        Path(probe).unlink()
    if missing_on:
        raise UserError(
            f"{flag} {folder} is on this machine's disk, which {', '.join(missing_on)} cannot read. Use object "
            f"storage, such as {flag} s3://bucket/folder, or a folder on a disk that all machines share."
        )


def run_on_other_nodes(function: Callable[..., T], *arguments: Any) -> list[tuple[str, T]]:
    """Call ``function(*arguments)`` on each other machine of the connected Ray that may get work.

    Machines that fail or do not respond within ``RESPONSE_TIMEOUT_SECONDS`` are omitted.

    Returns:
        (name of the machine, result) of each machine.
    """
    import ray

    driver_node = ray.get_runtime_context().get_node_id()
    names = {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != driver_node and _has_compute(node)
    }
    results = run_on_nodes(list(names), function, *arguments, seconds=RESPONSE_TIMEOUT_SECONDS)
    return [(names[node], result) for node, result in results.items() if not isinstance(result, Exception)]


def _has_compute(node: Mapping[str, Any]) -> bool:
    return any(node["Resources"].get(name) for name in ("CPU", "GPU"))


def wait_for_resources(purpose: str, bundles: Sequence[Node]) -> None:
    """Wait until Ray has free resources for ``bundles``, and print a message with the ``purpose`` if that takes long.

    The driver itself requests a placement group here, so that Ray removes it if the driver ends. Ray 2.60 never removes
    a placement group that an actor requests while its driver ends. A run that has lost a machine still depends on Ray
    Train's own request.
    """
    from ray.util import placement_group, remove_placement_group

    group, started_at, has_reported = placement_group([dict(bundle) for bundle in bundles]), time.monotonic(), False
    try:
        while not group.wait(RESOURCE_POLL_SECONDS):
            if not has_reported and time.monotonic() - started_at >= WARN_AFTER_SECONDS:
                has_reported = True
                errors.print(resource_wait_message(purpose, bundles), markup=False)
    finally:
        remove_placement_group(group)


def is_pending(bundles: Sequence[Node]) -> bool:
    """Return whether any placement group with these ``bundles`` is pending; Ray does not report its owner."""
    from ray.util import placement_group_table

    def amounts(requests: Iterable[Node]) -> list[tuple[float, float]]:
        return sorted((bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)) for bundle in requests)

    groups = placement_group_table().values()
    pending = [group["bundles"].values() for group in groups if group["state"] in ("PENDING", "RESCHEDULING")]
    return any(amounts(request) == amounts(bundles) for request in pending)


def resource_wait_message(purpose: str, bundles: Sequence[Node]) -> str:
    """Return a message with the resources that ``purpose`` waits for, and the resources of the cluster."""
    import ray

    def describe(resources: Node) -> str:
        types = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        counts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
        return ", ".join([*counts, *types]) or "0 CPU"

    alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    machines = "; ".join(f"{name}: {describe(resources)}" for name, resources in alive)
    request = describe(bundles[0])
    if not any(bundles[0].get(name) for name in ("CPU", "GPU")):
        request = f"a machine with {request}"
    request = f"{len(bundles)} x ({request})" if len(bundles) > 1 else request
    free = ray.available_resources()
    return (
        f"Waiting for {request} for {purpose}. The cluster has {machines}; free: "
        f"{describe({name: free[name] for name in ('CPU', 'GPU') if name in free})}. Stop other work or add machines. "
        "Press Ctrl-C to exit."
    )


@contextmanager
def report_lost_nodes(consequence: str) -> Iterator[None]:
    """Print a message during the block for each machine that the connected Ray loses, with the ``consequence``.

    Ray repeats the tasks of a lost machine without a message. If no machine is left, it waits for a new one.
    """
    import ray

    def live_machines() -> dict[str, str]:
        return {
            node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"] and _has_compute(node)
        }

    previous: dict[str, str] | None = None

    def report_losses() -> None:
        nonlocal previous
        with suppress(Exception):  # An unreachable Ray is reported elsewhere.
            current = live_machines()
            for node in (previous or {}).keys() - current.keys():
                errors.print(f"Lost {(previous or {})[node]}: {consequence}.", markup=False)
            if not current and previous != current:
                errors.print("No machine is left for the work. Waiting for one to join. Press Ctrl-C to exit.")
            previous = current

    with repeated(report_losses, LOSS_POLL_SECONDS, "losses"):
        yield
