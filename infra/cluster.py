"""Start or join Ray: quietly, on loopback, with the settings that every command relies on.

In: an address, or none for a Ray of our own that ends with the command. Out: an initialised Ray.
A plain ``ray.init()`` would join whatever cluster happens to run on the machine, print a page, send usage
statistics, and leave ``-m`` modules unimportable in workers that are started from another folder.
"""

import atexit
import ipaddress
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from infra.command import INTERRUPTED, interrupt_on_termination, uninterrupted
from infra.console import errors
from infra.errors import UserError, first_line
from infra.local_ray import (
    environment_variables,
    on_loopback,
    only_needed_processes,
    own_process_group,
    refuse_exposed,
    temporary_folder,
)
from infra.progress import doing
from infra.storage import TEMPORARY

PROJECT = Path(__file__).resolve().parent.parent

PACKAGES = ("infra", "pipeline", "train", "tune")

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray Train's controller polls its workers at this interval, 2 s by default, and notices the end of a run that late.
    # Each poll takes time from a training on the CPU (a tenth of its tokens/s at 0.1 s on two cores).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A process of its own that warns of spot machines about to be preempted; a killed run continues anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # A raylet connects to its own store as it starts and, where that is not up yet, tries again after a second.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # A call to a machine that has lost its power is given up when the connection is found dead: by default after 5 + 2
    # minutes, in which a task that ran there was not repeated. Ray's servers break connections that ask more often than
    # once a minute, unless they were started with a shorter time themselves.
    "RAY_grpc_client_keepalive_time_ms": "65000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    # Ray Tune forgets trials that finished since its last snapshot when the driver is killed.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
}

ANSWER_SECONDS = 10.0
"""How long a cluster may take to accept a connection."""


WAITER = "waits for Ray"
"""Name of a thread that calls Ray and cannot be told to stop."""

ASKING_SECONDS = 20.0
"""How long a machine of the cluster may take to answer a question: a process must start there."""

LOSS_SECONDS = 2.0
"""Between two looks at which machines there are."""

PLACING_SECONDS = 1.0
"""How long Ray may look for free resources before we report it; it takes milliseconds where there are some."""

ROOM_SECONDS = 0.2
"""Between two looks at whether to wait any longer for room."""


@contextmanager
def connected(
    address: str | None = None,
    *,
    cpus: int | None = None,
    prestart: bool = False,
) -> Iterator[None]:
    """Join the Ray cluster at ``address`` or ``RAY_ADDRESS``, or start one on this machine, for the block's duration.

    ``cpus`` is the number of parallel tasks that a local Ray may run (default: the machine's cores), and
    ``prestart`` starts a worker for each in advance, for work that needs them all at once. Raises ``UserError`` when
    nothing answers at ``address``.
    """
    named = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # inside another block: the Ray of a ladder is also the Ray of its rungs
        yield
        return
    search_path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": search_path}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    local = address in (None, "", "local")
    if address and not local:
        with doing(f"joining the Ray cluster at {address}"):
            _join(address, named, runtime_env=_travelling(variables), **quiet)
    else:
        # Inherited rather than a runtime_env, for which Ray would discard the workers that it starts in advance.
        os.environ.update(variables)
        os.environ.setdefault("RAY_TMPDIR", temporary_folder())
        os.environ["RAY_prestart_worker_first_driver"] = str(int(prestart))  # noqa: SIM112 spelled as Ray reads it
        # A Ray whose ray.init was interrupted cannot be shut down: the command ended in a segmentation fault.
        with (
            doing("starting Ray"),
            on_loopback(),
            own_process_group(),
            only_needed_processes(),
            uninterrupted(),
            _unshadowed(),
        ):
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    interrupt_on_termination()
    try:
        if local:
            refuse_exposed()
        yield
    finally:
        if any(thread.name == WAITER for thread in threading.enumerate()):
            atexit.register(_leave)  # before Ray's own handler, which was registered first
        else:
            ray.shutdown()


def _unshadowed() -> AbstractContextManager[None]:
    """Start Ray elsewhere when the current folder has a module or package with the name of one of ours.

    Ray puts the folder in which it starts first on its workers' search path, where a ``train.py`` would hide ours.
    """
    here = Path.cwd()
    hides = here != PROJECT and any(
        (here / f"{name}{end}").exists() for name in PACKAGES for end in (".py", "/__init__.py")
    )
    return chdir(PROJECT) if hides else nullcontext()


def _leave() -> None:
    """End this process as it is, after an interrupt that Ray did not answer in time.

    A thread waits for that answer still, and where Ray is shut down under it, the command ends in a segmentation fault
    (once in two tries on a busy machine). Ray's processes end with ours.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _travelling(variables: Mapping[str, str]) -> dict[str, Any]:
    """The runtime environment of workers on other machines: ``variables``, and our code, which only this machine has.

    ``ray job submit`` has sent its working directory to all machines, but code that is installed would be missing.
    """
    modules = [str(PROJECT / package) for package in PACKAGES]
    return {"env_vars": dict(variables), "py_modules": modules, "excludes": ["pictures", "__pycache__"]}


def _join(address: str, named: str, **settings: Any) -> None:
    """Join the cluster at ``address``, which the flag or variable ``named`` gave. Raises ``UserError`` without one."""
    import ray

    try:
        if address != "auto":  # which Ray looks up
            _connect(address)
        # Each of Ray's attempts takes 40 seconds, and by default it makes twenty.
        with environment_variables({"RAY_gcs_server_port_wait_time_s": "1"}):
            ray.init(address=address, **settings)
    except (OSError, RuntimeError, ValueError) as failure:
        raise UserError(
            f"no Ray cluster answers at {named} {address}: {first_line(failure).rstrip('.')}. Start one with "
            f"'ray start --head' (where it asks for a token, 'export RAY_AUTH_MODE=token'), or leave {named} out "
            "to use this machine."
        ) from failure


def _connect(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` when nothing listens at ``address``; Ray would take 40 seconds to notice."""
    import ray.util

    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not (host and colon):
        raise ValueError(f"{address} is not of the form HOST:PORT")
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray takes these for this address
        host = ray.util.get_node_ip_address()
    socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()


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
    """Wait until the connected Ray has a machine with an accelerator of this type.

    A task that needs one is pending meanwhile, for which an autoscaler adds a machine. Raises ``UserError`` on a Ray of
    our own, which no machine joins.
    """
    import ray
    import ray.util

    if eligible_nodes(accelerator=accelerator):
        return
    resources = (name for node in eligible_nodes().values() for name in node)
    names = {name.partition(":")[2] for name in resources if "accelerator_type:" in name}
    lack = f"--accelerator {accelerator} is not in the cluster, which has {', '.join(sorted(names)) or 'none'}"
    if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        raise UserError(f"{lack}.")
    errors.print(f"{lack}: waiting until a machine with one joins (an autoscaler may add it); Ctrl-C exits.")
    asked = [ray.remote(num_cpus=0, accelerator_type=accelerator)(_nothing).remote()]
    while not ray.wait(asked, timeout=1)[0]:
        pass


def _nothing() -> None:
    """Need a machine."""


def accelerator_resource(accelerator: str | None) -> dict[str, float]:
    """What work asks Ray for to be placed on a machine with an accelerator of this type; nothing if it needs none."""
    return {f"accelerator_type:{accelerator}": 0.001} if accelerator else {}


def is_this_machine_alone() -> bool:
    """Whether the connected Ray has no other live machine than this one."""
    import ray

    return [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]] == [socket.gethostname()]


def cores_each(nodes: Collection[Node], workers: int, *, gpu: bool) -> int:
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


def here() -> Any:
    """The scheduling strategy of what must be on the driver's machine: a file there, or its end with the driver's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def ask_nodes(
    nodes: Sequence[str], question: Callable[..., Any], *arguments: Any, seconds: float, num_gpus: int = 0, **named: Any
) -> dict[str, Any]:
    """The answers of ``question(*arguments, **named)`` on the machines of the connected Ray with these node ids.

    It runs without cores, so also where other work has them all. An exception is an answer, too; a machine that does
    not answer within ``seconds`` is missing.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0)(question)
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments, **named):
        node for node in nodes
    }  # fmt: skip
    done, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    answers: dict[str, Any] = {}
    for answer in done:
        try:
            answers[asked[answer]] = ray.get(answer)
        except Exception as failure:  # noqa: BLE001 whatever the machine's process fails with
            answers[asked[answer]] = failure
    for late in waiting:
        ray.cancel(late, force=True)
    return answers


def refuse_unshared(flag: str, folder: Path) -> None:
    """Raise ``UserError`` when a machine of the connected Ray, where work may be placed, does not share ``folder``.

    Each is asked for a file that this one has just made there, because nothing else tells a shared disk from another
    disk at the same path. Those that do not answer in ``ASKING_SECONDS`` are not waited for: they take no work either.
    """
    if is_this_machine_alone():
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, probe = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
    os.close(descriptor)
    try:
        blind = sorted(name for name, sees in ask_others(os.path.exists, probe) if not sees)
    finally:
        Path(probe).unlink()
    if blind:
        raise UserError(
            f"{flag} {folder} is on this machine's disk, which {', '.join(blind)} of the cluster cannot see: give "
            f"object storage, such as {flag} s3://bucket/folder, or a folder on a disk that all machines share."
        )


def ask_others(question: Callable[..., T], *arguments: Any) -> list[tuple[str, T]]:
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
    answers = ask_nodes(list(others), question, *arguments, seconds=ASKING_SECONDS)
    return [(others[node], answer) for node, answer in answers.items() if not isinstance(answer, Exception)]


def _has_room(node: Mapping[str, Any]) -> bool:
    """Whether tasks can be placed on a machine."""
    return any(node["Resources"].get(name) for name in ("CPU", "GPU"))


@contextmanager
def placing(what: str, bundles: Sequence[Node], placed: Callable[[], bool]) -> Iterator[threading.Event]:
    """While the block runs, report it when Ray cannot place the ``bundles`` it was asked for, and what it has.

    ``placed`` returns whether they have been placed. The event that is yielded is set while they are waiting.
    """
    ended, waits = threading.Event(), threading.Event()

    def watch() -> None:
        since: float | None = None
        told = False
        while not ended.wait(PLACING_SECONDS / 4):
            lacking = False
            with suppress(Exception):  # Ray is shutting down or unreachable, which is reported elsewhere
                lacking = not placed() and _is_pending(bundles)
            if not lacking:
                since, told = None, False
                waits.clear()
                continue
            waits.set()
            since = since or time.monotonic()
            if not told and time.monotonic() - since >= PLACING_SECONDS:
                told = True
                errors.print(lack(what, bundles), markup=False)

    thread = threading.Thread(target=watch, name="placing", daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()


def await_room(bundles: Sequence[Node], stopped: Callable[[], object]) -> bool:
    """Wait until Ray has room for the ``bundles``; returns whether it has, or is not waited for because of ``stopped``.

    For work whose own request would outlive it: the placement group of an actor that asks for one while its driver
    ends is kept for ever by Ray 2.60, with what it reserves. This one is the driver's, and Ray removes it. A run that
    has lost a machine and looks for another one still depends on Ray Train's own request.
    """
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles])
    try:
        while not group.wait(ROOM_SECONDS):
            if stopped():
                return False
        return True
    finally:
        remove_placement_group(group)


def _is_pending(bundles: Sequence[Node]) -> bool:
    """Whether a placement group of these ``bundles`` is pending; Ray does not tell whose."""
    from ray.util import placement_group_table

    def amounts(asked: Iterable[Node]) -> list[tuple[float, float]]:
        return sorted((bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)) for bundle in asked)

    groups = placement_group_table().values()
    waiting = [group["bundles"].values() for group in groups if group["state"] in ("PENDING", "RESCHEDULING")]
    return any(amounts(asked) == amounts(bundles) for asked in waiting)


def lack(what: str, bundles: Sequence[Node]) -> str:
    """A sentence: which resources the ``bundles`` of ``what`` wait for, and what the cluster has."""
    import ray

    def amounts(resources: Node) -> str:
        types = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        counts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
        return " and ".join(counts) + "".join(f" with {name}" for name in types)

    alive = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    machines = ", ".join(f"{name} {amounts(resources) or '0 CPU'}" for name, resources in alive)
    wanted = amounts(bundles[0]) if len(bundles) == 1 else f"{len(bundles)} times {amounts(bundles[0])}"
    return (
        f"Waiting for {wanted} for {what}. Ray has {machines}, of which "
        f"{amounts(ray.available_resources()) or '0 CPU'} is free: stop other work there, or add machines; Ctrl-C "
        "exits."
    )


@contextmanager
def losses_reported(consequence: str) -> Iterator[None]:
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
        while not ended.wait(LOSS_SECONDS):
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


@contextmanager
def ray_files(folder: Path) -> Iterator[Path]:
    """A place in ``folder`` for the files that Ray Train or Tune write, removed when the block ends.

    Those of drivers that were killed are removed too: a run or search is continued from our own files.
    """
    for leftover in folder.glob("ray-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    place = folder / f"ray-{os.getpid()}"
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
