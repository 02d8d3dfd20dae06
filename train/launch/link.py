"""The messages between a run's driver and its workers, which go over a link that ends with the driver.

A worker in the driver's own process uses the :class:`Channel` itself. For workers on Ray it is an actor on the driver's
machine, which they reach by a :class:`RayLink`. Driver and worker share no file and no clock. The loop never waits for
an answer: messages are posted, and a thread learns whether to stop. Imports no torch, because the actor's process
starts while the trainer does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.result import RunResult  # The actor's process need not import it.

STOP_MESSAGE = "Stopping after this step, or this micro-batch of a long step, and saving a checkpoint"
"""Text that is printed when the driver is interrupted."""

POLL_SECONDS = 0.5
"""Interval between two heartbeats of a worker, and between two looks of the driver for updates."""


@dataclass(frozen=True)
class WorkerStarted:
    """The workers start to train."""

    step: int
    """The step from which the workers resume; 0 for a new run."""
    hosts: list[str]
    """The name of each worker's machine, in the order of their ranks."""
    nodes: list[str]
    """Ray's id of each worker's machine; empty in the driver's own process."""
    machine: dict[str, str]
    """Properties of the first worker's machine by name."""


@dataclass(frozen=True)
class CycleDone:
    """A cycle has been reported."""

    cycle: dict[str, Any]
    """The fields of the cycle's :class:`train.result.CycleReport`; a run's cycle also has a printed ``line``."""


@dataclass(frozen=True)
class SystemMetrics:
    """Telemetry of a machine that trains."""

    second: int
    """The second of the run at which the metrics were read."""
    metrics: dict[str, float]
    """Values by the metric's name in MLflow."""


@dataclass(frozen=True)
class PrintLine:
    """A line for the driver's terminal."""

    text: str


@dataclass(frozen=True)
class MicroBatchTooLarge:
    """A micro-batch does not fit in memory, and a smaller one is tried."""

    micro_batch: int
    text: str
    """A line about the retry for the driver's terminal."""


@dataclass(frozen=True)
class Refusal:
    """One of several workers gives up, which all of them must do when Ray has started them again."""

    reason: str
    result: "RunResult | None" = None
    """The run's result, if the worker gave up because its memory ran out."""


Message = WorkerStarted | CycleDone | SystemMetrics | PrintLine | MicroBatchTooLarge | Refusal


@dataclass(frozen=True)
class Activity:
    """The work that a worker is doing, as its heartbeats report it."""

    description: str
    """The work as a phrase, such as "loading the data"."""
    step: int
    """Number of steps that the worker has launched."""
    micro_batch: int = 0
    """Number of micro-batches that the worker has launched in the step after them."""
    micro_batches: int = 1
    """Number of micro-batches per step."""


class Order(Enum):
    """The driver's reply to a heartbeat."""

    CONTINUE = "continue"
    STOP = "stop"
    """Stop after the current step, and save."""
    EXIT = "exit"
    """Exit at once, because another worker has been started instead."""


@dataclass(frozen=True)
class RecordedProgress:
    """The part of a run that the driver has recorded."""

    step: int = 0
    """Step of the last recorded cycle."""
    telemetry_second: int = 0
    """Second of the run of the last recorded telemetry."""


@dataclass(frozen=True)
class EarlierWorkers:
    """The history of a command's earlier workers, for a worker that starts."""

    starts: tuple[int, ...] = ()
    """The steps from which the earlier workers started."""
    refusal: Refusal | None = None
    """The refusal of one of several workers; None if none gave up."""
    failed_micro_batches: tuple[int, ...] = ()
    """Micro-batches that were chosen automatically and did not fit."""
    out_of_memory: bool = False
    """Whether the system has killed the last worker, or another process beside it, because memory ran out."""


@dataclass(frozen=True)
class WorkerUpdates:
    """The news from the workers since the driver last took updates."""

    messages: list[Message] = field(default_factory=list)
    """Messages in the order of their arrival."""
    silence: float | None = None
    """Seconds since the last heartbeat of the first worker; None while there is no worker."""
    activity: Activity | None = None
    """The first worker's activity at its last heartbeat."""


class Channel:
    """The state of a link, in the driver's process or as an actor, which runs the methods one by one.

    Workers call the methods up to :meth:`recorded_progress`, the driver the others.
    """

    node_id = ""
    """Ray's id of this worker's machine; empty in the driver's own process."""

    def __init__(self, recorded: RecordedProgress) -> None:
        self._last_step, self._telemetry_second = recorded.step, recorded.telemetry_second
        self._starts: list[int] = []
        self._refusal: Refusal | None = None
        self._too_large: list[int] = []
        self._oom_kills: dict[str, int] = {}
        self._should_stop = False
        self._messages: list[Message] = []
        self._last_heartbeat: float | None = None
        self._activity: Activity | None = None

    def post(self, message: Message) -> None:
        """Send ``message``, without waiting until it has arrived."""
        match message:
            case CycleDone(cycle):
                if cycle["step"] <= self._last_step:  # A worker that was restarted repeats it.
                    return
                self._last_step = cycle["step"]
            case SystemMetrics(second):
                self._telemetry_second = max(self._telemetry_second, second)
            case MicroBatchTooLarge(micro_batch):
                if micro_batch in self._too_large:
                    return
                self._too_large.append(micro_batch)
                self._last_heartbeat = None  # Several workers are started again, and are silent meanwhile.
            case Refusal():
                self._refusal = self._refusal or message
                return
        self._messages.append(message)

    def flush(self) -> None:
        """Wait until the messages of this process have arrived."""

    def earlier_workers(self, node_id: str, oom_kills: int) -> EarlierWorkers:
        """Return the history of the earlier workers, for a worker that starts; a refusal without a result is returned
        once.

        ``oom_kills`` is the number of processes that its machine has killed until now because memory ran out.
        """
        refusal = self._refusal
        if refusal and refusal.result is None:
            self._refusal = None
        killed = oom_kills > self._oom_kills.get(node_id, oom_kills)
        self._oom_kills[node_id] = oom_kills
        return EarlierWorkers(tuple(self._starts), refusal, tuple(self._too_large), killed)

    def start(self, worker: WorkerStarted) -> tuple[int, RecordedProgress]:
        """Announce that training starts.

        Cycles after the recorded progress must be sent again: an earlier worker may have been killed before its message
        left.

        Returns: (the number of the worker, which its heartbeats carry, the progress that has been recorded).
        """
        self._starts.append(worker.step)
        self._last_heartbeat = time.monotonic()
        self.post(worker)
        return len(self._starts), self.recorded_progress()

    def heartbeat(self, number: int, activity: Activity) -> Order:
        """Report that the worker with this number is alive."""
        if number != len(self._starts):
            return Order.EXIT
        self._last_heartbeat, self._activity = time.monotonic(), activity
        return Order.STOP if self._should_stop else Order.CONTINUE

    def recorded_progress(self) -> RecordedProgress:
        return RecordedProgress(self._last_step, self._telemetry_second)

    def request_stop(self) -> None:
        """Request the run to stop after the current step."""
        self._should_stop = True

    def poll(self) -> WorkerUpdates | None:
        """Return the updates that have arrived; None while the link is being set up."""
        return self.take_updates()

    def take_updates(self) -> WorkerUpdates:
        """Wait for all updates, and return them."""
        message_count = len(self._messages)  # A thread that trains may append meanwhile.
        messages = [self._messages.pop(0) for _ in range(message_count)]
        silence = None if self._last_heartbeat is None else time.monotonic() - self._last_heartbeat
        return WorkerUpdates(messages, silence, self._activity)


class RayLink:
    """A link to a :class:`Channel` that is an actor, with the same methods."""

    def __init__(self, actor: Any) -> None:
        import ray  # Trials and runs in this process do without it.

        self._ray = ray
        self._actor = actor
        self._pending: ray.ObjectRef | None = None
        """Updates that the driver has asked for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayLink, (self._actor,)

    @property
    def node_id(self) -> str:
        return self._ray.get_runtime_context().get_node_id()

    def post(self, message: Message) -> None:
        self._actor.post.remote(message)

    def flush(self) -> None:
        self._ray.get(self._actor.flush.remote())

    def earlier_workers(self, node_id: str, oom_kills: int) -> EarlierWorkers:
        return self._ray.get(self._actor.earlier_workers.remote(node_id, oom_kills))

    def start(self, worker: WorkerStarted) -> tuple[int, RecordedProgress]:
        return self._ray.get(self._actor.start.remote(worker))

    def heartbeat(self, number: int, activity: Activity) -> Order:
        return self._ray.get(self._actor.heartbeat.remote(number, activity))

    def recorded_progress(self) -> RecordedProgress:
        return self._ray.get(self._actor.recorded_progress.remote())

    def request_stop(self) -> None:
        self._actor.request_stop.remote()

    def poll(self) -> WorkerUpdates | None:
        pending = self._pending or self._actor.take_updates.remote()
        has_arrived = bool(self._ray.wait([pending], timeout=0)[0])
        self._pending = None if has_arrived else pending
        return self._ray.get(pending) if has_arrived else None

    def take_updates(self) -> WorkerUpdates:
        pending = [self._pending] if self._pending else []
        self._pending = None
        *earlier, last = self._ray.get([*pending, self._actor.take_updates.remote()])
        messages = [message for updates in (*earlier, last) for message in updates.messages]
        return WorkerUpdates(messages, last.silence, last.activity)


Link = Channel | RayLink
"""The connection of the driver and its workers."""


@contextmanager
def open_ray_link(recorded: RecordedProgress) -> Iterator[RayLink]:
    """Open a link to the actor of a run with this ``recorded`` progress. The actor starts in the background."""
    import ray

    # The actor's process would import flags and storage with it.
    from infra.ray.machines import driver_node_strategy

    actor: Any = ray.remote(num_cpus=0)(Channel)
    channel = actor.options(scheduling_strategy=driver_node_strategy()).remote(recorded)
    try:
        yield RayLink(channel)
    finally:
        ray.kill(channel)
