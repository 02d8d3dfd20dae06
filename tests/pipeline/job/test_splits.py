"""Both splits of a small data set hold books, and what was held out once is never trained on."""

import gzip
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.storage.directory import StorageDir
from infra.storage.local_directory import LocalDir
from pipeline.config import TokenizeConfig
from pipeline.inspect import find_damage
from pipeline.job import output
from pipeline.job.plan import Job, split_hash
from pipeline.job.task import run_partition
from pipeline.shards import Manifest, TokenShards

Prose = Callable[..., str]


def put(folder: Path, texts: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def tokenize(config: TokenizeConfig, tell: Callable[[str], None] = lambda sentence: None) -> Manifest:
    """What the command does, without MLflow."""
    job = Job(config)
    todo = output.compare_with_plan(job).todo
    output.mark_unfinished(job, todo)
    for partition in job.partitions:
        if partition.name in todo:
            run_partition(partition, job.out_dir, f"test-{uuid.uuid4()}")
    manifest = output.finish(job, tell)
    assert list(find_damage(job.out_dir, manifest)) == []
    assert output.is_finished(job)
    assert not output.compare_with_plan(job).todo
    return manifest


def splits(out: str) -> dict[str, set[str]]:
    """The books of each split, as the shards hold them."""
    opened = TokenShards(Path(out))
    return {
        split: {book for shard in opened.open(split) for book in shard.batch.column("book").to_pylist()}
        for split in ("train", "val")
    }


def split_of_texts(out: str) -> dict[str, str]:
    """The split of each text, by its sha256."""
    opened = TokenShards(Path(out))
    return {
        text: split
        for split in ("train", "val")
        for shard in opened.open(split)
        for text in shard.batch.column("sha256").to_pylist()
    }


def rows(texts: Iterable[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def by_position(names: Iterable[str], folder: str = "books") -> list[str]:
    return sorted(names, key=lambda name: split_hash(f"{folder}/{name}"))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_an_only_book_is_trained_on_and_of_two_one_is_held_out(tmp_path: Path, prose: Prose, share: float) -> None:
    names = by_position(f"{n}.txt" for n in range(200))
    for nearest, other in ((names[0], names[1]), (names[0], names[-1]), (names[-2], names[-1])):
        folder = put(tmp_path / "books", {nearest: prose(1, 100), other: "Too short."})
        config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"), val_fraction=share)
        tokenize(config)
        assert splits(config.out) == {"train": {f"books/{nearest}"}, "val": set()}
        put(folder, {other: prose(2, 100)})
        tokenize(config)
        assert splits(config.out) == {"train": {f"books/{nearest}"}, "val": {f"books/{other}"}}, "the new one"
        put(folder, {nearest: "Too short."})
        told: list[str] = []
        tokenize(config, told.append)
        assert splits(config.out) == {"train": {f"books/{other}"}, "val": set()}, "the only one left"
        assert re.search(rf"held out for validation .* now trained on: 1, for example books/{other}\.", " ".join(told))
        put(folder, {nearest: prose(1, 100)})
        fresh = replace(config, out=str(tmp_path / "fresh"))
        tokenize(fresh)
        assert splits(fresh.out) == {"train": {f"books/{other}"}, "val": {f"books/{nearest}"}}
        for path in (config.out, fresh.out, folder):
            shutil.rmtree(path)


def test_nothing_is_held_out_where_none_is_wanted(tmp_path: Path, prose: Prose) -> None:
    folder = put(tmp_path / "books", {f"{n}.txt": prose(n, 100) for n in range(3)})
    manifest = tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "out"), val_fraction=0))
    assert manifest.splits["val"]["books"] == 0


@pytest.mark.parametrize("parts", [1, 2, 4096])
def test_what_was_held_out_stays_so_while_the_data_set_grows(
    tmp_path: Path, prose: Prose, parts: int, limit_partitions: Callable[[int], None]
) -> None:
    """Books before and after it in every order, rows of another source, and its own text under another name."""
    limit_partitions(parts)
    names = by_position(f"{n:02d}.txt" for n in range(40))
    folder = put(tmp_path / "books", {name: prose(int(name[:2]), 100) for name in names[-2:]})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"))
    held: set[str] = set()
    for more in (names[20:-2], names[:20], ["rows.jsonl"], ["000.txt"]):
        tokenize(config)
        now = splits(config.out)
        assert held <= now["val"]
        assert now["train"]
        held = now["val"]
        for name in more:
            text = "".join(json.dumps({"text": prose(n, 100)}) + "\n" for n in range(100, 120))
            put(folder, {name: text if name == "rows.jsonl" else prose(int(name[:-4]), 100)})
    (first,) = (name for name in names[-2:] if f"books/{name}" in held)
    put(folder, {"000.txt": (folder / first).read_text(encoding="utf-8")})
    manifest = tokenize(config)
    assert manifest.report["books_dropped"] == {"duplicate": 1}
    assert splits(config.out)["val"] == held - {f"books/{first}"} | {"books/000.txt"}
    again = tokenize(replace(config, overwrite=True))
    assert again == manifest


def test_another_kind_of_source_does_not_change_which_book_is_held_out(tmp_path: Path, prose: Prose) -> None:
    """Where there is none by the share of all books, one of the files that are books of their own is chosen."""
    folder = put(tmp_path / "books", {f"{n}.txt": prose(n, 100) for n in range(4)})
    one, few, many = (TokenizeConfig((str(folder),), out=str(tmp_path / name)) for name in ("one", "few", "many"))
    tokenize(one)
    held = splits(one.out)["val"]
    assert len(held) == 1
    put(folder, {"rows.jsonl": rows(prose(n, 30) for n in range(100, 104))})
    tokenize(few)
    assert splits(few.out)["val"] == held
    put(folder, {"rows.jsonl": rows(prose(n, 30) for n in range(100, 500))})
    tokenize(many)
    assert {book.partition("#")[0] for book in splits(many.out)["val"]} == {"books/rows.jsonl"}, "by their own share"
    tokenize(few)
    assert splits(few.out)["val"] == held | splits(many.out)["val"]


def test_an_only_text_beside_rows_is_not_held_out_because_it_is_the_only_one(tmp_path: Path, prose: Prose) -> None:
    for number, count in enumerate((5, 300)):
        folder = put(tmp_path / f"{number}", {"novel.txt": prose(1, 2000)})
        put(folder, {"rows.jsonl": rows(prose(n, 30) for n in range(100, 100 + count))})
        config = TokenizeConfig((str(folder),), out=str(tmp_path / f"out {number}"))
        manifest = tokenize(config)
        assert f"{number}/novel.txt" in splits(config.out)["train"]
        assert len(splits(config.out)["val"]) >= 1
        assert manifest.report["extra_validation_books"] == (count == 5), "by no hash"


def test_of_equal_texts_the_one_that_is_held_out_is_kept(tmp_path: Path, prose: Prose) -> None:
    names = by_position(f"{n}.txt" for n in range(200))
    copies = (names[0], *by_position(f"0{n}.txt" for n in range(200))[-3:])
    folder = put(tmp_path / "books", {**dict.fromkeys(copies, prose(1, 100)), "other.txt": prose(2, 100)})
    assert split_hash(f"books/{names[0]}") < 0.01
    tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "out")))
    assert splits(str(tmp_path / "out")) == {"train": {"books/other.txt"}, "val": {f"books/{names[0]}"}}


def test_a_kill_while_a_book_moves_loses_nothing(tmp_path: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path / "books", {f"{n}.txt": prose(n, 100) for n in range(4)})
    whole = tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "whole")))
    write = LocalDir.write
    for killed_at in range(7):
        config = TokenizeConfig((str(folder),), out=str(tmp_path / f"killed {killed_at}"))
        job, left = Job(config), iter(range(killed_at))
        output.mark_unfinished(job, ())
        for partition in job.partitions:
            run_partition(partition, job.out_dir, f"test-{uuid.uuid4()}")

        def limited(place: LocalDir, name: str, content: bytes, left: Iterable[int] = left) -> None:
            if next(iter(left), None) is None:
                raise KeyboardInterrupt
            write(place, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(LocalDir, "write", limited)
            try:
                output.finish(job)
                assert killed_at == 6, "settings, two shards, a record, the quarantine, the manifest"
            except KeyboardInterrupt:
                pass
        assert tokenize(config) == whole


def add_folder_of_the_same_name(folder: Path, prose: Prose) -> tuple[str, ...]:
    put(folder.parent / "other", {})
    put(folder.parent / "other" / "books", {"rows.jsonl": rows(prose(n, 30) for n in range(1000, 1200))})
    return str(folder), str(folder.parent / "other" / "books")


def insert_a_row(folder: Path, prose: Prose) -> tuple[str, ...]:
    put(folder, {"rows.jsonl": rows([prose(1000, 30)]) + (folder / "rows.jsonl").read_text(encoding="utf-8")})
    return (str(folder),)


def compress(folder: Path, prose: Prose) -> tuple[str, ...]:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress((folder / "rows.jsonl").read_bytes()))
    (folder / "rows.jsonl").unlink()
    return (str(folder),)


def name_by_a_glob(folder: Path, prose: Prose) -> tuple[str, ...]:
    return (f"{folder}/*.jsonl",)


def rename_the_folder(folder: Path, prose: Prose) -> tuple[str, ...]:
    return (str(folder.rename(folder.parent / "library")),)


Change = Callable[[Path, Prose], tuple[str, ...]]


@pytest.mark.parametrize(
    "change", [add_folder_of_the_same_name, insert_a_row, compress, name_by_a_glob, rename_the_folder]
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_no_text_changes_its_split_when_its_id_changes(
    tmp_path: Path, prose: Prose, change: Change, *, interrupted: bool
) -> None:
    folder = put(tmp_path / "books", {"rows.jsonl": rows(prose(n, 30) for n in range(300))})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"), val_fraction=0.05)
    tokenize(config)
    before = split_of_texts(config.out)
    config, told = replace(config, sources=change(folder, prose)), []
    if interrupted:  # the manifest and the records are gone by then
        output.mark_unfinished(Job(config), [partition.name for partition in Job(config).partitions])
    manifest = tokenize(config, told.append)
    after = split_of_texts(config.out)
    assert {text: after[text] for text in before} == before
    assert manifest.report["extra_validation_books"] >= 10, "which their new ids do not select"
    assert told == []
    output.clear(StorageDir.of(config.out))
    assert tokenize(replace(config, overwrite=True)) == manifest


def test_a_held_out_book_that_is_edited_or_comes_in_another_edition_is_not_trained_on(
    tmp_path: Path, prose: Prose
) -> None:
    names = by_position(f"{n:02d}.txt" for n in range(40))
    held = names[0]
    folder = put(tmp_path / "books", {name: prose(int(name[:2]), 300) for name in names})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"), duplicates="drop-near", val_fraction=0.03)
    tokenize(config)
    assert f"books/{held}" in splits(config.out)["val"]
    text = (folder / held).read_text(encoding="utf-8")
    put(folder, {"000.txt": text + "Another edition.\n"})  # its id is the first
    assert tokenize(config).report["books_dropped"] == {"near duplicate": 1}
    assert f"books/{held}" in splits(config.out)["val"]
    (folder / held).unlink()
    manifest = tokenize(config)
    assert "books/000.txt" in splits(config.out)["val"], "without the original"
    assert tokenize(replace(config, overwrite=True)) == manifest


def test_an_edition_of_a_held_out_book_takes_its_place_in_no_data_set_that_is_made_again(
    tmp_path: Path, prose: Prose
) -> None:
    names = by_position(f"{n:02d}.txt" for n in range(40))
    folder = put(tmp_path / "books", {name: prose(int(name[:2]), 300) for name in names})
    put(folder, {"000.txt": (folder / names[0]).read_text(encoding="utf-8") + "Another edition.\n"})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"), duplicates="drop-near", val_fraction=0.03)
    manifest = tokenize(config)
    assert f"books/{names[0]}" in splits(config.out)["val"]
    output.clear(StorageDir.of(config.out))
    assert tokenize(config) == manifest


def test_another_share_chooses_anew_and_tells_what_changes(tmp_path: Path, prose: Prose) -> None:
    folder = put(tmp_path / "books", {"rows.jsonl": rows(prose(n, 30) for n in range(300))})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"), val_fraction=0.05)
    tokenize(config)
    first = split_of_texts(config.out)
    insert_a_row(folder, prose)
    larger = replace(config, val_fraction=0.2, overwrite=True)
    told: list[str] = []
    tokenize(larger, told.append)
    second = split_of_texts(config.out)
    assert {text for text in first if first[text] == "val"} <= {text for text in second if second[text] == "val"}
    (sentence,) = told
    taken = sum(first[text] == "train" and second[text] == "val" for text in first)
    assert f"now held out for validation: {taken}, for example" in sentence
    told.clear()
    tokenize(replace(config, val_fraction=0.01, overwrite=True), told.append)
    third = split_of_texts(config.out)
    released = sum(second[text] == "val" and third[text] == "train" for text in second)
    assert f"now trained on: {released}, for example" in told[0]
    assert sum(split == "val" for split in third.values()) < 10


def test_copies_that_are_kept_in_both_splits_stay_so(tmp_path: Path, prose: Prose) -> None:
    folder = put(tmp_path / "books", {f"{n:02d}.txt": prose(n % 2, 100) for n in range(40)})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"), duplicates="keep", val_fraction=0.2)
    manifest = tokenize(config)
    assert manifest.splits["val"]["books"] > 1
    output.clear(StorageDir.of(config.out))
    assert tokenize(config) == manifest


def test_validation_by_the_names_of_files_is_held_out_and_training_files_are_not(tmp_path: Path, prose: Prose) -> None:
    folder = put(
        tmp_path / "data",
        {f"{name}.jsonl": rows(prose(n, 30) for n in range(first, first + 200))
         for name, first in (("train", 0), ("validation", 200), ("test", 400))},
    )  # fmt: skip
    put(folder, {"README.md": "---\nlicense: mit\n---\n" + prose(600, 100)})
    config = TokenizeConfig((str(folder),), out=str(tmp_path / "out"))
    manifest = tokenize(config)
    assert {(split, book.partition("#")[0]) for split, books in splits(config.out).items() for book in books} == {
        ("train", "data/train.jsonl"), ("val", "data/validation.jsonl")
    }  # fmt: skip
    assert {split: sums["books"] for split, sums in manifest.splits.items()} == {"train": 200, "val": 200}
    assert manifest.inputs["skipped"] == {"data set card": 1, "in a test split": 1}
    assert manifest.inputs["named_splits"] == {"train": 1, "val": 1}
    assert manifest.report["extra_validation_books"] == 0
    put(folder, {"validation.jsonl": rows(prose(n, 30) for n in range(100))})
    tokenize(config)
    both = splits(config.out)
    assert {len(books) for books in both.values()} == {100}, "of a text in both, that for validation is kept"
