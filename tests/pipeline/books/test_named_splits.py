"""Splits that file names tell are known by the shape of a data set, so that no book is lost for its title."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.storage.directory import StorageDir
from pipeline.books.named_splits import NamedFile, label_files
from pipeline.books.sources import build_inventory


def labels_of(*names: str, card: bytes = b"---") -> dict[str, str]:
    files = [NamedFile(f"/home/train/{name}", name.endswith((".txt", ".md", ".zip"))) for name in names]
    return {names[number]: label for number, label in label_files(files, lambda number: card).items()}


@pytest.mark.parametrize(
    "splits",
    [
        {"data/train-00000-of-00002.parquet": "train", "data/train-00001-of-00002.parquet": "train",
         "data/validation-00000-of-00001.parquet": "val", "data/test-00000-of-00001.parquet": "test"},
        {"en/c4-train.00000-of-01024.json.gz": "train", "en/c4-validation.00000-of-00008.json.gz": "val"},
        {"en/train/a.jsonl": "train", "en/dev/b.jsonl": "val", "en/test/deep/c.jsonl.zst": "test"},
        {"Train.jsonl": "train", "Valid.jsonl": "val", "eval_hard.jsonl": "test"},
        {"TinyStories-train.txt": "train", "TinyStories-valid.txt": "val"},
        {"train/pos/1.txt": "train", "val/pos/2.txt": "val", "test/neg/3.txt": "test"},
        {"train/train-0.parquet": "train", "train/test-0.parquet": "test", "train/val-0.parquet": "val"},
    ],
)  # fmt: skip
def test_the_names_of_a_data_sets_files_tell_their_splits(splits: dict[str, str]) -> None:
    card = {"README.md": "card", "dataset_infos.json": "card"}
    assert labels_of(*splits, *card) == splits | card


@pytest.mark.parametrize(
    "names",
    [
        ("test.txt", "The Test.txt", "validation of ideas.txt", "a.txt"),
        ("train.txt", "test.txt", "The Train.txt", "a.txt"),
        ("train of thought.txt", "test of time.txt"),
        ("test.jsonl", "val.jsonl"),
        ("train.jsonl", "the test.jsonl", "latest.jsonl", "contest.jsonl"),
        ("de/train/a.jsonl", "fr/test.txt"),
        ("README.md", "a.txt"),
    ],
)
def test_a_book_is_not_lost_for_its_title(names: tuple[str, ...]) -> None:
    assert labels_of(*names) == {}


def test_without_files_for_validation_the_training_files_are_split_by_their_share() -> None:
    assert labels_of("train.jsonl", "test.jsonl") == {"test.jsonl": "test"}


def test_below_a_card_any_files_for_training_are_a_counterpart() -> None:
    names = {"clone/data/train-0.parquet": "train", "clone/bench/test.jsonl": "test", "clone/fr/dev.jsonl": "val"}
    assert labels_of(*names) == {}
    assert labels_of(*names, "clone/README.md", "test.jsonl") == names | {"clone/README.md": "card"}
    assert labels_of(*names, "clone/README.md", card=b"# A") == {"clone/README.md": "card"}


def test_a_card_is_known_by_what_is_beside_it() -> None:
    assert labels_of("README.md", "rows.jsonl", card=b"# Ro") == {"README.md": "card"}, "there is nothing else to read"
    assert labels_of("README.md", "rows.jsonl", "novel.txt", card=b"# A ") == {}
    assert labels_of("README.md", "deep/rows.jsonl", "novel.txt") == {"README.md": "card"}, "it begins as one"


def test_splits_are_told_by_a_listing_of_object_storage_too(place: StorageDir) -> None:
    table = pa.table({"text": ["a book"]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    for split in ("train", "validation", "test"):
        place.write(f"data/{split}-00000-of-00001.parquet", sink.getvalue().to_pybytes())
    place.write("README.md", b"---\nlicense: mit\n---\n# Card\n")
    inventory = build_inventory([place.address])
    assert {file.id: file.split for file in inventory.files} == {
        "place/data/train-00000-of-00001.parquet": "train", "place/data/validation-00000-of-00001.parquet": "val"
    }  # fmt: skip
    assert inventory.skipped == {"data set card": 1, "in a test split": 1}
    assert inventory.summary()["named_splits"] == {"train": 1, "val": 1}
    (file,) = build_inventory([str(place / "data/test-00000-of-00001.parquet")]).files
    assert file.split is None, "by itself it is no split of a data set"
