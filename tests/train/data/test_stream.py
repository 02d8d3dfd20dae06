"""Training straight from books: every window once, the same ones however it is run or interrupted, and through Ray."""

import dataclasses
import itertools
import json
import pickle
import random
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from trainers import make_trainer

from infra.device.hardware import cpu_info
from infra.errors import UserError
from infra.ray.cluster import ray_session
from infra.storage.directory import StorageDir
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from pipeline import stream
from pipeline.books.sources import Inventory, build_inventory
from pipeline.config import ReadingConfig, TokenizeConfig
from pipeline.encoding.tokenizer import gpt2
from pipeline.job.partition_result import read_result
from pipeline.job.plan import make_partitions
from pipeline.job.task import run_partition
from pipeline.shards import Shard
from pipeline.stream import EncodedBook, Stream, encoded_books
from train.config import Batch, Cycle, ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.sources import source_of
from train.data.stream import StreamData, StreamSource, estimate_manifest
from train.data.stream_windows import StreamPosition, StreamWindows
from train.launch import driver
from train.launch.job import RunPlan
from train.model_config import ModelConfig
from train.result import CycleReport
from train.run_files.progress import check_same_run, read_progress
from train.run_files.run_folder import RunFolder

LENGTH = 16
WORDS = "the lantern of a winter morning was not with her captain but under every garden wall by river".split()  # noqa: SIM905


class Inline(Stream):
    """A stream whose books are encoded in this process and not ahead by Ray Data."""

    def read(self, epoch: int, partition: int = 0) -> Iterator[EncodedBook]:
        return itertools.chain.from_iterable(
            encoded_books(each, "train") for each in self.order_partitions(epoch)[partition:]
        )


def open_inline(config: ResolvedConfig, stream: Stream) -> StreamData:
    """The data of ``config`` from ``stream``."""
    return StreamData(stream, config.model.context_length, config.batch, config.duration.cycle)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven books, one of them too short to keep, one in Latin-1."""
    folder = tmp_path_factory.mktemp("library") / "books"
    folder.mkdir()
    chance = random.Random(0)
    for number in range(9):
        text = " ".join(f"{' '.join(chance.choices(WORDS, k=12))}, said number {number}.\n" for _ in range(30))
        (folder / f"book {number}.txt").write_text(text, encoding="utf-8")
    (folder / "short.txt").write_text("The end.")
    (folder / "latin.txt").write_bytes("Là-bas, à l'été, des forêts. ".encode("latin-1") * 20)
    return folder


@pytest.fixture
def config(books: Path) -> ResolvedConfig:
    model = ModelConfig(layers=1, heads=1, width=16, context_length=LENGTH, dropout=0.1)
    return ResolvedConfig.of(
        stream=(str(books),), model=model, global_batch=4, micro_batch=4, steps=12, cycle=Cycle(5, 1),
        precision="fp32", device="cpu", learning_rate=3e-3,
    )  # fmt: skip


def windows_of(books: Path, seed: int = 0, block: int = 40 * LENGTH) -> StreamWindows:
    return StreamWindows(Inline([str(books)], seed, ReadingConfig()).read, LENGTH, seed, block)


def rows(windows: StreamWindows, first: int, stop: int) -> np.ndarray:
    out = np.empty((stop - first, LENGTH + 1), dtype=np.int64)
    windows.read(windows.window_ids(np.arange(first, stop)), out)
    return out


def test_an_epoch_is_every_training_book_once_and_no_other(books: Path) -> None:
    stream = Inline([str(books)], 0, ReadingConfig())
    held = {book.book for book in stream.validation_books(10**9)}
    names = {epoch: [book.book for book in stream.read(epoch)] for epoch in range(2)}
    everything = {f"books/{path.name}" for path in books.iterdir()}
    assert held
    assert held | set(names[0]) == everything
    assert len(held) + len(names[0]) == len(everything)
    assert sorted(names[0]) == sorted(names[1])
    assert names[0] != names[1]
    assert [book.book for book in Inline([str(books)], 1, ReadingConfig()).read(0)] != names[0]
    dropped = [(book.book, book.dropped) for book in stream.read(0) if book.dropped]
    assert dropped == [("books/short.txt", "too short")]
    assert all(book.tokens[-1] == gpt2().end_of_text for book in stream.read(0) if not book.dropped)


def test_blocks_hold_every_window_of_the_stream_once(books: Path) -> None:
    tokens = np.concatenate([book.tokens for book in Inline([str(books)], 0, ReadingConfig()).read(0)]).astype(np.int64)
    count = (len(tokens) - 1) // LENGTH
    windows = windows_of(books)
    actual = rows(windows, 0, count)
    expected = np.stack([tokens[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)])
    for first in range(0, count, 40):
        block, straight = actual[first : first + 40], expected[first : first + 40]
        assert sorted(map(tuple, block)) == sorted(map(tuple, straight))
    assert not np.array_equal(actual, expected)
    assert windows.block_positions[-1].epoch == 0
    rows(windows, count, count + 1)
    assert windows.block_positions[-2] == StreamPosition(position=count, epoch=1)


def test_each_block_and_each_epoch_has_an_order_of_its_own() -> None:
    """Of a single book, whose blocks would otherwise be visited alike."""
    book = EncodedBook(partition=0, source="", book="one", tokens=np.arange(80 * LENGTH + 1, dtype=np.uint16), chars=1)
    windows = StreamWindows(lambda epoch, partition: iter([book]), LENGTH, 0, 40 * LENGTH)
    actual = rows(windows, 0, 160)[:, 0] // LENGTH
    blocks = [actual[first : first + 40].tolist() for first in range(0, 160, 40)]
    assert sorted(blocks[0] + blocks[1]) == sorted(blocks[2] + blocks[3]) == list(range(80))
    orders = {tuple(number % 40 for number in block) for block in blocks}
    assert len(orders) == 4


def test_epochs_read_the_books_in_the_order_of_that_epoch(books: Path) -> None:
    requests: list[tuple[int, int]] = []
    stream = Inline([str(books)], 0, ReadingConfig())

    def read(epoch: int, partition: int) -> Iterator[EncodedBook]:
        requests.append((epoch, partition))
        return (book for book in stream.read(epoch, partition) if not book.dropped)

    windows = StreamWindows(read, LENGTH, 0, 40 * LENGTH)
    rows(windows, 0, 1500)
    assert requests == [(epoch, 0) for epoch in range(len(requests))]
    assert len(requests) > 1


def test_what_was_read_is_counted(config: ResolvedConfig) -> None:
    data = open_inline(config, Inline(config.dataset.stream, 0, config.dataset.reading))
    books = list(data._read(0, 0))
    used = [book for book in books if not book.dropped]
    assert data.summary() == {
        "books": len(used), "tokens": sum(len(book.tokens) for book in used), "chars": sum(b.chars for b in used),
        "dropped": {"too short": 1}, "encoded_on": {"": sum(len(book.tokens) for book in used)},
    }  # fmt: skip
    assert len(used) == len(books) > 5
    assert data.manifest.splits["train"]["books"] == round(data.manifest.splits["train"]["tokens"] / (
        data.tokens / data.books
    ))  # fmt: skip


def test_as_much_is_held_out_as_validation_takes(config: ResolvedConfig) -> None:
    """Whole books of at least as many tokens, unless the sources have fewer."""
    requests: list[int] = []

    class Asked(Inline):
        def validation_books(self, tokens: int) -> list[EncodedBook]:
            requests.append(tokens)
            return super().validation_books(tokens)

    open_inline(config.replace(cycle=Cycle(5, 3)), Asked(config.dataset.stream, 0, config.dataset.reading))
    assert requests == [3 * 4 * LENGTH + 1]


@pytest.mark.parametrize("change", ["gone", "edited", "emptied"])
def test_a_book_that_changed_since_the_checkpoint_is_named(
    config: ResolvedConfig, books: Path, tmp_path: Path, change: str
) -> None:
    """Whole files, whose sizes the fingerprint has, and one of which keeps its size."""
    copy = Path(shutil.copytree(books, tmp_path / "books"))
    initial = windows_of(copy)
    rows(initial, 0, 100)
    position = initial.block_positions[-2]
    book = copy.parent / position.book
    text = book.read_text(encoding="utf-8")
    book.write_text(text.replace("said", "sang") if change == "edited" else "", encoding="utf-8")
    if change == "gone":
        book.unlink()
    after = windows_of(copy)
    after.load_state_dict(position)
    with pytest.raises(UserError, match=rf"--stream: the book {position.book}.* {position.source}\. .* --name"):
        rows(after, position.position, position.position + 4)


def test_a_checkpoint_holds_where_its_block_begins(config: ResolvedConfig) -> None:
    data = open_inline(config, Inline(config.dataset.stream, 0, config.dataset.reading))
    data.windows = StreamWindows(data._read, LENGTH, 0, 40 * LENGTH)
    rows(data.windows, 0, 100)
    assert [data.state_dict(position)["position"] for position in (0, 39, 40, 41, 85)] == [0, 0, 40, 40, 80]


def test_a_resumed_stream_continues_with_the_same_windows(books: Path) -> None:
    straight = windows_of(books)
    expected = rows(straight, 0, 600)
    for position in (0, 1, 39, 40, 55, 120, 400):
        resumed = windows_of(books)
        resumed.load_state_dict(
            next(place for place in reversed(straight.block_positions) if place.position <= position)
        )
        assert np.array_equal(rows(resumed, position, 600), expected[position:])


@pytest.mark.parametrize(("micro", "accumulation", "workers"), [(4, 3, 1), (2, 3, 2), (6, 1, 2)])
def test_a_step_has_the_same_windows_however_it_is_executed(
    books: Path, micro: int, accumulation: int, workers: int
) -> None:
    expected = rows(windows_of(books), 36, 36 + 36)[:, :-1]
    loaders = [
        BatchLoader(
            windows_of(books), WorkerShare(Batch(micro * accumulation * workers, micro, workers), 36, rank),
            torch.device("cpu"),
        )
        for rank in range(workers)
    ]  # fmt: skip
    steps = [loader.next()[0].numpy() for _ in range(3) for loader in loaders for _ in range(accumulation)]
    assert np.array_equal(np.concatenate(steps), expected)


def test_the_books_that_validate_are_counted_without_those_that_were_dropped(config: ResolvedConfig) -> None:
    usable_book = EncodedBook(0, "a.txt", "a.txt", 90, np.zeros(30, np.uint16))
    dropped = EncodedBook(0, "b.txt", "b.txt", 0, np.zeros(0, np.uint16), "too short", "8 characters, fewer than 200")
    counted = estimate_manifest(StreamSource(config.dataset).stream, held_out=[usable_book, dropped]).splits["val"]
    assert counted == {"books": 1, "tokens": 30, "chars": 90}


def test_the_sources_of_a_run_mean_the_same_in_every_folder(
    config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = ("sample", "gutenberg:1342,84", "s3://bucket/books", "gs://anonymous@bucket/*.txt", "hf://datasets/a/b")
    named = config.replace(stream=("books", "shelf/*.txt", "~/library", *elsewhere))
    whole = (str(tmp_path / "books"), str(tmp_path / "shelf/*.txt"), str(Path.home() / "library"), *elsewhere)
    assert source_of(named.dataset).absolute().dataset.stream == whole
    monkeypatch.chdir("/")
    assert source_of(dataclasses.replace(config.dataset, stream=whole)).absolute().dataset.stream == whole


def test_what_a_stream_cannot_do_is_said(config: ResolvedConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no known length.*--steps"):
        config.replace(steps=None)
    (tmp_path / "one.txt").write_text(" ".join(WORDS * 20), encoding="utf-8")
    alone = config.replace(stream=(str(tmp_path),))
    with pytest.raises(UserError, match=r"--stream: the validation books have 0 tokens.* turn validation off"):
        open_inline(alone, Inline(alone.dataset.stream, 0, alone.dataset.reading))  # a single book is there to train on
    unvalidated = alone.replace(cycle=Cycle(5, 0))
    data = open_inline(unvalidated, Inline(alone.dataset.stream, 0, alone.dataset.reading))
    assert make_trainer(unvalidated, data=data).run().outcome == "finished"
    long = config.replace(model=dataclasses.replace(config.model, context_length=10_000))
    with pytest.raises(UserError, match=r"--stream: .*validation.* a window needs 10,001"):
        open_inline(long, Inline(long.dataset.stream, 0, long.dataset.reading))


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 150 books in hard-wrapped lines, each second one in French, in files of three forms."""
    folder = tmp_path_factory.mktemp("unusual")
    chance = random.Random(0)
    texts = [
        "\n".join(f"{number} {' '.join(chance.choices(WORDS, k=13))}" for _ in range(chance.randint(4, 16)))
        for number in range(150)
    ]
    languages = ["en", "fr"] * 75
    lines = [json.dumps({"content": text, "language": code}) for text, code in zip(texts, languages, strict=True)]
    (folder / "books.jsonl").write_text("\n".join(lines))
    (folder / "books.txt").write_text("<|end|>".join(texts))
    pq.write_table(pa.table({"Body": texts, "language": languages}), folder / "books.parquet")
    return folder


@pytest.mark.parametrize(
    ("name", "reading", "fewer"),
    [
        ("books.jsonl", ReadingConfig(text_field="content"), False),
        ("books.jsonl", ReadingConfig(text_field="content", languages=("fr",), min_chars=500), True),
        ("books.parquet", ReadingConfig(text_column="body"), False),
        ("books.txt", ReadingConfig(doc_separator="<|end|>"), False),
        ("books.txt", ReadingConfig(doc_separator="<|end|>", join_lines=True), False),
    ],
)
def test_a_stream_reads_what_shards_hold(
    unusual: Path, tmp_path: Path, name: str, reading: ReadingConfig, fewer: bool
) -> None:
    sources = (str(unusual / name),)
    config = TokenizeConfig(sources, val_fraction=Stream.val_fraction, **dataclasses.asdict(reading))
    (partition,) = make_partitions(build_inventory(sources), config)
    run_partition(partition, StorageDir.of(tmp_path), f"test-{uuid.uuid4()}")
    result = read_result(tmp_path, partition.name)
    assert result
    shards = {
        (info.split, book): tokens.tolist()
        for info in result.shards
        for shard in [Shard(tmp_path / info.path)]
        for book, tokens in zip(
            shard.batch.column("book").to_pylist(), np.split(shard.tokens, shard.offsets[1:-1]), strict=True
        )
    }
    stream = Inline(sources, 0, reading)
    actual = {("val", book.book): book.tokens.tolist() for book in stream.validation_books(10**9) if not book.dropped}
    assert actual
    actual |= {("train", book.book): book.tokens.tolist() for book in stream.read(0) if not book.dropped}
    assert actual == shards
    assert (len(actual) < 75) == fewer
    if reading.join_lines:
        apart = Inline(sources, 0, dataclasses.replace(reading, join_lines=False))
        assert {book.book for book in apart.read(0)} == {book.book for book in stream.read(0)}
        assert not any(book.tokens.tolist() in shards.values() for book in apart.read(0))


class SmallPartitions(Inline):
    partition_bytes = 1_000_000
    val_fraction = 0.3


def test_books_are_held_out_until_there_are_enough_or_much_has_been_read(tmp_path: Path) -> None:
    """What was read counts over all partitions: in a large corpus none of them alone is much."""
    line = json.dumps({"text": " ".join(WORDS * 20), "of no use": "x" * 40_000})
    (tmp_path / "books.jsonl").write_text(f"{line}\n" * 150)
    stream = SmallPartitions([str(tmp_path)], 0, ReadingConfig())
    partitions = make_partitions(stream.inventory, stream.settings)
    books = [[book.book for book in encoded_books(partition, "val")] for partition in partitions]
    assert all(books)
    assert [book.book for book in stream.validation_books(10**9)] == list(itertools.chain(*books))
    assert [book.book for book in stream.validation_books(1)] == books[0][:1]
    stream.max_search_bytes = 3_000_000
    assert [book.book for book in stream.validation_books(10**9)] == list(itertools.chain(*books[:4]))


@pytest.mark.parametrize(
    ("name", "why"),
    [("books.jsonl", r"books\.jsonl#0 .*--text-field"), ("books.parquet", r"books\.parquet .*--text-column")],
)
def test_when_no_book_can_be_read_the_first_is_named(
    config: ResolvedConfig, unusual: Path, name: str, why: str
) -> None:
    config = config.replace(stream=(str(unusual / name),))
    with pytest.raises(UserError, match=f"--stream: the validation books have 0 tokens.*{why}"):
        open_inline(config, Inline(config.dataset.stream, 0, config.dataset.reading))
    config = config.replace(cycle=Cycle(5, 0))
    with pytest.raises(UserError, match=f"--stream has no book .*{why}"):
        make_trainer(config, data=open_inline(config, Inline(config.dataset.stream, 0, config.dataset.reading))).run()


@pytest.mark.slow
def test_through_ray_it_is_the_same_run_also_when_resumed(config: ResolvedConfig, tmp_path: Path) -> None:
    config = config.replace(reading=ReadingConfig(min_chars=5, join_lines=True))
    store = f"sqlite:///{tmp_path}/mlflow.db"
    folder = tmp_path / "run"
    with ray_session(cpus=2):
        tracker = Tracker(create_run("train", "stream", tracking_uri=store, tags={}))
        short, whole = (config.replace(schedule="constant", **end) for end in ({"steps": 7}, {}))
        run = RunPlan.new(short, RunFolder(folder))
        first, _ = driver.train_and_record(run.resolved(cpu_info()), tracker)
        assert first.checkpoint
        again = dataclasses.replace(run, requested=whole, progress=read_progress(Path(first.checkpoint)))
        result, _ = driver.train_and_record(again.resolved(cpu_info()), tracker)
        gone = Stream([str(shutil.copytree(config.dataset.stream[0], tmp_path / "gone"))], 0, config.dataset.reading)
        (tmp_path / "gone" / "book 3.txt").unlink()
        with pytest.raises(UserError, match=r"book 3\.txt was deleted"):
            list(gone.read(0))
    assert result.outcome == "finished"
    logged_cycles = [json.loads(line) for line in (folder / "cycles.jsonl").read_text().splitlines()]
    torch.set_num_threads(1)
    straight: list[CycleReport] = []
    make_trainer(
        whole, data=open_inline(whole, Inline(whole.dataset.stream, 0, whole.dataset.reading)), on_cycle=straight.append
    ).run()
    losses = [loss for cycle in logged_cycles for loss in cycle["step_losses"]]
    assert losses == [loss for report in straight for loss in report.step_losses]
    assert logged_cycles[-1]["val_loss"] == straight[-1].val_loss
    progress = json.loads((folder / "checkpoints" / "step-00000012" / "progress.json").read_text())
    assert progress["windows_consumed"] == 48
    assert progress["data_state"]["epoch"] == 0
    check_same_run(
        Path(first.checkpoint),
        read_progress(Path(first.checkpoint)),
        whole.step,
        whole.dataset,
        source_of(whole.dataset).manifest,
    )
    other = whole.replace(reading=ReadingConfig(min_chars=5))
    with pytest.raises(UserError, match=r"was trained with --join-lines True, not False. Remove --join-lines"):
        check_same_run(
            Path(first.checkpoint),
            read_progress(Path(first.checkpoint)),
            other.step,
            other.dataset,
            source_of(other.dataset).manifest,
        )
    assert set(result.encoded_on) == {result.machine}, "this machine has encoded what it trained on"
    assert result.data_fingerprint == Stream(config.dataset.stream, 0, config.dataset.reading).fingerprint


def test_the_sources_of_a_run_are_listed_once(
    config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the driver: what its workers are handed knows the books already."""
    listed: list[Sequence[str]] = []

    def counted(sources: Sequence[str]) -> Inventory:
        listed.append(sources)
        return build_inventory(sources)

    monkeypatch.setattr(stream, "build_inventory", counted)
    run = RunPlan.new(config, RunFolder(tmp_path / "run"))
    handed = pickle.loads(pickle.dumps(run.source))  # noqa: S301 as Ray hands it to a worker
    assert handed.stream.order_partitions(0)
    assert open_inline(config, handed.stream).manifest.fingerprint == run.manifest.fingerprint
    assert len(listed) == 1


def test_a_stream_holds_out_the_validation_files_of_a_data_set(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        rows = [{"text": f"Row {number} for {split}. " + "It was a long day. " * 20} for number in range(30)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    books = Inline([str(tmp_path)], 0, ReadingConfig())
    assert {book.source.rpartition("/")[2] for book in books.validation_books(10**9)} == {"validation.jsonl"}
    trained = list(books.read(0))
    assert {book.source.rpartition("/")[2] for book in trained} == {"train.jsonl"}
    assert len(trained) == 30
