"""What driver and workers tell each other, without Ray: the actor's methods are called one by one there, too."""

from collections.abc import Callable

from train.launch.channel import Channel, EarlierWorkers
from train.result import RunResult


def cycle(step: int, loss: float = 1.0) -> dict[str, float]:
    return {"step": step, "train_loss": loss}


def cycles(channel: Channel) -> list[tuple[int, float]]:
    return [
        (content["step"], content["train_loss"]) for kind, content in channel.take_updates().messages if kind == "cycle"
    ]


def test_the_driver_is_told_everything_once_and_in_order() -> None:
    channel = Channel(0, 0)
    assert channel.take_updates().silence is None
    assert channel.worker_started(0, {"hosts": ["w2"]}) == (1, 0, 0)
    channel.print_line("w2 fetches s3://lab/tokens")
    channel.cycle(cycle(10))
    news = channel.take_updates()
    assert [kind for kind, _ in news.messages] == ["worker_started", "print_line", "cycle"]
    assert news.silence is not None
    assert channel.take_updates().messages == []


def test_what_a_restarted_worker_repeats_is_not_passed_on_again() -> None:
    """The worker was killed behind step 30 and begins at its checkpoint of step 15."""
    channel = Channel(10, 0)  # known from before the command
    channel.worker_started(10, {})
    for step in (20, 30):
        channel.cycle(cycle(step))
    assert cycles(channel) == [(20, 1.0), (30, 1.0)]
    assert channel.worker_started(15, {}) == (2, 30, 0)
    for step in (20, 30, 40):
        channel.cycle(cycle(step, loss=2.0))
    assert cycles(channel) == [(40, 2.0)]


def test_what_was_lost_with_a_worker_is_asked_for() -> None:
    channel = Channel(0, 0)
    channel.worker_started(0, {})
    channel.cycle(cycle(10))  # the one of step 20 was on its way
    assert channel.worker_started(20, {}) == (2, 10, 0), "cycles after step 10 are sent again from the log"
    channel.cycle(cycle(20))
    assert cycles(channel) == [(10, 1.0), (20, 1.0)]


def test_a_restarted_worker_counts_its_telemetry_on() -> None:
    channel = Channel(0, 90)  # known from before the command
    assert channel.worker_started(0, {})[2] == 90
    channel.system(92, {"system/worker_cpu_percent": 99.0})
    assert ("system", (92, {"system/worker_cpu_percent": 99.0})) in channel.take_updates().messages
    channel.system(91, {"system/w2/worker_cpu_percent": 99.0})  # of another machine
    assert channel.worker_started(0, {})[2] == channel.telemetry_second() == 92


def test_a_worker_is_told_to_stop_and_a_replaced_one_to_end() -> None:
    channel = Channel(0, 0)
    first, *_ = channel.worker_started(0, {})
    assert channel.listen(first) == ""
    second, *_ = channel.worker_started(0, {})
    assert channel.listen(first) == "replaced"
    assert channel.take_updates().activity is None
    assert channel.listen(second, ("training", 3)) == ""
    assert channel.take_updates().activity == ("training", 3)
    channel.stop()
    assert channel.listen(second) == "stop"


def test_a_worker_learns_that_memory_ran_out_since_the_last_one_started_on_its_machine() -> None:
    channel = Channel(0, 0)
    counted = [("w1", 5), ("w1", 5), ("w2", 7), ("w1", 6), ("w1", 6)]
    assert [channel.earlier_workers(*each).out_of_memory for each in counted] == [False, False, False, True, False]


def test_workers_learn_where_earlier_ones_started_and_why_one_gave_up(make_result: Callable[..., RunResult]) -> None:
    result = make_result(outcome="oom")
    channel = Channel(0, 0)
    assert channel.earlier_workers() == EarlierWorkers()
    channel.worker_started(0, {})
    channel.worker_started(15, {})
    channel.refuse("the disk is full")
    channel.refuse("the disk is full here, too", result)
    assert channel.earlier_workers() == EarlierWorkers((0, 15), "the disk is full")
    assert channel.earlier_workers() == EarlierWorkers((0, 15)), (
        "it is told once: the cause may be gone when the user tries again"
    )
    channel.refuse("out of memory", result)
    assert channel.earlier_workers() == EarlierWorkers((0, 15), "out of memory", result)
