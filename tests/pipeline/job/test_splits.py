"""Both splits of a small data set hold books, and what was held out once is never trained on."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.storage_dir import StorageDir
from pipeline.config import TokenizeConfig
from pipeline.inspect import verify
from pipeline.job import output, plan
from pipeline.job.plan import Job, position_of
from pipeline.job.task import do_piece
from pipeline.shards import Manifest, TokenShards

Prose = Callable[..., str]


def put(folder: Path, texts: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def tokenize(config: TokenizeConfig) -> Manifest:
    """What the command does, without MLflow."""
    job = Job(config)
    todo = output.assess(job).todo
    output.begin(job, todo)
    for piece in job.pieces:
        if piece.name in todo:
            do_piece(piece, job.place, f"test-{os.getpid()}")
    manifest = output.finish(job)
    assert list(verify(job.place, manifest)) == []
    assert output.is_finished(job)
    assert not output.assess(job).todo
    return manifest


def splits(out: str) -> dict[str, set[str]]:
    """The books of each split, as the shards hold them."""
    opened = TokenShards(Path(out))
    return {
        split: {book for shard in opened.open(split) for book in shard.batch.column("book").to_pylist()}
        for split in ("train", "val")
    }


def by_position(names: Iterable[str], folder: str = "books") -> list[str]:
    return sorted(names, key=lambda name: position_of(f"{folder}/{name}"))


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
        assert splits(config.out) == {"train": {f"books/{other}"}, "val": {f"books/{nearest}"}}
        put(folder, {nearest: "Too short."})
        tokenize(config)
        assert splits(config.out) == {"train": {f"books/{other}"}, "val": set()}, "the only one left"
        for path in (folder / nearest, folder / other, tmp_path / "out" / "pieces" / "settings.json"):
            path.unlink()


def test_nothing_is_held_out_where_none_is_wanted(tmp_path: Path, prose: Prose) -> None:
    folder = put(tmp_path / "books", {f"{n}.txt": prose(n, 100) for n in range(3)})
    manifest = tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "out"), val_fraction=0))
    assert manifest.splits["val"]["books"] == 0


@pytest.mark.parametrize("parts", [1, 2, 4096])
def test_what_was_held_out_stays_so_while_the_data_set_grows(
    tmp_path: Path, prose: Prose, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Books before and after it in every order, rows of another source, and its own text under another name."""
    monkeypatch.setattr(plan, "PARTS_PER_PIECE", parts)
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
    folder = put(tmp_path / "books", {f"{n}.txt": prose(n, 100) for n in range(4)})
    tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "one")))
    held = splits(str(tmp_path / "one"))["val"]
    assert len(held) == 1
    put(folder, {"rows.jsonl": "".join(json.dumps({"text": prose(n, 30)}) + "\n" for n in range(100, 500))})
    tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "two")))
    two = splits(str(tmp_path / "two"))
    assert held < two["val"], "rows are held out by their own share"
    assert len(two["val"] | two["train"]) == 404


def test_of_equal_texts_the_one_that_is_held_out_is_kept(tmp_path: Path, prose: Prose) -> None:
    names = by_position(f"{n}.txt" for n in range(200))
    copies = (names[0], *by_position(f"0{n}.txt" for n in range(200))[-3:])
    folder = put(tmp_path / "books", {**dict.fromkeys(copies, prose(1, 100)), "other.txt": prose(2, 100)})
    assert position_of(f"books/{names[0]}") < 0.01
    tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "out")))
    assert splits(str(tmp_path / "out")) == {"train": {"books/other.txt"}, "val": {f"books/{names[0]}"}}


def test_a_kill_while_a_book_moves_loses_nothing(tmp_path: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path / "books", {f"{n}.txt": prose(n, 100) for n in range(4)})
    whole = tokenize(TokenizeConfig((str(folder),), out=str(tmp_path / "whole")))
    write = StorageDir.write
    for killed_at in range(7):
        config = TokenizeConfig((str(folder),), out=str(tmp_path / f"killed {killed_at}"))
        job, left = Job(config), iter(range(killed_at))
        output.begin(job, ())
        for piece in job.pieces:
            do_piece(piece, job.place, f"test-{os.getpid()}")

        def limited(place: StorageDir, name: str, content: bytes, left: Iterable[int] = left) -> None:
            if next(iter(left), None) is None:
                raise KeyboardInterrupt
            write(place, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(StorageDir, "write", limited)
            try:
                output.finish(job)
                assert killed_at == 6, "settings, two shards, a record, the quarantine, the manifest"
            except KeyboardInterrupt:
                pass
        assert tokenize(config) == whole
