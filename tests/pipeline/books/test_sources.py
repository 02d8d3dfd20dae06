"""Every form of source gives the same books, in the same plan, whatever the order and the names."""

import gzip
import json
import math
import os
import socket
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books import downloads, sources
from pipeline.books.downloads import Mirror
from pipeline.books.readers import DroppedBook, FileRange, RawBook, read_books
from pipeline.books.sources import Inventory, SourceFile, build_inventory
from pipeline.config import TokenizeConfig
from pipeline.job.plan import assign_split, make_partitions, split_file

TEXTS = [f"Book {number}.\n" + "It was a quiet morning on the harbour road.\n" * 20 for number in range(6)]


def write_texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.txt").write_text(TEXTS[number], encoding="utf-8")
    return folder


def books_of(*sources: str, **settings) -> dict[str, str]:
    """Id to text of every book in ``sources``, read by the plan's parts."""
    config = TokenizeConfig(sources=sources, **settings)
    plan = make_partitions(build_inventory(config.sources, config.mirror), config)
    found = [book for partition in plan for file_range in partition.ranges for book in read_books(file_range, config)]
    assert not [book for book in found if isinstance(book, DroppedBook)]
    books = {book.id: book.data.decode() for book in found if isinstance(book, RawBook)}
    assert len(books) == len(found)
    return books


def write_all_forms(folder: Path) -> dict[str, dict]:
    """One file of each form, with the same books; returns the settings that each needs."""
    folder.mkdir()
    rows = [{"text": text, "title": f"T{n}"} for n, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    joined = "<|end|>".join(TEXTS).encode()
    (folder / "books.jsonl").write_bytes(lines)
    (folder / "books.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "books.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    pq.write_table(pa.Table.from_pylist(rows), folder / "books.parquet", row_group_size=2)
    (folder / "joined.txt").write_bytes(joined)
    (folder / "joined.txt.gz").write_bytes(gzip.compress(joined))
    with zipfile.ZipFile(folder / "books.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number, text in enumerate(TEXTS):
            archive.writestr(f"inner/{number}.txt", text)
    separated = {"doc_separator": "<|end|>"}
    return {path.name: separated if "joined" in path.name else {} for path in folder.iterdir()}


def test_every_form_holds_the_same_books(tmp_path: Path) -> None:
    for name, needed in write_all_forms(tmp_path / "forms").items():
        assert list(books_of(str(tmp_path / "forms" / name), **needed).values()) == TEXTS, name
    for number, text in enumerate(TEXTS):
        (tmp_path / "forms" / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
        (tmp_path / "forms" / f"{number}.txt.zst").write_bytes(pa.compress(text.encode(), codec="zstd", asbytes=True))
    for suffix in ("gz", "zst"):
        assert list(books_of(str(tmp_path / "forms" / f"[0-9].txt.{suffix}")).values()) == TEXTS


@given(
    st.lists(st.text(st.sampled_from("ab|<\n"), max_size=30), max_size=30),
    st.integers(1, 50),
    st.sampled_from(["<>", "\n", "#@#"]),
)
def test_a_file_of_many_books_is_the_same_in_one_part_and_in_many(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], step: int, separator: str
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "many.txt"
    path.write_text(separator.join(documents), encoding="utf-8", newline="")
    config = TokenizeConfig(doc_separator=separator)
    file = SourceFile("many.txt", str(path), path.stat().st_size, 0)
    whole = list(read_books(FileRange(file, file.size), config))
    starts = range(0, max(1, file.size), step)
    ranges = [b for start in starts for b in read_books(FileRange(file, step, start, start + step), config)]
    assert ranges == whole
    text = path.read_bytes()
    assert [b.data for b in whole if isinstance(b, RawBook)] == [d for d in text.split(separator.encode()) if d.strip()]


def test_a_file_is_not_split_at_a_separator_that_overlaps_itself(tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("a book---" * 300_000, encoding="utf-8")
    file = SourceFile("many.txt", str(path), path.stat().st_size, 0)
    parts = {
        separator: len(split_file(file, TokenizeConfig(doc_separator=separator, shard_size=1_000_000)))
        for separator in ("--", "---", "k--", "-b-", "<|endoftext|>", "\n")
    }
    assert parts == {"--": 1, "---": 1, "k--": 3, "-b-": 1, "<|endoftext|>": 3, "\n": 3}


def test_the_order_of_arguments_and_repeats_do_not_matter(tmp_path: Path) -> None:
    write_texts(tmp_path / "one")
    write_texts(tmp_path / "two")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert build_inventory([one, two, "sample"]) == build_inventory(["sample", two, two, one])
    assert len(build_inventory([one, two, f"{one}/*.txt"]).files) == 6


def test_books_in_folders_of_the_same_name_have_different_ids(tmp_path: Path) -> None:
    write_texts(tmp_path / "a" / "books")
    write_texts(tmp_path / "b" / "books")
    files = build_inventory([str(tmp_path / "a" / "books"), str(tmp_path / "b" / "books")]).files
    assert len({file.id for file in files}) == 6


def test_odd_names_are_read(tmp_path: Path) -> None:
    undecodable = b"bad-\xff\xfe.txt".decode("utf-8", "surrogateescape")
    names = ["carriage\rreturn.txt", "quote\"'.txt", "emoji \U0001f40b.txt", "é" * 120 + ".txt", undecodable]
    folder = tmp_path / "odd"
    folder.mkdir()
    for number, name in enumerate(names):
        (folder / name).write_text(TEXTS[number], encoding="utf-8")
    books = books_of(str(folder))
    assert sorted(books.values()) == sorted(TEXTS[: len(names)])
    assert all(book.encode() for book in books)


def test_a_book_is_in_the_split_that_it_always_was_in() -> None:
    """Another hash or seed would move books that were trained on into validation."""
    places = {
        "sample/Genesis": 0.25678655394479677,
        "sample/Obadiah": 0.8072733343413114,
        "books/book 0001.txt": 0.3910112904648263,
        "gutenberg/pg1342.txt": 0.09940758452555917,
        "lines.jsonl#0": 0.25368078607253275,
        "books/é.txt": 0.7018550323450397,
    }
    for book, place in places.items():
        assert (assign_split(book, place), assign_split(book, math.nextafter(place, 1))) == ("train", "val"), book


def test_special_files_are_refused_by_name_and_skipped_in_folders_and_globs(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "books")
    (folder / "broken.txt").symlink_to(folder / "nothing.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    os.mkfifo(folder / "pipe.txt")
    for name in ("broken.txt", "loop.txt", "pipe.txt", "p*.txt"):
        with pytest.raises(UserError, match="There is no file or folder"):
            build_inventory([str(folder / name)])
    names = [f"{number}.txt" for number in range(3)]
    assert [file.id for file in build_inventory([f"{folder}/*.txt"]).files] == names
    assert [file.id for file in build_inventory([str(folder)]).files] == [f"books/{name}" for name in names]


def test_invalid_unicode_in_names_and_suffixes_is_escaped(tmp_path: Path) -> None:
    undecodable = b"\xff\xfe".decode("utf-8", "surrogateescape")
    for above in ("a", "b"):
        folder = write_texts(tmp_path / above / f"books{undecodable}")
        (folder / f"picture.{undecodable}").write_bytes(b"picture")
    inventory = build_inventory([str(tmp_path / above / f"books{undecodable}") for above in ("a", "b")])
    assert len({file.id.encode() for file in inventory.files}) == 6
    assert {suffix.encode(): count for suffix, count in inventory.skipped.items()} == {rb".\xff\xfe": 2}


@pytest.mark.parametrize("source", ["nowhere", "empty", "ftp://host/books", "gutenberg:12x", "s3:///books"])
def test_a_bad_source_is_one_sentence(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=source.split(":")[0]):
        build_inventory([source])


@pytest.mark.parametrize("mirror", ["http://[bad", "http://host:port"])
def test_a_bad_mirror_is_one_sentence(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="another --mirror"):
        list(downloads.download_books("gutenberg:11", Mirror(mirror, retries=0)))


WHOLE = (
    "Title: A Tale\n\n*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n\n" + TEXTS[0]
    + "\n*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***\n"
).encode()  # fmt: skip
MAX_PLAIN_BYTES = b"Content-Type: text/plain; charset=utf-8\r\n"


def ok(body: bytes, headers: bytes = MAX_PLAIN_BYTES, length: int | None = None) -> bytes:
    """An answer of a server; with ``length`` it says that as many bytes follow."""
    size = b"" if length is None else b"Content-Length: %d\r\n" % length
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + headers + size + b"\r\n" + body


@contextmanager
def server_that_answers(answer: bytes) -> Iterator[str]:
    """The address of a server that sends ``answer`` to one request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=greet, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


BAD_ANSWERS = {
    "no HTTP": b"220 mail.example ready\r\n",
    "login page": ok(b"<html>Please log in.</html>", b"Content-Type: text/html\r\n"),
    "page without a type": ok(b"<!DOCTYPE html>\n<html>Please log in.</html>", b""),
    "page as text": ok(b"\n<html><head><title>Welcome</title></head></html>"),
    "error as text": ok(b"404: Not Found\n" * 30),
    "error in XML": ok(b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>", b"Content-Type: text/xml\r\n"),
    "error in JSON": ok(b'{"message": "rate limit exceeded"}', b"Content-Type: application/json\r\n"),
    "empty": ok(b"", length=0),
    "blank": ok(b"\r\n \r\n"),
    "no text": ok(b"PK\3\4" + bytes(99)),
    "cut off by its length": ok(TEXTS[0].encode(), length=len(TEXTS[0]) + 9),
    "cut off before its end": ok(WHOLE[:-200]),
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_that_is_no_book_or_not_all_of_it_is_one_sentence_and_not_kept(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with server_that_answers(answer) as mirror, pytest.raises(UserError, match="another --mirror"):
        list(downloads.download_books("gutenberg:11", Mirror(mirror, retries=0)))
    assert not list(tmp_path.rglob("pg11.txt"))


@pytest.mark.parametrize("bad", [b"", b"404: Not Found\n" * 30, b"<html>Please log in.</html>", WHOLE[:-200]])
def test_what_an_earlier_download_kept_though_it_is_no_book_is_fetched_again(
    bad: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "throughline" / "gutenberg" / "pg11.txt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(bad)
    with server_that_answers(ok(WHOLE, length=len(WHOLE))) as mirror:
        (file,) = build_inventory(["gutenberg:11"], mirror).files
    assert cached.read_bytes() == WHOLE
    assert file.size == len(WHOLE)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """A mirror with two books, on loopback. A file NAME.fails makes the next request for NAME fail."""
    root = tmp_path / "mirror"
    for text, name in zip(TEXTS, ("cache/epub/84/pg84.txt", "1/3/4/1342/1342-0.txt"), strict=False):
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

        def do_GET(self) -> None:
            answers = root / f"{self.path.lstrip('/')}.fails"
            if answers.exists():
                answers.unlink()
                self.send_error(502)
            else:
                super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"Cannot create .*XDG_CACHE_HOME"):
        build_inventory(["gutenberg:11"])


def test_books_are_fetched_by_number_once(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    list(downloads.download_books("gutenberg:1342,84", Mirror(mirror, interval_seconds=0.01)))
    expected = {"gutenberg/pg84.txt": TEXTS[0], "gutenberg/pg1342.txt": TEXTS[1]}
    assert books_of("gutenberg:84,1342", mirror="http://127.0.0.1:9") == expected
    with pytest.raises(UserError, match="Book 11 has no plain-text edition"):
        build_inventory(["gutenberg:11"], mirror)


def test_a_mirror_that_sends_more_than_a_book_is_not_listened_to(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"pg84\.txt is larger than 10 bytes.* Remove its number"):
        list(downloads.download_books("gutenberg:84", Mirror(mirror, max_book_bytes=10)))
    assert list((tmp_path / "cache").rglob("*.txt")) == []


def test_a_mirror_that_fails_once_is_asked_again(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fails = tmp_path / "mirror" / "cache/epub/84/pg84.txt.fails"
    fails.touch()
    assert books_of("gutenberg:84", mirror=mirror) == {"gutenberg/pg84.txt": TEXTS[0]}
    assert not fails.exists()


def test_hidden_files_and_those_of_no_known_suffix_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "books")
    for name in (".hidden.txt", "picture.PNG", "page.png", "README", ".git/config.txt", "deep/er/LAST.TXT"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TEXTS[3], encoding="utf-8")
    (folder / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    write_texts(tmp_path / "elsewhere")
    inventory = build_inventory([str(folder)])
    assert [file.id for file in inventory.files] == [
        "books/0.txt", "books/1.txt", "books/2.txt", "books/deep/er/LAST.TXT",
        "books/linked/0.txt", "books/linked/1.txt", "books/linked/2.txt",
    ]  # fmt: skip
    assert inventory.skipped == {"(none)": 1, ".png": 2, "hidden or temporary": 2}
    for file in inventory.files:
        status = Path(file.uri).stat()
        assert (file.size, file.modified) == (status.st_size, status.st_mtime_ns)
    assert len(build_inventory([f"{folder}/**/*.TXT"]).files) == 1


HIDDEN = (
    ".hidden.txt", "deep/.git/config.txt", "deep/.git/more.txt", "_temporary/0/part.json", "_delta_log/0.json",
    "__MACOSX/._a.txt",
)  # fmt: skip
VISIBLE = ("...And Ladies.txt", "_Preface.txt", "_posts/a.md", "a.txt", "deep/a.txt")


@pytest.mark.parametrize("kind", ["folder", "glob", "s3", "s3 glob"])
def test_what_is_hidden_is_one_rule_for_folders_globs_and_object_storage(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    query = request.getfixturevalue("bucket") if "s3" in kind else ""
    place = StorageDir.of(f"s3://places/books/{query}" if query else tmp_path / "books")
    for name in (*HIDDEN, *VISIBLE):
        place.write(name, b'{"text": "It went on."}')
    top = "s3://places/books" if query else str(tmp_path / "books")
    inventory = build_inventory([f"{top}/**{query}" if "glob" in kind else f"{top}{query}"])
    found = [unquote(file.uri).split("/books/")[1].split("?")[0] for file in inventory.files]
    assert sorted(found) == sorted(VISIBLE)
    assert inventory.skipped == {"hidden or temporary": 5}, "files and folders at the top of what is hidden"
    for asked in (".hidden.txt", "_temporary", "deep/.git", ".*", "deep/.g*/*.txt"):
        assert build_inventory([f"{top}/{asked}{query}"]).files, asked


def test_objects_that_stand_for_folders_are_no_books(bucket: str) -> None:
    place = StorageDir.of(f"s3://places/marked/{bucket}")
    place.write("data.parquet/a.txt", b"It went on.")
    endpoint = parse_qs(bucket[1:])["endpoint"][0]
    for name in ("marked/data.parquet/", "marked/empty.txt"):
        requests.put(f"{endpoint}/places/{name}", timeout=30).raise_for_status()
    inventory = build_inventory([place.address])
    assert [file.id for file in inventory.files] == ["marked/data.parquet/a.txt"]
    assert inventory.skipped == {"empty": 2}


def test_a_name_that_no_object_can_be_read_by_is_told_with_what_to_do(bucket: str) -> None:
    query = parse_qs(bucket[1:])
    client = boto3.client("s3", endpoint_url=query["endpoint"][0], region_name=query["region"][0])
    for key in ("odd/a.txt", "odd/b//c.txt", "odd/d/e.txt"):
        client.put_object(Bucket="places", Key=key, Body=b"It went on.")
    with pytest.raises(UserError, match=r"odd/b//c\.txt.*Rename"):
        build_inventory([f"s3://places/odd/{bucket}"])
    assert [file.id for file in build_inventory([f"s3://places/odd/d{bucket}"]).files] == ["d/e.txt"]


def test_links_are_followed_once_and_end(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two loops: following each link forty times, as the system allows, would take longer than the universe has."""
    folder, far = write_texts(tmp_path / "books"), tmp_path_factory.mktemp("far")
    (far / "far.txt").write_text(TEXTS[4], encoding="utf-8")
    (far / "back").symlink_to(tmp_path)
    for name in ("loop", "again", "far.txt", "once more", "self.txt", "deep2"):
        targets = {"far.txt": far, "once more": far, "self.txt": "self.txt", "deep2": "deep"}
        (folder / name).symlink_to(targets.get(name, "."))
    (folder / "deep/.hidden").mkdir(parents=True)
    for place in (folder / "deep", folder / "deep/.hidden"):
        (place / "more.txt").write_text(TEXTS[3], encoding="utf-8")
    names = ["0.txt", "1.txt", "2.txt", "more.txt"]
    found = [file.id for file in build_inventory([str(folder)]).files]
    assert found == [*(f"books/{name}" for name in names[:3]), "books/deep/more.txt", "books/far.txt/far.txt"]
    for pattern in ("books/**/*.txt", "**/*.txt", "books/**", "**", "b*/**/[0-9em]*.txt", "**/books/**/*.txt"):
        files = build_inventory([f"{tmp_path}/{pattern}"]).files
        assert sorted({Path(file.uri).name for file in files} - {"far.txt"}) == names, pattern


@pytest.mark.parametrize(
    ("link", "file", "foreign"),
    [(7, 7, False), (7, 8, True), (7, os.getuid(), True), (os.getuid(), 8, False), (0, 8, False)],
)
def test_the_link_of_another_user_counts_where_it_names_their_own_file(link: int, file: int, foreign: bool) -> None:
    def owned(user: int) -> os.stat_result:
        return os.stat_result((0, 0, 0, 1, user, 0, 0, 0, 0, 0))

    assert sources._is_link_to_other_user(owned(link), owned(file)) is foreign


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make the file of another user")
def test_what_another_users_link_names_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("our secret diary")
    folder = write_texts(tmp_path / "books")
    (folder / "planted.txt").symlink_to(tmp_path / "private.txt")
    os.chown(folder / "planted.txt", 4711, -1, follow_symlinks=False)
    inventory = build_inventory([str(folder)])
    assert [file.id for file in inventory.files] == ["books/0.txt", "books/1.txt", "books/2.txt"]
    assert inventory.skipped == {"linked by another user": 1}
    os.chown(tmp_path / "private.txt", 4711, -1)
    assert len(build_inventory([str(folder)]).files) == 4


def test_an_inventory_is_identified_by_names_and_sizes() -> None:
    files = [SourceFile("a.txt", "/a.txt", 3, 1), SourceFile("b.txt", "/b.txt", 4, 1)]
    told = Inventory(files).summary()
    assert (told["files"], told["bytes"]) == (2, 7)
    for name, size in (("c.txt", 4), ("b.txt", 5)):
        assert Inventory([files[0], SourceFile(name, "", size, 1)]).summary()["sha256"] != told["sha256"]
    assert Inventory([files[0], SourceFile("b.txt", "/other", 4, 2)]).summary() == told


def test_downloads_are_polite_and_known_by_number_alone(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pauses: list[float] = []
    seven = tmp_path / "mirror" / "0" / "7" / "7.txt"
    seven.parent.mkdir(parents=True)
    seven.write_text(TEXTS[2], encoding="utf-8")
    polite = Mirror(mirror, sleep=pauses.append)
    assert len(list(downloads.download_books("gutenberg:1342,84,7,84", polite))) == 3
    files = build_inventory(["gutenberg:1342,84,7,84"], mirror).files
    assert [(file.id, file.modified) for file in files] == [
        (f"gutenberg/pg{number}.txt", 0) for number in (1342, 7, 84)
    ]  # fmt: skip
    assert pauses == [downloads.REQUEST_INTERVAL_SECONDS] * 2, "between three downloads"
    list(downloads.download_books("gutenberg:1342,84,7", polite))
    assert len(pauses) == 2


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_mirror_that_refuses_is_distinguished_from_one_without_the_book_and_not_asked_again(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                server.close()
                connection.sendall(f"HTTP/1.0 {status}\r\nRetry-After: 0\r\n\r\n".encode())

        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=refuse, daemon=True).start()
        with pytest.raises(UserError, match=rf"HTTP {status}\..*--mirror"):
            build_inventory(["gutenberg:11"], address)


def test_a_data_set_of_ours_is_no_source_finished_or_not(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "books")
    whole = build_inventory([str(folder)])
    for out, names in (
        ("tokens", ("manifest.json", "quarantine.jsonl")),
        ("deep/begun", ("partitions/settings.json",)),
    ):
        for name in (*names, "notes.txt", "train/more.jsonl"):
            (folder / out / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / out / name).write_text('{"text": "not a book"}\n')
    assert build_inventory([str(folder)]) == whole
    for pattern in ("books/*", "books/**", "books/**/*.*", "*"):
        found = {Path(file.uri).name for file in build_inventory([f"{tmp_path}/{pattern}"]).files}
        assert found == {"0.txt", "1.txt", "2.txt"}
    for nothing in ("**/*.jsonl", "books/tokens"):
        with pytest.raises(UserError, match="No books found"):
            build_inventory([f"{tmp_path}/{nothing}"])


def test_a_data_set_of_ours_is_no_source_in_object_storage_either(bucket: str) -> None:
    place = StorageDir.of(f"s3://places/mixed/{bucket}")
    for name in (
        "a.txt", "rows.jsonl", "tokens/quarantine.jsonl", "tokens/manifest.json", "tokens/x/rows.jsonl",
        "begun/partitions/settings.json", "begun/notes.txt", "other/manifest.json", "other/partitions/b.txt",
    ):  # fmt: skip
        place.write(name, b"{}")
    assert [file.id for file in build_inventory([place.address]).files] == [
        "mixed/a.txt", "mixed/other/manifest.json", "mixed/other/partitions/b.txt", "mixed/rows.jsonl"
    ]  # fmt: skip
