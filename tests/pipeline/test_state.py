"""What an output folder holds: ours is continued or replaced, and what others put there stays."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.command import UserError
from pipeline import state
from pipeline.config import TokenizeConfig
from pipeline.piece import do_piece
from pipeline.plan import make_plan
from pipeline.records import read_record
from pipeline.shards import MANIFEST
from pipeline.sources import find
from pipeline.tokenize import main

FOREIGN = ("train/own.arrow", "train/0001.arrow", "val/sub/000000-000.arrow", "pieces/notes.json", "readme.txt")


@pytest.fixture
def config(tmp_path: Path, write_books: Callable[..., Path]) -> TokenizeConfig:
    """Settings for forty books in three pieces, of which the first is done."""
    books = write_books(tmp_path / "books", 40, words=12_000)
    config = TokenizeConfig(sources=(str(books),), out=tmp_path / "out", shard_size=1_000_000)
    (config.out / state.PIECES).mkdir(parents=True)
    do_piece(make_plan(find(config.sources), config)[0], config.out, "test")
    state.begin(config.out, config)
    return config


def put(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not ours")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_clearing_takes_our_files_and_leaves_all_others(config: TokenizeConfig) -> None:
    out = config.out
    put(out, (*FOREIGN, "train/.partial-7-000001-000.arrow"))
    assert "train/000000-000.arrow" in files(out)
    state.clear(out)
    assert files(out) == {*FOREIGN, "pieces/settings.json"}
    for name in FOREIGN:
        (out / name).unlink()
    state.clear(out)
    assert not (out / "train").exists()


def test_strays_are_what_no_plan_names_and_what_a_killed_worker_left(config: TokenizeConfig) -> None:
    out, plan = config.out, make_plan(find(config.sources), config)
    record = read_record(out, "000000")
    assert record
    before = files(out)
    half_written = ("train/.partial-7-000001-000.arrow", "pieces/.partial-7-000001.json")
    put(out, (*FOREIGN, *half_written, "train/000009-000.arrow", "pieces/000009.json"))
    state.remove_strays(out, {"000000": record}, plan)
    assert files(out) == before | set(FOREIGN)


def test_a_data_set_that_was_not_made_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "fetched"
    put(out, (MANIFEST, "train/000000-000.arrow"))
    before = files(out)
    with pytest.raises(UserError, match=r"was not made here.*name another --out"):
        main(TokenizeConfig(out=out))
    assert files(out) == before


def test_overwriting_begins_anew_once_and_continues_after_an_interruption(
    config: TokenizeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**settings) -> str:
        main(replace(config, dry_run=True, overwrite=True, **settings))
        return capsys.readouterr().out

    assert "done: 1 pieces; to do: 2 not done yet" in said()
    assert "done: 0 pieces; to do: 3 because settings changed" in said(min_chars=100)
    put(config.out, (MANIFEST,))
    assert "done: 0 pieces; to do: 3 because of --overwrite" in said()


def test_other_sources_are_no_other_settings(config: TokenizeConfig, write_books: Callable[..., Path]) -> None:
    more = write_books(config.out.parent / "more", 1)
    other = replace(config, sources=(*config.sources, str(more)))
    assert state.changed_settings(config.out, other) == {}
    plan = make_plan(find(other.sources), other)
    assert "000000" in state.assess(config.out, plan).done


def test_the_settings_that_folders_are_known_by_are_those_of_the_first_folders() -> None:
    """Another name or value here would have every finished folder made again."""
    assert TokenizeConfig(languages=("fr", "en", "fr")).identity() == {
        "sources": ["sample"], "val_fraction": 0.01, "encoder": "gigatoken", "text_field": "text",
        "text_column": "text", "doc_separator": None, "languages": ["en", "fr"], "min_chars": 200, "join_lines": False,
        "duplicates": "drop", "shard_size": 16_000_000,
    }  # fmt: skip
