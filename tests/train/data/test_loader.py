"""Windows, their order, and the exact position: every window once an epoch, whoever reads it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from pipeline.shards import TokenShards
from train.config import Batch
from train.data.loader import PLANNED_WINDOWS, BatchLoader, WorkerShare, _copy_stream
from train.data.windows import Windows, permute

CPU = torch.device("cpu")


def windows_of(folder: Path, length: int = 32, seed: int = 0) -> Windows:
    return Windows(TokenShards(folder).streams("train"), length, seed)


def share_of(micro: int, accumulation: int, position: int = 0, rank: int = 0, workers: int = 1) -> WorkerShare:
    return WorkerShare(Batch(micro * accumulation * workers, micro, workers), position, rank)


def step_inputs(windows: Windows, position: int, micro: int, accumulation: int, workers: int) -> np.ndarray:
    """The windows of one optimizer step over all workers, in order of the position."""
    parts = []
    for rank in range(workers):
        loader = BatchLoader(windows, share_of(micro, accumulation, position, rank, workers), CPU)
        parts += [loader.next()[0].numpy() for _ in range(accumulation)]
    return np.concatenate(parts)


@settings(max_examples=200)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**31))
def test_the_order_is_a_bijection(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


@settings(max_examples=50)
@given(count=st.integers(2, 2**40), seed=st.integers(0, 1000), data=st.data())
def test_the_order_is_a_function_of_the_place(count: int, seed: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20)))
    together = permute(places, count, seed, 3)
    alone = [permute(places[i : i + 1], count, seed, 3)[0] for i in range(len(places))]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < count)).all()


def test_no_epoch_of_one_seed_repeats_an_epoch_of_another() -> None:
    orders = {permute(np.arange(500), 500, seed, epoch).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert abs(np.corrcoef(np.arange(500), permute(np.arange(500), 500, 0, 0))[0, 1]) < 0.15


@settings(max_examples=40)
@given(step=st.integers(1, 97), epoch=st.integers(0, 3))
def test_an_epoch_visits_every_window_once(small_shards: Path, step: int, epoch: int) -> None:
    windows = windows_of(small_shards)
    first, count = epoch * windows.count, windows.count
    seen = [windows.window_ids(np.arange(p, min(p + step, first + count))) for p in range(first, first + count, step)]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(count))


def test_windows_cover_each_shard_and_share_one_token(small_shards: Path) -> None:
    windows = windows_of(small_shards)
    rows = np.empty((windows.count, 33), dtype=np.int64)
    windows.read(np.arange(windows.count), rows)
    row = 0
    for stream in windows.streams:
        inside = (len(stream) - 1) // 32
        assert np.array_equal(rows[row : row + inside, :-1].ravel(), stream[: inside * 32])
        assert np.array_equal(rows[row : row + inside, 1:].ravel(), stream[1 : inside * 32 + 1])
        row += inside
    assert row == windows.count


@pytest.mark.parametrize(("tokens", "count"), [(64, 1), (65, 2), (96, 2), (97, 3)])
def test_the_last_window_needs_a_token_to_predict(tokens: int, count: int) -> None:
    """A stream of an exact multiple of the context length has one window fewer than that multiple."""
    windows = Windows([np.arange(tokens, dtype=np.uint16)], 32, 0)
    assert windows.count == count
    rows = np.empty((count, 33), dtype=np.int64)
    windows.read(np.arange(count), rows)
    assert rows[-1, -1] == count * 32


@pytest.mark.parametrize(("micro", "accumulation", "workers"), [(12, 1, 1), (4, 3, 1), (2, 3, 2), (1, 4, 3), (6, 1, 2)])
def test_a_step_has_the_same_windows_however_it_is_executed(
    small_shards: Path, micro: int, accumulation: int, workers: int
) -> None:
    windows = windows_of(small_shards)
    position = windows.count - 5  # spans two epochs
    expected = step_inputs(windows, position, 12, 1, 1)
    assert np.array_equal(step_inputs(windows, position, micro, accumulation, workers), expected)


@pytest.mark.parametrize(("micro", "accumulation", "workers"), [(1100, 1, 1), (300, 4, 1), (1100, 1, 2), (513, 3, 1)])
def test_a_step_of_more_windows_than_are_planned_at_once_has_all_of_them(
    small_shards: Path, micro: int, accumulation: int, workers: int
) -> None:
    """Three steps in a row, over the end of an epoch, each of whose windows are known from their places."""
    windows = windows_of(small_shards)
    size = micro * accumulation * workers
    assert size > PLANNED_WINDOWS
    for rank in range(workers):
        loader = BatchLoader(windows, share_of(micro, accumulation, 7, rank, workers), CPU)
        for step in range(3):
            places = 7 + step * size + rank * micro * accumulation + np.arange(micro * accumulation)
            expected = np.empty((len(places), 33), dtype=np.int64)
            windows.read(windows.window_ids(places), expected)
            actual = np.concatenate([loader.next()[0].numpy() for _ in range(accumulation)])
            assert np.array_equal(actual, expected[:, :-1])
            assert loader.position == 7 + (step + 1) * size


def test_a_split_of_exactly_one_window_is_read_again_and_again() -> None:
    """33 tokens are one window of 32, and 32 are none; a batch of three has it three times, at any seed."""
    for seed in range(5):
        windows = Windows([np.arange(33, dtype=np.uint16)], 32, seed)
        assert windows.count == 1
        loader = BatchLoader(windows, share_of(3, 2), CPU)
        for _ in range(4):
            inputs, targets = loader.next()
            assert inputs.tolist() == [list(range(32))] * 3
            assert targets.tolist() == [list(range(1, 33))] * 3
    with pytest.raises(UserError, match="has 32 tokens, but a window needs 33"):
        Windows([np.arange(32, dtype=np.uint16)], 32, 0)


@settings(max_examples=30)
@given(before=st.integers(0, 40), micro=st.sampled_from([1, 2, 4]))
def test_a_restored_position_continues_with_the_next_window(small_shards: Path, before: int, micro: int) -> None:
    windows = windows_of(small_shards)

    def loader(position: int, micro: int) -> BatchLoader:
        return BatchLoader(windows, share_of(micro, 4 // micro, position), CPU)

    straight = loader(0, 4)
    for _ in range(before):
        straight.next()
    assert straight.position == before * 4
    resumed = loader(straight.position, micro)
    parts = [resumed.next() for _ in range(4 // micro)]
    inputs, targets = straight.next()
    assert torch.equal(torch.cat([p[0] for p in parts]), inputs)
    assert torch.equal(torch.cat([p[1] for p in parts]), targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_are_the_same_whoever_reads_them_and_when(small_shards: Path, threads: int, prefetch: bool) -> None:
    windows = windows_of(small_shards)

    def batches(**how: Any) -> list[torch.Tensor]:
        loader = BatchLoader(windows, share_of(3, 2, 6), CPU, **how)
        return [torch.cat(loader.next()) for _ in range(2 * windows.count)]  # behind what is planned at once

    assert all(map(torch.equal, batches(threads=threads, prefetch=prefetch), batches()))


def test_a_failure_of_a_reading_thread_is_the_loops(small_shards: Path) -> None:
    windows = windows_of(small_shards)
    windows.streams.clear()  # as if a shard had gone
    with pytest.raises(IndexError):
        BatchLoader(windows, share_of(3, 2), CPU, threads=1).next()


def test_too_few_tokens_for_a_window_are_refused(small_shards: Path) -> None:
    with pytest.raises(UserError, match="longest shard of the val split has 4,001 tokens, but a window needs 10,001"):
        Windows(TokenShards(small_shards).streams("val"), 10_000, 0, split="val")


class LazyStream:
    """A stand-in for a CUDA stream on which nothing happens before somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []
        self.reached = 0

    def run(self, until: int) -> None:
        """Do what was queued up to ``until``."""
        for work in self.queued[self.reached : until]:
            work()
        self.reached = max(self.reached, until)


class LazyEvent:
    """A stand-in for a CUDA event on a :class:`LazyStream`."""

    def __init__(self) -> None:
        self.stream, self.place = LazyStream(), 0

    def record(self, stream: LazyStream) -> None:
        self.stream, self.place = stream, len(stream.queued)

    def synchronize(self) -> None:
        self.stream.run(self.place)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> tuple[LazyStream, list[torch.Tensor]]:
    """A lazy stream in the place of the loader's, and the batches whose memory the current stream was told of."""
    stream, events = LazyStream(), list[torch.Tensor]()

    class Current:
        def wait_event(self, event: LazyEvent) -> None:
            event.synchronize()

    @contextmanager
    def on(chosen: LazyStream) -> Iterator[None]:
        def later(host: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
            batch = torch.full_like(host, -1)
            chosen.queued.append(lambda: batch.copy_(host))
            return batch

        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", later)
            yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda batch, stream: events.append(batch))
    return stream, events


def test_a_batch_is_taken_only_when_its_copy_is_there(
    small_shards: Path, side: tuple[LazyStream, list[torch.Tensor]]
) -> None:
    """And its host buffer is filled again only then: on a GPU the copy runs while the batch before is computed on."""
    stream, events = side
    windows = windows_of(small_shards)
    plain, loader = (BatchLoader(windows, share_of(3, 2, 6), CPU) for _ in range(2))
    loader._stream = stream  # type: ignore[assignment]
    loader._copies_done = [LazyEvent() for _ in loader._host]  # type: ignore[misc]
    for number in range(7):
        expected, actual = plain.next(), loader.next()
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
        assert len(stream.queued) == number + 1, "the next copy is queued"
        assert stream.reached == number, "and not waited for"
        assert len(events) == number, "the allocator must not give the memory of a batch in use to the next"


@pytest.mark.gpu
def test_a_gpus_batches_are_those_of_the_host_while_its_copies_are_late(small_shards: Path) -> None:
    windows, cuda = windows_of(small_shards), torch.device("cuda", torch.cuda.current_device())
    plain = BatchLoader(windows, share_of(3, 2, 6), CPU)
    loader = BatchLoader(windows, share_of(3, 2, 6), cuda)
    for _ in range(7):
        with torch.cuda.stream(_copy_stream(cuda)):
            torch.cuda._sleep(10**8)  # cycles: some 70 ms
        for actual, expected in zip(loader.next(), plain.next(), strict=True):
            assert torch.equal(actual.cpu(), expected)
