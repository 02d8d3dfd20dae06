"""The machines of the connected Ray: what they have, what they answer, and waiting for room on them.

What is waited for is said in one sentence, with what there is; Ctrl-C ends every wait.
"""

import ipaddress
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from infra.cli.console import errors
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY

ASKING_SECONDS = 20.0
"""How long a machine of the cluster may take to answer a question: a process must start there."""

LOSS_POLL_SECONDS = 2.0
"""Between two looks at which machines there are."""

PLACING_SECONDS = 1.0
"""How long Ray may look for free resources before we report it; it takes milliseconds where there are some."""

RESOURCE_POLL_SECONDS = 0.2
"""Between two looks at whether to wait any longer for room."""

T = TypeVar("T")

Node = Mapping[str, float]
"""A machine's resources by Ray's names for them."""


def eligible_nodes(*, accelerator: str | None = None) -> dict[str, Node]:
    """The live machines of the connected Ray by their node ids, or only those with GPUs of the type ``accelerator``."""
    import ray

    nodes: dict[str, Node] = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {
        name: node for name, node in nodes.items() if not accelerator or node.get(f"accelerator_type:{accelerator}")
    }


def await_accelerator(accelerator: str) -> None:
    """Wait until the connected Ray has a machine with an accelerator of this type, which an autoscaler may add.

    Raises ``UserError`` on a Ray of our own, which no machine joins.
    """
    import ray.util

    if eligible_nodes(accelerator=accelerator):
        return
    if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        raise UserError(f"--accelerator {accelerator} is not in this machine: leave it out, or name an --address.")
    wait_for_resources(f"--accelerator {accelerator}", [accelerator_resource(accelerator)])


def accelerator_resource(accelerator: str | None) -> dict[str, float]:
    """What work asks Ray for to be placed on a machine with an accelerator of this type; nothing if it needs none."""
    return {f"accelerator_type:{accelerator}": 0.001} if accelerator else {}


def is_this_machine_alone() -> bool:
    """Whether the connected Ray has no other live machine than this one."""
    import ray

    return [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]] == [socket.gethostname()]


def max_cores_per_worker(nodes: Collection[Node], workers: int, *, gpu: bool) -> int:
    """The most cores that each of ``workers`` can have on ``nodes`` at the same time; 0 where they do not fit.

    A worker runs on one machine, so the sum of the cluster's cores does not matter. With ``gpu`` each worker has a GPU,
    and no more than that GPU's share of its machine's cores: workers on the other GPUs need some too.
    """
    room = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    room = [(cores, gpus) for cores, gpus in room if cores and (gpus or not gpu)]
    sizes = {max(1, cores // max(count, gpus * gpu)) for cores, gpus in room for count in range(1, workers + 1)}
    for size in sorted(sizes, reverse=True):
        if sum(min(cores // size, gpus) if gpu else cores // size for cores, gpus in room) >= workers:
            return size
    return 0


def pin_to_driver_node() -> Any:
    """The scheduling strategy of what must be on the driver's machine: a file there, or its end with the driver's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def run_on_nodes(
    nodes: Sequence[str],
    question: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    needs: Mapping[str, Mapping[str, float]] | None = None,
    **named: Any,
) -> dict[str, Any]:
    """The answers of ``question(*arguments, **named)`` on the machines of the connected Ray with these node ids.

    It runs without cores, so also where other work has them all, unless a machine has ``needs``: ``num_cpus`` and
    ``num_gpus``. An exception is an answer, too; a machine that does not answer within ``seconds`` is missing.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(num_cpus=0, max_retries=0)(question)
    node_by_task: dict[Any, str] = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ask.options(scheduling_strategy=there, **(needs or {}).get(node, {}))
        node_by_task[task.remote(*arguments, **named)] = node
    done, waiting = (
        ray.wait(list(node_by_task), num_returns=len(node_by_task), timeout=seconds) if node_by_task else ([], [])
    )
    answers: dict[str, Any] = {}
    for answer in done:
        try:
            answers[node_by_task[answer]] = ray.get(answer)
        except Exception as failure:  # noqa: BLE001 whatever the machine's process fails with
            answers[node_by_task[answer]] = failure
    for late in waiting:
        ray.cancel(late, force=True)
    return answers


def check_shared(flag: str, directory: StorageDir) -> None:
    """Raise ``UserError`` when a machine of the connected Ray, where work may be placed, does not share ``directory``.

    Each is asked for a file that this one has just made there, because nothing else tells a shared disk from another
    disk at the same path. Those that do not answer in ``ASKING_SECONDS`` are not waited for: they take no work either.
    """
    folder = directory.local_path
    if folder is None or is_this_machine_alone():
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, probe = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    os.close(descriptor)
    try:
        missing_on = sorted(name for name, sees in run_on_other_nodes(os.path.exists, probe) if not sees)
    finally:
        Path(probe).unlink()
    if missing_on:
        raise UserError(
            f"{flag} {folder} is on this machine's disk, which {', '.join(missing_on)} of the cluster cannot see: give "
            f"object storage, such as {flag} s3://bucket/folder, or a folder on a disk that all machines share."
        )


def run_on_other_nodes(question: Callable[..., T], *arguments: Any) -> list[tuple[str, T]]:
    """What ``question(*arguments)`` returns on each other machine of the connected Ray where work may be placed.

    With each answer comes its machine's name. Those that do not answer in ``ASKING_SECONDS`` are left out.
    """
    import ray

    own = ray.get_runtime_context().get_node_id()
    others = {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own and _has_room(node)
    }
    answers = run_on_nodes(list(others), question, *arguments, seconds=ASKING_SECONDS)
    return [(others[node], answer) for node, answer in answers.items() if not isinstance(answer, Exception)]


def _has_room(node: Mapping[str, Any]) -> bool:
    return any(node["Resources"].get(name) for name in ("CPU", "GPU"))


def wait_for_resources(what: str, bundles: Sequence[Node]) -> None:
    """Wait until Ray has free resources for the ``bundles`` of ``what``, with a message.

    For work whose own request would outlive it: the placement group of an actor that asks for one while its driver
    ends is kept for ever by Ray 2.60, with what it reserves. This one is the driver's, and Ray removes it. A run that
    has lost a machine and looks for another one still depends on Ray Train's own request.
    """
    from ray.util import placement_group, remove_placement_group

    group, began, has_reported = placement_group([dict(bundle) for bundle in bundles]), time.monotonic(), False
    try:
        while not group.wait(RESOURCE_POLL_SECONDS):
            if not has_reported and time.monotonic() - began >= PLACING_SECONDS:
                has_reported = True
                errors.print(resource_wait_message(what, bundles), markup=False)
    finally:
        remove_placement_group(group)


def is_pending(bundles: Sequence[Node]) -> bool:
    """Whether a placement group of these ``bundles`` is pending; Ray does not tell whose."""
    from ray.util import placement_group_table

    def amounts(requests: Iterable[Node]) -> list[tuple[float, float]]:
        return sorted((bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)) for bundle in requests)

    groups = placement_group_table().values()
    waiting = [group["bundles"].values() for group in groups if group["state"] in ("PENDING", "RESCHEDULING")]
    return any(amounts(request) == amounts(bundles) for request in waiting)


def resource_wait_message(what: str, bundles: Sequence[Node]) -> str:
    """A sentence: which resources the ``bundles`` of ``what`` wait for, and what the cluster has."""
    import ray

    def amounts(resources: Node, nothing: str) -> str:
        types = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        counts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
        return (" and ".join(counts) or nothing) + "".join(f" with {name}" for name in types)

    alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    machines = ", ".join(f"{name} {amounts(resources, '0 CPU')}" for name, resources in alive)
    times = f"{len(bundles)} times " if len(bundles) > 1 else ""
    return (
        f"Waiting for {times}{amounts(bundles[0], 'a machine')} for {what}. Ray has {machines}, of which "
        f"{amounts(ray.available_resources(), '0 CPU')} is free: stop other work there, or add machines; Ctrl-C exits."
    )


@contextmanager
def report_lost_nodes(consequence: str) -> Iterator[None]:
    """While the block runs, say which machine has left the connected Ray, and what follows from that.

    Ray repeats a lost machine's tasks by itself and says nothing; where no machine is left it waits for one.
    """
    import ray

    def machines() -> dict[str, str]:
        return {
            node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"] and _has_room(node)
        }

    ended = threading.Event()

    def watch() -> None:
        known: dict[str, str] | None = None
        while not ended.wait(LOSS_POLL_SECONDS):
            with suppress(Exception):  # Ray is shutting down or unreachable, which is reported elsewhere
                now = machines()
                for gone in (known or {}).keys() - now.keys():
                    errors.print(f"{(known or {})[gone]} has left the cluster: {consequence}.", markup=False)
                if not now and known != now:
                    errors.print("The cluster has no machine for the work: waiting until one joins; Ctrl-C exits.")
                known = now

    thread = threading.Thread(target=watch, name="losses", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
