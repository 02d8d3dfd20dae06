"""Files are read no further than needed, and of a damaged one only the damaged part is lost."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import re
import tracemalloc
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books import readers
from pipeline.books.readers import DroppedBook, FileRange, RawBook, read_books
from pipeline.books.sources import SourceFile, build_inventory
from pipeline.config import TokenizeConfig
from pipeline.job.partition_result import read_result
from pipeline.job.plan import make_partitions
from pipeline.job.task import run_partition

MEGABYTE = 1_000_000


class Counted(io.BytesIO):
    """A file in memory that counts the bytes that are read."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data

    read1 = read


def read(path: Path, **settings) -> list[RawBook | DroppedBook]:
    """All that the plan's parts of ``path`` yield."""
    config = TokenizeConfig(sources=(str(path),), **settings)
    return [
        book
        for partition in make_partitions(build_inventory(config.sources), config)
        for file_range in partition.ranges
        for book in read_books(file_range, config)
    ]


def texts(books: list[RawBook | DroppedBook]) -> dict[str, str]:
    return {book.id: book.data.decode() for book in books if isinstance(book, RawBook)}


def reasons(books: list[RawBook | DroppedBook]) -> dict[str, str]:
    return {book.book: book.detail for book in books if isinstance(book, DroppedBook)}


@pytest.mark.parametrize("separators", [0, 2])
def test_a_part_reads_no_further_than_it_must_where_separators_are_rare(
    separators: int,
) -> None:
    data = b"<|end|>".join([b"a line of the book\n" * (24 * MEGABYTE // 19 // (separators + 1))] * (separators + 1))
    opened: list[Counted] = []

    class CountedFile(SourceFile):
        def open(self) -> BinaryIO:
            opened.append(Counted(data))
            return opened[-1]

    config = TokenizeConfig(doc_separator="<|end|>")
    file = CountedFile("many.txt", "many.txt", len(data), 0)
    books = [
        book
        for start in range(0, len(data), MEGABYTE)
        for book in read_books(FileRange(file, MEGABYTE, start, start + MEGABYTE), config)
    ]
    assert [book.data for book in books if isinstance(book, RawBook)] == data.split(b"<|end|>")
    begins = {book.id for book in books if isinstance(book, RawBook)}
    assert len(begins) == separators + 1
    idle = sorted(file_range.taken for file_range in opened)[: len(opened) - separators - 1]
    assert max(idle) <= 3 * MEGABYTE


def write_zip(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_members_of_the_same_name_are_separate_books(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "books.zip", {"a.txt": b"first", "b.txt": b"other"})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a.txt", b"second")
    books = texts(read(path))
    assert sorted(books.values()) == ["first", "other", "second"]
    assert [name for name in books if "#" not in name] == ["books.zip/b.txt"]


def test_members_are_read_by_name_whatever_its_case_and_their_order(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "books.zip", {"b.TXT": b"second", "a.txt": b"first", "c.Md": b"third"})
    assert list(texts(read(path)).values()) == ["first", "second", "third"]


def test_an_encrypted_member_is_the_only_one_lost(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "books.zip", {"a.txt": b"secret", "b.txt": b"open"})
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag in the local header of the first member, and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    books = read(path)
    assert texts(books) == {"books.zip/b.txt": "open"}
    assert "encrypted" in reasons(books)["books.zip/a.txt"]


def test_the_parts_of_a_container_make_up_the_whole(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "short_book_title": f"short {n}", "Title": f"long {n}"} for n in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "books.parquet", row_group_size=2)
    write_zip(tmp_path / "books.zip", {f"{n}.txt": f"row {n}".encode() for n in range(7)})
    for path, count in ((tmp_path / "books.parquet", 4), (tmp_path / "books.zip", 7)):
        (file,) = build_inventory([str(path)]).files
        whole = list(read_books(FileRange(file, file.size), TokenizeConfig()))
        assert list(texts(whole).values()) == [f"row {n}" for n in range(7)]
        parts = [read_books(FileRange(file, 1, start, start + 1), TokenizeConfig()) for start in range(count)]
        assert [book for file_range in parts for book in file_range] == whole
        if path.suffix == ".parquet":
            assert {book.title for book in whole if isinstance(book, RawBook)} == {f"long {n}" for n in range(7)}


@pytest.mark.parametrize(("number", "ends"), [(errno.EACCES, False), (errno.EIO, True), (errno.ESTALE, True)])
def test_an_unreadable_file_is_left_out_and_a_failing_disk_ends_the_work(number: int, ends: bool) -> None:
    class FailingFile(SourceFile):  # root may read everything, and disks fail seldom
        def open(self) -> BinaryIO:
            raise OSError(number, os.strerror(number))

    books = read_books(FileRange(FailingFile("a.txt", "a.txt", 1, 0), 1), TokenizeConfig())
    if ends:
        with pytest.raises(UserError, match=r"Cannot read a\.txt"):
            list(books)
    else:
        assert list(books) == [DroppedBook("a.txt", "unreadable", "Permission denied")]


def test_the_sample_has_a_heading_for_every_chapter() -> None:
    (file,) = build_inventory(["sample"]).files
    books = texts(list(read_books(FileRange(file, 0), TokenizeConfig())))
    assert list(books)[::65] == ["sample/Genesis", "sample/Revelation"]
    assert all("\n\nChapter 1\n\n" in text for text in books.values())
    assert sum(text.count("\nChapter ") for text in books.values()) == 1189


def test_an_archive_without_books_is_named(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "pictures.zip", {"a.png": b"picture"})
    assert reasons(read(path)) == {"pictures.zip": "the archive contains no .txt, .text or .md file"}


def test_books_are_separated_in_archives_too(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "books.zip", {"a.txt": b"one<|end|>two", "b.md": b"three"})
    assert texts(read(path, doc_separator="<|end|>")) == {
        "books.zip/a.txt#0": "one", "books.zip/a.txt#10": "two", "books.zip/b.md#0": "three"
    }  # fmt: skip


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_of_compressions_without_bounds_are_left_out(tmp_path: Path, compression: int) -> None:
    path = write_zip(tmp_path / "books.zip", {"a.txt": b"packed"}, compression)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b.txt", b"deflated")
    books = read(path)
    assert texts(books) == {"books.zip/b.txt": "deflated"}
    assert reasons(books) == {"books.zip/a.txt": "unsupported compression method; re-create the archive with deflate"}


def test_a_damaged_member_is_the_only_one_lost(tmp_path: Path) -> None:
    text = "".join(f"{n * 7919 % 10007} " for n in range(3000)).encode()
    path = write_zip(tmp_path / "books.zip", {f"{n}.txt": text for n in range(3)})
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("1.txt").header_offset + 35 + 20
    damaged = bytearray(path.read_bytes())
    damaged[at : at + 200] = bytes(200)
    path.write_bytes(damaged)
    books = read(path)
    assert list(texts(books)) == ["books.zip/0.txt", "books.zip/2.txt"]
    assert list(reasons(books)) == ["books.zip/1.txt"]


def test_invalid_unicode_in_names_and_strings_is_damage(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "books.zip", {"é.txt": b"text", "b.txt": b"text"})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    assert "damaged" in reasons(read(path))["books.zip"]
    wrong = pa.array([b"good", b"bad \xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": wrong}), tmp_path / "books.parquet")
    assert "damaged" in reasons(read(tmp_path / "books.parquet"))["books.parquet"]


def test_a_line_that_is_nested_too_deep_is_the_only_one_lost(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    deep = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    path.write_text("\n".join([json.dumps({"text": "one"}), deep, json.dumps({"text": "two"})]), encoding="utf-8")
    books = read(path)
    assert list(texts(books).values()) == ["one", "two"]
    assert "not a line of JSON" in next(iter(reasons(books).values()))


def test_half_surrogates_in_titles_reach_the_shard_as_text(tmp_path: Path, prose: Callable[..., str]) -> None:
    row = {"text": prose(1) + "\ud800", "title": "T\ud800", "author": "\udfffA", "language": "e\ud800"}
    (tmp_path / "lines.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    config = TokenizeConfig(sources=(str(tmp_path / "lines.jsonl"),))
    (partition,) = make_partitions(build_inventory(config.sources), config)
    run_partition(partition, StorageDir.of(tmp_path / "out"), f"test-{uuid.uuid4()}")
    result = read_result(tmp_path / "out", partition.name)
    assert result
    assert len(result.books) == 1


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small files that decompress to 100 MB of zeros: also one of whose size its archive says less."""
    folder, zeros = tmp_path_factory.mktemp("bombs"), bytes(100 * MEGABYTE)
    with gzip.open(folder / "zeros.txt.gz", "wb", 1) as packed:
        packed.write(zeros)
    with pa.CompressedOutputStream(str(folder / "zeros.jsonl.zst"), "zstd") as packed:
        packed.write(zeros)
    content = bytearray(write_zip(folder / "deflate.zip", {"zeros.txt": zeros}).read_bytes())
    at = content.rindex(b"PK\x01\x02") + 24
    content[at : at + 4] = MEGABYTE.to_bytes(4, "little")
    (folder / "deflate-of-wrong-size.zip").write_bytes(content)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("separator", [None, "<|end|>"])
def test_a_decompression_bomb_costs_bounded_memory_and_gets_a_reason(
    separator: str | None, bombs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 MB stand for the real limits."""
    most = 10 * MEGABYTE
    monkeypatch.setattr(readers, "MAX_BOOK_BYTES", most)
    monkeypatch.setattr(readers, "MAX_JSON_LINE_BYTES", most)
    pool = pa.default_memory_pool()
    arrows_most = max(pool.max_memory(), pool.bytes_allocated() + 3 * most)  # Python does not know of its memory
    assert len(bombs) == 4
    for bomb in bombs:
        assert bomb.stat().st_size < MEGABYTE
        file_range = FileRange(SourceFile(bomb.name, str(bomb), bomb.stat().st_size, 0), 0)
        tracemalloc.start()
        reason, detail = "", ""
        for book in read_books(file_range, TokenizeConfig(doc_separator=separator)):
            if isinstance(book, DroppedBook):
                reason, detail = book.reason, book.detail
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        wrong = bomb.name == "deflate-of-wrong-size.zip"
        assert reason == ("unreadable" if wrong else "too large"), bomb
        assert ("damaged: Bad CRC-32" if wrong else f"{most:,} bytes") in detail, bomb
        assert peak < 3 * most, f"{bomb.name}: {peak / 1e6:.0f} MB"
    assert pool.max_memory() <= arrows_most


def test_a_book_as_large_as_the_limit_is_read_and_its_neighbors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_BOOK_BYTES", 3 * MEGABYTE)
    monkeypatch.setattr(readers, "MAX_JSON_LINE_BYTES", 3 * MEGABYTE)
    whole, above = b"a" * 3 * MEGABYTE, b"b" * (3 * MEGABYTE + 1)
    for books in ([b"first", above, b"last"], [above, whole], [b"first", above], [whole, b"last"]):
        kept = [book.decode() for book in books if book != above]
        (tmp_path / "many.txt").write_bytes(b"<|end|>".join(books))
        found = read(tmp_path / "many.txt", doc_separator="<|end|>")
        assert list(texts(found).values()) == kept
        offset = b"<|end|>".join(books).find(b"b")
        assert list(reasons(found)) == [f"many.txt#{offset}"] * (above in books)
        write_zip(tmp_path / "books.zip", {f"{n}.txt": book for n, book in enumerate(books)})
        assert list(texts(read(tmp_path / "books.zip")).values()) == kept
    for name, data in (("whole.txt", whole), ("above.txt", above)):
        (tmp_path / name).write_bytes(data)
        with gzip.open(tmp_path / f"{name}.gz", "wb", 1) as packed:
            packed.write(data)
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            (book,) = read(path)
            assert isinstance(book, RawBook if name == "whole.txt" else DroppedBook), path
    rows = [whole.decode(), "short", above.decode()]
    pq.write_table(pa.table({"text": rows}), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row[12:]}) + "\n" for row in rows))
    assert [type(book) for book in read(tmp_path / "rows.parquet")] == [RawBook, RawBook, DroppedBook]
    assert [type(book) for book in read(tmp_path / "rows.jsonl")] == [RawBook, RawBook, DroppedBook]


DOCUMENTS = [{"text": f"Document {n}.\nIt goes on.", "url": f"https://example.org/{n}"} for n in range(3)]
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
           ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}  # fmt: skip


@pytest.mark.parametrize("packed", PACKERS)
def test_json_is_read_as_what_it_is_under_every_compression(tmp_path: Path, packed: str) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in DOCUMENTS)
    patterns = {
        "c4.json": lines, "marked.json": "\ufeff" + lines, "lines.jsonl": lines, "array.json": json.dumps(DOCUMENTS),
        "indented.json": "\n" + json.dumps(DOCUMENTS, indent=2), "blank lines.json": lines.replace("\n", "\n\n"),
    }  # fmt: skip
    for name, content in patterns.items():
        path = tmp_path / f"{name}{packed}"
        path.write_bytes(PACKERS[packed](content.encode()))
        assert list(texts(read(path)).values()) == [row["text"] for row in DOCUMENTS], name
    for indent in (None, 2):
        path = tmp_path / f"one.json{packed}"
        path.write_bytes(PACKERS[packed](json.dumps(DOCUMENTS[0], indent=indent).encode()))
        assert texts(read(path)) == {f"{path.name}#0": DOCUMENTS[0]["text"]}
    path.write_bytes(PACKERS[packed](b'[{"text": "cut'))
    assert reasons(read(path)).keys() == {path.name}


def test_the_names_of_downloads_are_known(tmp_path: Path) -> None:
    for name in ("84.txt", "84.txt.utf-8", "pg85.txt.1", "pg84.txt.utf8.gz", "84.TXT.gz.2", "84.gz"):
        (tmp_path / name).write_bytes(gzip.compress(name.encode()) if ".gz" in name else name.encode())
    found = [
        book
        for file in build_inventory([str(tmp_path)]).files
        for book in read_books(FileRange(file, 0), TokenizeConfig())
    ]
    assert {Path(book.id).name: book.data.decode() for book in found if isinstance(book, RawBook)} == {
        name: name for name in os.listdir(tmp_path)
    }


@pytest.mark.parametrize("name", ["page.html.gz", "table.csv", "crawl.warc.gz", "all.tar"])
def test_other_kinds_of_files_are_counted_in_folders_and_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"what it holds")
    (tmp_path / "book.txt").write_text("It began.\n")
    for source in (tmp_path, tmp_path / "*"):
        inventory = build_inventory([str(source)])
        assert [Path(file.id).name for file in inventory.files] == ["book.txt"]
        assert inventory.skipped == {name[name.index(".") :]: 1}
    with pytest.raises(UserError, match=re.escape(name)):
        build_inventory([str(tmp_path / name)])


def test_what_is_good_around_damage_is_kept_and_the_damage_counted(tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in DOCUMENTS]
    (tmp_path / "bad.jsonl").write_bytes(lines[0] + lines[1].replace(b"goes", b"go\xe9s") + lines[2])
    books = read(tmp_path / "bad.jsonl")
    assert [book.data.decode() for book in books if isinstance(book, RawBook)][1] == "Document 1.\nIt go\ufffds on."
    found = [book.decoded for book in books if isinstance(book, RawBook)]
    assert [decoded.replaced_bytes if decoded else 0 for decoded in found] == [0, 1, 0]


@pytest.mark.parametrize("packed", list(PACKERS)[1:])
def test_what_precedes_other_data_or_damage_is_kept_under_every_compression(tmp_path: Path, packed: str) -> None:
    pack = PACKERS[packed]
    lines = [json.dumps({"text": os.urandom(30_000).hex()}).encode() + b"\n" for _ in range(30)]
    whole = pack(b"".join(lines[:20])) + pack(b"".join(lines[20:]))
    expected = [json.loads(line)["text"] for line in lines]
    for behind in (b"\r\n", b"\n", b"<html>" * 100_000, whole[:2], b"\0" * 300_000, b"\0" * 4 + pack(b"")):
        for name in (f"rows.jsonl{packed}", f"book.txt{packed}"):
            (tmp_path / name).write_bytes(whole + behind)
            books = read(tmp_path / name)
            assert list(texts(books).values()) == (expected if "rows" in name else [b"".join(lines).decode()])
            assert list(reasons(books)) == [name] * (b"\0" not in behind), behind[:9]
    for file_range in (whole[: len(whole) // 2], whole[:-12]):
        (tmp_path / f"rows.jsonl{packed}").write_bytes(file_range)
        books = read(tmp_path / f"rows.jsonl{packed}")
        kept = list(texts(books).values())
        assert kept == expected[: len(kept)]
        assert len(kept) >= 30 * len(file_range) // len(whole) - 18, "bzip2's blocks have 900 kB"
        assert any("end of the stream is missing" in reason for reason in reasons(books).values())
    for wrong in (b"", b"It was the best of times.\n" * 9):
        (tmp_path / f"a.txt{packed}").write_bytes(wrong)
        (reason,) = reasons(read(tmp_path / f"a.txt{packed}")).values()
        assert "damaged" in reason


def test_zstd_with_the_longest_window_is_read(tmp_path: Path) -> None:
    options = {zstd.CompressionParameter.window_log: 31, zstd.CompressionParameter.enable_long_distance_matching: 1}
    packer = zstd.ZstdCompressor(options={int(name): value for name, value in options.items()})
    # Without the size in its header, as a pipe has none.
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(b'{"text": "It went on."}\n') + packer.flush())
    assert list(texts(read(tmp_path / "a.jsonl.zst")).values()) == ["It went on."]


def write_rows(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_the_exact_name_wins_and_one_of_another_case_is_taken_where_it_is_the_only_one(
    tmp_path: Path, name: str
) -> None:
    good, wrong = [f"Document {n}." for n in range(3)], ["another column"] * 3
    for columns in ({"TEXT": wrong, "text": good}, {"text": good, "TEXT": wrong}, {"Text": good, "Title": wrong}):
        books = read(write_rows(tmp_path / name, pa.table(columns)))
        assert list(texts(books).values()) == good
    assert [book.title for book in books if isinstance(book, RawBook)] == wrong
    for reason in reasons(read(write_rows(tmp_path / name, pa.table({"Text": wrong, "TEXT": good})))).values():
        assert "'Text'" in reason
        assert "'TEXT'" in reason
        assert "--text-" in reason
    found = read(tmp_path / name, text_field="TEXT", text_column="TEXT")
    assert list(texts(found).values()) == good


def test_two_columns_of_one_name_are_refused_by_that_name(tmp_path: Path) -> None:
    column = pa.array(["Document."])
    pq.write_table(pa.Table.from_arrays([column, column], ["text", "text"]), tmp_path / "rows.parquet")
    assert "'text' and 'text'" in reasons(read(tmp_path / "rows.parquet"))["rows.parquet"]


def test_binary_text_is_text(tmp_path: Path) -> None:
    good = [f"Document {n}." for n in range(3)]
    for kind in (pa.binary(), pa.large_binary()):
        pq.write_table(pa.table({"text": pa.array([text.encode() for text in good], kind)}), tmp_path / "rows.parquet")
        assert list(texts(read(tmp_path / "rows.parquet")).values()) == good


@pytest.mark.parametrize("encoding", ["gb18030", "cp1252", "koi8_r"])
def test_json_in_another_character_set_is_read_as_text_is(tmp_path: Path, encoding: str) -> None:
    line, short = {
        "gb18030": ("老磨坊主笑了，孫女跑向河邊。太陽下山以後，大家坐在長桌旁。", "孫女笑了。"),
        "cp1252": ("Der Müller lachte, und die Enkelin lief über die Brücke.", "Café."),
        "koi8_r": ("Старый мельник засмеялся, а внучка побежала к реке.", "Да."),
    }[encoding]
    rows = [{"text": f"{n} {text}"} for n, text in enumerate((short, line, line, "UTF-8: “été”.", short))]
    lines = [json.dumps(row, ensure_ascii=False).encode("utf-8" if "UTF" in row["text"] else encoding) for row in rows]
    expected = [row["text"] for row in rows]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    (tmp_path / "array.json").write_bytes(b"[\n" + b",\n".join(lines) + b"\n]")
    for name in ("rows.jsonl", "rows.jsonl.gz", "array.json"):
        assert list(texts(read(tmp_path / name)).values()) == expected, name
    (tmp_path / "one.json").write_bytes(json.dumps(rows[1], ensure_ascii=False, indent=1).encode(encoding))
    assert list(texts(read(tmp_path / "one.json")).values()) == [expected[1]]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_json_in_utf16_is_refused_by_that_name(tmp_path: Path, encoding: str) -> None:
    text = ("\ufeff" if encoding.endswith("be") else "") + json.dumps(DOCUMENTS[0]) + "\n"
    for name, pack in (("rows.jsonl", bytes), ("rows.json", bytes), ("rows.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(text.encode(encoding)))
        assert "UTF-16" in reasons(read(tmp_path / name))[name]


def test_the_members_of_an_archive_that_are_no_text_are_listed(tmp_path: Path) -> None:
    inner = write_zip(tmp_path / "inner.zip", {"b.txt": b"inside"}).read_bytes()
    members = {"a.txt": b"text", "84.txt.utf-8": b"text", "notes.pdf": b"%PDF", "inner.zip": inner, "rows.jsonl": b"{}"}
    books = read(write_zip(tmp_path / "books.zip", members))
    assert list(texts(books)) == ["books.zip/84.txt.utf-8", "books.zip/a.txt"]
    assert reasons(books).keys() == {"books.zip/notes.pdf", "books.zip/inner.zip", "books.zip/rows.jsonl"}
    file = SourceFile("books.zip", str(tmp_path / "books.zip"), 1, 0)
    assert [
        book.id for book in read_books(FileRange(file, 0, 1, 2), TokenizeConfig()) if isinstance(book, RawBook)
    ] == ["books.zip/a.txt"], "not listed again by another part"


def replace_file(place: StorageDir, name: str, content: bytes) -> None:
    """Put ``content`` in place of a file, a second later as far as the time of a local one tells."""
    folder = place.local_path
    modified = (folder / name).stat().st_mtime_ns if folder else 0
    place.write(name, content)
    if folder:
        os.utime(folder / name, ns=(modified + 10**9, modified + 10**9))


def write_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@pytest.mark.parametrize("name", ["books.txt", "rows.jsonl", "books.txt.gz", "books.zip", "rows.parquet"])
def test_a_source_that_has_changed_since_the_plan_ends_the_work(tmp_path: Path, name: str, place: StorageDir) -> None:
    """To one that is shorter or of the same size, for each of its parts."""
    packers: dict[str, Callable[[str], bytes]] = {
        "books.txt": str.encode,
        "rows.jsonl": lambda text: "".join(json.dumps({"text": text}) + "\n" for _ in range(9)).encode(),
        "books.txt.gz": lambda text: gzip.compress(text.encode()),
        "books.zip": lambda text: write_zip(tmp_path / "w.zip", dict.fromkeys("abc", text.encode())).read_bytes(),
        "rows.parquet": lambda text: write_parquet(pa.table({"text": [text] * 9})),
    }
    pack = packers[name]
    old, new = pack("It was a day. " * 99), pack("It is a night." * 99)
    for content in (new, old[: len(old) // 3]):
        place.write(name, old)
        (file,) = build_inventory([str(place / name)]).files
        replace_file(place, name, content)
        parts = (FileRange(file, 0), FileRange(file, 0, 1, None)) if file.format != "text" else (FileRange(file, 0),)
        for file_range in parts:
            with pytest.raises(UserError, match=rf"{name}.* changed .*\. Run the same command again"):
                list(read_books(file_range, TokenizeConfig()))


def test_a_source_that_is_replaced_while_it_is_read_ends_the_work(place: StorageDir) -> None:
    """By one of the same size, after its first row was read."""
    rows = [json.dumps({"text": f"{word} and on it went. " * 4000}) + "\n" for word in ("Here", "Then")]
    versions = [row.encode() * (20 * MEGABYTE // len(row)) for row in rows]
    assert len(versions[0]) == len(versions[1])
    place.write("rows.jsonl", versions[0])
    (file,) = build_inventory([str(place / "rows.jsonl")]).files
    reading = read_books(FileRange(file, file.size), TokenizeConfig())
    assert isinstance(next(reading), RawBook)
    replace_file(place, "rows.jsonl", versions[1])
    with pytest.raises(UserError, match=r"rows\.jsonl.* changed"):
        list(reading)


@pytest.mark.parametrize("name", ["text8", "corpus/enwik8", "novel.en"])
def test_the_only_file_of_an_archive_is_its_text_unless_its_suffix_tells_otherwise(tmp_path: Path, name: str) -> None:
    inside = {"corpus/": b"", "__MACOSX/._text8": b"\0\5\x16\7", name: b"anarchism originated"}
    books = read(write_zip(tmp_path / "a.zip", inside))
    assert texts(books) == {f"a.zip/{name}": "anarchism originated"}
    assert reasons(books).keys() == {"a.zip/__MACOSX"}
    for other in ({name: b"text", "more": b"text"}, {"a.png": b"picture"}, {"a.csv": b"a,b"}, {"a.gz": b"packed"}):
        assert texts(read(write_zip(tmp_path / "b.zip", other))) == {}
    assert list(texts(read(write_zip(tmp_path / "c.zip", {name: b"text", "a.txt": b"a book"})))) == ["c.zip/a.txt"]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"])
def test_a_source_that_is_cut_short_while_it_is_read_is_not_taken_for_a_damaged_one(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0)
    texts = [noise.bytes(100_000).hex() for _ in range(60)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": texts}), tmp_path / name, row_group_size=1, use_dictionary=False)
    else:
        pack = gzip.compress if name.endswith("gz") else lambda data: pa.compress(data, "zstd", asbytes=True)
        (tmp_path / name).write_bytes(pack(rows))
    (file,) = build_inventory([str(tmp_path / name)]).files
    reading = read_books(FileRange(file, file.size), TokenizeConfig())
    assert isinstance(next(reading), RawBook)
    os.truncate(tmp_path / name, file.size // 3)
    with pytest.raises(UserError, match=rf"{name} changed"):
        list(reading)
