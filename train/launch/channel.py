"""What the driver of a run and its workers tell each other: one channel, which ends with the driver.

A run in the command's own process calls the channel directly. For workers of Ray it is an actor on the driver's
machine, called through a :class:`RemoteChannel`.

In: from the workers, where they started, their cycles, what their machine does, refusals; from the driver, the wish to
stop. Driver and worker share no file and no clock. The loop never waits for an answer: it hands cycles over and looks
at a flag, which a thread sets. Imports no torch, because the actor's process starts while the trainer does.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from train.result import RunResult  # which the actor's process need not import

STOP_MESSAGE = "Stopping after this step and saving"
"""Printed when the driver is interrupted."""

LISTEN_SECONDS = 0.5
"""How often a worker asks whether to stop, and the driver what is new."""


@dataclass(frozen=True)
class EarlierWorkers:
    """What a worker that starts must know of the earlier ones of the same command."""

    starts: tuple[int, ...] = ()
    """The steps that they started from."""
    refusal: str | None = None
    """Why one of several workers gave up, which all of them must do."""
    result: "RunResult | None" = None
    """The run's result, if that worker gave up because its memory ran out."""
    too_large: tuple[int, ...] = ()
    """Micro-batches that were chosen automatically and did not fit."""
    out_of_memory: bool = False
    """Whether the system has killed the last one, or another process beside it, because memory ran out."""


@dataclass(frozen=True)
class WorkerUpdates:
    """What has happened since the driver asked last."""

    messages: list[tuple[str, Any]] = field(default_factory=list)
    """(kind, content): ``worker_started`` with information about the worker, ``print_line`` with a line for the
    terminal, ``cycle`` with the report of a cycle, ``system`` with a second and the metrics of a machine."""
    silence: float | None = None
    """Seconds since the worker that trains was heard from; None while there is none."""
    activity: tuple[str, int] | None = None
    """What that worker does, and the steps that it has launched."""


class Channel:
    """What was said and not yet heard. Each method takes microseconds; an actor runs them one by one."""

    def __init__(self, last: int, telemetry_second: int) -> None:
        self._last = last
        self._telemetry_second = telemetry_second
        self._starts: list[int] = []
        self._refusal: str | None = None
        self._result: RunResult | None = None
        self._too_large: list[int] = []
        self._oom_kills: dict[str, int] = {}
        self._stopping = False
        self._messages: list[tuple[str, Any]] = []
        self._heard: float | None = None
        self._activity: tuple[str, int] | None = None

    def earlier_workers(self, machine: str = "", oom_kills: int = 0) -> EarlierWorkers:
        """What the worker that asks must know of earlier ones; a refusal is told once.

        ``oom_kills`` processes have been killed until now by the system of its ``machine``, because memory ran out.
        """
        refusal, self._refusal = self._refusal, None
        killed = oom_kills > self._oom_kills.get(machine, oom_kills)
        self._oom_kills[machine] = oom_kills
        return EarlierWorkers(tuple(self._starts), refusal, self._result, tuple(self._too_large), killed)

    def worker_started(self, step: int, about: dict[str, Any]) -> tuple[int, int, int]:
        """A worker starts from ``step``; ``about`` it the driver is told.

        Returns its number, the last known cycle and the last known second of telemetry. It must send the cycles after
        that step again: an earlier worker may have been killed before its message left.
        """
        self._starts.append(step)
        self._heard = time.monotonic()
        self._messages.append(("worker_started", about))
        return len(self._starts), self._last, self._telemetry_second

    def listen(self, number: int, activity: tuple[str, int] | None = None) -> str:
        """``stop`` or nothing; ``replaced`` for a worker in whose place another one has started.

        ``activity`` is what the worker does, and its step.
        """
        if number != len(self._starts):
            return "replaced"
        self._heard, self._activity = time.monotonic(), activity
        return "stop" if self._stopping else ""

    def cycle(self, cycle: dict[str, Any]) -> None:
        """A cycle's report; one that is repeated after a failure is passed on once."""
        if cycle["step"] > self._last:
            self._last = cycle["step"]
            self._messages.append(("cycle", cycle))

    def system(self, telemetry_second: int, metrics: dict[str, float]) -> None:
        """What a machine that trains did until ``telemetry_second`` of the run."""
        self._telemetry_second = max(self._telemetry_second, telemetry_second)
        self._messages.append(("system", (telemetry_second, metrics)))

    def telemetry_second(self) -> int:
        return self._telemetry_second

    def print_line(self, line: str) -> None:
        self._messages.append(("print_line", line))

    def flush(self) -> None:
        """Answer: what the caller has sent before has arrived."""

    def refuse(self, why: str, result: "RunResult | None" = None) -> None:
        """One of several workers gives up; Ray starts all of them again, and they are told what the first one said."""
        if self._refusal is None:
            self._refusal, self._result = why, result

    def too_large(self, micro_batch: int, line: str) -> None:
        """A worker found that ``micro_batch`` does not fit, and that a smaller one is to be tried: the ``line``."""
        if micro_batch not in self._too_large:
            self._too_large.append(micro_batch)
            self._heard = None  # several workers are started again, during which they are silent
            self.print_line(line)

    def stop(self) -> None:
        """The driver wants the run to stop after the current step."""
        self._stopping = True

    def take_updates(self) -> WorkerUpdates:
        """What the driver has not been told yet."""
        message_count = len(self._messages)  # a thread that trains may append meanwhile
        messages = [self._messages.pop(0) for _ in range(message_count)]
        return WorkerUpdates(messages, None if self._heard is None else time.monotonic() - self._heard, self._activity)


_SENT = ("cycle", "system", "print_line", "stop")
"""Methods whose end nobody waits for."""


class RemoteChannel:
    """A :class:`Channel` that is an actor: its methods are called by the same names."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sent = getattr(self.actor, name).remote(*arguments)
            return sent if name in _SENT else ray.get(sent)

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteChannel, (self.actor,)


@contextmanager
def open_channel(last: int, telemetry_second: int) -> Iterator[RemoteChannel]:
    """The actor of a run whose cycles are known up to step ``last``, and its telemetry up to ``telemetry_second``.

    It starts in the background.
    """
    from infra.ray.machines import (
        pin_to_driver_node,  # imported here because the actor's process would import flags and storage with it
    )

    actor: Any = ray.remote(num_cpus=0)(Channel)
    channel = actor.options(scheduling_strategy=pin_to_driver_node()).remote(last, telemetry_second)
    try:
        yield RemoteChannel(channel)
    finally:
        ray.kill(channel)


class DriverConnection:
    """The first worker's end: it catches up on cycles, and listens to the driver while the block runs."""

    def __init__(self, channel: Channel, step: int, about: dict[str, Any]) -> None:
        self.channel = channel
        self._number, self._last, self.telemetry_second = channel.worker_started(step, about)
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="channel", daemon=True)
        self.activity: Callable[[], tuple[str, int]] = lambda: ("loading the data", step)
        """What the worker does, and its step; asked by the thread that listens."""

    def __enter__(self) -> "DriverConnection":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(RayError):  # the driver has died
            self.channel.flush()

    def catch_up(self, cycles: Iterable[dict[str, Any]]) -> None:
        """Send those of the earlier ``cycles`` that did not arrive."""
        for cycle in cycles:
            if cycle["step"] > self._last:
                self.channel.cycle(cycle)

    def stopping(self) -> bool:
        return self._stop.is_set()

    def _listen(self) -> None:
        while not self._ended.wait(LISTEN_SECONDS):
            try:
                answer = self.channel.listen(self._number, self.activity())
            except RayError:  # the driver has died; Ray ends its workers
                return
            if answer == "replaced":  # it was cut off, and its checkpoints would mix with those of the other
                os._exit(1)
            if answer == "stop":
                self._stop.set()
