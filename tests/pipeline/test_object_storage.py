"""Reading remote books: a real Google Cloud Storage emulator and the Hugging Face hub's protocol, on loopback."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.object_storage import locate
from pipeline.books.readers import RawBook, read_books
from pipeline.books.sources import build_inventory
from pipeline.cache import ensure_local
from pipeline.config import TokenizeConfig
from pipeline.inspect import find_damage
from pipeline.job.plan import make_partitions
from pipeline.shards import read_manifest


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP API as is asked of it, for the dataset ``org/books``."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = "0" * 40
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).replace(self.commit, "main")
        if path in ("/api/datasets/org/books", "/api/datasets/org/books/revision/main"):
            self.answer({"id": "org/books", "sha": self.commit, "tags": [], "downloads": 0, "likes": 0})
        elif path.startswith("/api/datasets/org/books/tree/main"):
            folder = path.removeprefix("/api/datasets/org/books/tree/main").strip("/")
            self.answer(self.tree(folder, recursive="recursive=true" in self.path.lower()))
        elif path.startswith("/datasets/org/books/resolve/main/") and self.commit in self.path:  # of one version
            content = self.files[path.removeprefix("/datasets/org/books/resolve/main/")]
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            self.send(206, content[int(first) : int(last or len(content) - 1) + 1])
        elif path == "/api/datasets/org/refused":
            self.send(403, b"")
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self.answer([entry for entry in self.tree("", recursive=True) if entry["path"] in asked])

    def tree(self, folder: str, *, recursive: bool) -> list[dict[str, object]]:
        """Folders and files in ``folder``, and below those."""
        parents = {str(parent) for name in self.files for parent in PurePosixPath(name).parents} - {"."}
        folders: list[dict[str, object]] = [{"type": "directory", "path": name, "oid": "1" * 40} for name in parents]
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": "2" * 40} for name, data in self.files.items()
        ]
        start = f"{folder}/" if folder else ""
        below = [entry for entry in folders + files if str(entry["path"]).startswith(start)]
        return [entry for entry in below if recursive or "/" not in str(entry["path"]).removeprefix(start)]

    def answer(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub that holds :attr:`Hub.files`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def books_of(*sources: str) -> dict[str, bytes]:
    """What is read of ``sources``, by id."""
    settings = TokenizeConfig(sources)
    ranges = [
        file_range
        for partition in make_partitions(build_inventory(sources), settings)
        for file_range in partition.ranges
    ]
    return {
        book.id: book.data
        for file_range in ranges
        for book in read_books(file_range, settings)
        if isinstance(book, RawBook)
    }


def test_google_cloud_storage_is_read_and_written(
    bucket: str,
    tmp_path: Path,
    write_books: Callable[..., Path],
    small_shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_scratch: Callable[[Path], None],
) -> None:
    """By its XML interface, which is that of S3 but for signatures and conditional writes."""
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    gs = f"?base_url={parse_qs(bucket.lstrip('?'))['endpoint'][0]}"
    local = write_books(tmp_path / "books", 3)
    for path in local.iterdir():
        StorageDir.of(f"gs://places/books{gs}").upload(path, path.name)
    expected = {f"books/{path.name}": path.read_bytes() for path in local.iterdir()}
    assert books_of(f"gs://places/books{gs}") == expected
    assert len(books_of(f"gs://places/*/*2.txt{gs}")) == 1
    with pytest.raises(UserError, match="your credentials"):  # of a bucket that is not public
        books_of(f"gs://anonymous@places/books{gs}")
    tokens = StorageDir.of(f"gs://places/tokens{gs}")
    for name in StorageDir.of(small_shards).list_files():
        tokens.upload(small_shards / name, name)
    set_scratch(tmp_path)
    copy = StorageDir.of(ensure_local(tokens))
    assert len(read_manifest(copy).shards) == 3
    assert list(find_damage(copy, read_manifest(tokens))) == list(find_damage(tokens, read_manifest(copy))) == []
    tokens.remove([*tokens.list_files(), "never-there"])
    assert tokens.list_files() == {}


def test_the_hugging_face_hub_is_read(hub: str, tmp_path: Path, write_books: Callable[..., Path]) -> None:
    local = write_books(tmp_path / "books", 3)
    Hub.files = {f"data/sub folder/{path.name}": path.read_bytes() for path in local.iterdir()}
    for number in range(2):  # as corpora of books are kept there
        table = pa.table({"TEXT": [f"Book {number}. {'It was a day. ' * 99}"], "METADATA": ["{}"]})
        pq.write_table(table, tmp_path / "train.parquet")
        Hub.files[f"parts/train-{number}.parquet"] = (tmp_path / "train.parquet").read_bytes()
    program = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_object_storage import books_of
from infra.errors import UserError
print(json.dumps({name: data.decode() for name, data in books_of("hf://datasets/org/books/data").items()}))
print(json.dumps({name: data.decode() for name, data in books_of("hf://datasets/org/books/parts/train-0*.parquet").items()}))
for folder in ("nothing", "refused"):
    try:
        books_of(f"hf://datasets/org/{folder}")
    except UserError as mistake:
        print(mistake)
"""
    done = subprocess.run(  # huggingface_hub reads the address of the hub when it is imported
        [sys.executable, "-c", program, str(Path(__file__).parent)], env={"HF_ENDPOINT": hub, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read, share, missing, refused = done.stdout.splitlines()
    ((_, text),) = json.loads(share).items()
    assert text.startswith("Book 0. It was")
    assert json.loads(read) == {f"data/sub folder/{path.name}": path.read_text() for path in local.iterdir()}
    assert "No books found in hf://datasets/org/nothing" in missing
    assert "hf://datasets/org/refused cannot be listed" in refused


def test_an_address_with_a_secret_key_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match=r"bucket corpus contains a secret key.*AWS_SECRET_ACCESS_KEY") as refused:
        locate("s3://KEY:S3CRET@corpus/books")
    assert "S3CRET" not in str(refused.value)
