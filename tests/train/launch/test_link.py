"""What driver and workers tell each other, without Ray: the actor's methods are called one by one there, too."""

from collections.abc import Callable

from train.launch.link import (
    Activity,
    Channel,
    CycleDone,
    EarlierWorkers,
    MicroBatchTooLarge,
    Order,
    PrintLine,
    RecordedProgress,
    Refusal,
    SystemMetrics,
    WorkerStarted,
)
from train.result import RunResult

NEW = RecordedProgress()
LOADING = Activity("loading the data", 0)


def started(step: int = 0) -> WorkerStarted:
    return WorkerStarted(step, ["w2"], ["a"], {})


def cycle(step: int, loss: float = 1.0) -> CycleDone:
    return CycleDone({"step": step, "train_loss": loss})


def cycles(channel: Channel) -> list[tuple[int, float]]:
    messages = channel.take_updates().messages
    return [(each.cycle["step"], each.cycle["train_loss"]) for each in messages if isinstance(each, CycleDone)]


def test_the_driver_gets_every_message_once_and_in_order() -> None:
    channel = Channel(NEW)
    assert channel.take_updates().silence is None
    assert channel.start(started()) == (1, NEW)
    messages = [PrintLine("w2: downloading s3://lab/tokens"), cycle(10)]
    for message in messages:
        channel.post(message)
    updates = channel.take_updates()
    assert updates.messages == [started(), *messages]
    assert updates.silence is not None
    assert channel.take_updates().messages == []


def test_cycles_that_a_restarted_worker_repeats_are_not_passed_on_again() -> None:
    """The worker was killed after step 30 and continues from its checkpoint of step 15."""
    channel = Channel(RecordedProgress(10))  # recorded before this command
    channel.start(started(10))
    for step in (20, 30):
        channel.post(cycle(step))
    assert cycles(channel) == [(20, 1.0), (30, 1.0)]
    assert channel.start(started(15)) == (2, RecordedProgress(30))
    for step in (20, 30, 40):
        channel.post(cycle(step, loss=2.0))
    assert cycles(channel) == [(40, 2.0)]


def test_cycles_that_were_lost_with_a_worker_are_requested() -> None:
    channel = Channel(NEW)
    channel.start(started())
    channel.post(cycle(10))  # The one of step 20 was on its way.
    assert channel.start(started(20)) == (2, RecordedProgress(10)), "cycles after step 10 are sent again from the log"
    channel.post(cycle(20))
    assert cycles(channel) == [(10, 1.0), (20, 1.0)]


def test_a_restarted_worker_continues_the_seconds_of_its_telemetry() -> None:
    recorded = RecordedProgress(0, 90)  # before this command
    channel = Channel(recorded)
    assert channel.start(started()) == (1, recorded)
    metrics = SystemMetrics(92, {"system/worker_cpu_percent": 99.0})
    channel.post(metrics)
    assert metrics in channel.take_updates().messages
    channel.post(SystemMetrics(91, {"system/w2/worker_cpu_percent": 99.0}))  # of another machine
    assert channel.start(started())[1] == channel.recorded_progress() == RecordedProgress(0, 92)


def test_a_worker_is_ordered_to_stop_and_a_replaced_one_to_exit() -> None:
    channel = Channel(NEW)
    first, _ = channel.start(started())
    assert channel.heartbeat(first, LOADING) is Order.CONTINUE
    second, _ = channel.start(started())
    training = Activity("training", 3)
    assert channel.heartbeat(first, training) is Order.EXIT
    assert channel.take_updates().activity == LOADING
    assert channel.heartbeat(second, training) is Order.CONTINUE
    assert channel.take_updates().activity == training
    channel.request_stop()
    assert channel.heartbeat(second, training) is Order.STOP


def test_a_worker_learns_that_memory_ran_out_since_the_last_one_started_on_its_machine() -> None:
    channel = Channel(NEW)
    kills = [("w1", 5), ("w1", 5), ("w2", 7), ("w1", 6), ("w1", 6)]
    assert [channel.earlier_workers(*each).out_of_memory for each in kills] == [False, False, False, True, False]


def test_workers_learn_where_earlier_ones_started_and_why_one_gave_up(make_result: Callable[..., RunResult]) -> None:
    result = make_result(outcome="oom")
    channel = Channel(NEW)
    assert channel.earlier_workers("", 0) == EarlierWorkers()
    channel.start(started(0))
    channel.start(started(15))
    channel.post(Refusal("the disk is full"))
    channel.post(Refusal("the disk is full here, too", result))
    assert channel.earlier_workers("", 0) == EarlierWorkers((0, 15), Refusal("the disk is full"))
    assert channel.earlier_workers("", 0) == EarlierWorkers((0, 15)), (
        "it is told once: the cause may be gone when the user tries again"
    )
    channel.post(Refusal("out of memory", result))
    for _ in range(2):
        assert channel.earlier_workers("", 0) == EarlierWorkers((0, 15), Refusal("out of memory", result))


def test_a_micro_batch_that_does_not_fit_is_known_to_all_later_workers_and_printed_once() -> None:
    channel = Channel(NEW)
    channel.post(MicroBatchTooLarge(8, "8 does not fit"))
    channel.post(MicroBatchTooLarge(8, "8 does not fit here either"))
    assert (
        channel.earlier_workers("", 0).failed_micro_batches
        == channel.earlier_workers("", 0).failed_micro_batches
        == (8,)
    )
    assert channel.take_updates().messages == [MicroBatchTooLarge(8, "8 does not fit")]
