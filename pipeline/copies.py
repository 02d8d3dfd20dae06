"""Copies of a finished data set in object storage, for other machines to train on.

In: a finished folder and a URI (``s3://``, ``gs://``). Out: the same files there, and back again. The manifest is
removed first and written last, so that a copy with a manifest is complete. Every shard is labelled with its
checksum, so that an interrupted or repeated copy sends only what differs.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash

from infra.errors import UserError
from infra.storage import atomic_file, listing, locate, store, with_retries
from pipeline.shards import MANIFEST, QUARANTINE, SPLITS, Manifest, checksum, read_manifest

_BLOCK = 8 << 20
_SHARD = re.compile(rf"({'|'.join(SPLITS)})/[0-9-]+\.arrow")


def upload(folder: Path, uri: str, on_shard: Callable[[], None] = lambda: None) -> int:
    """Make the copy at ``uri`` equal to the finished data set in ``folder``; returns the number of shards sent.

    Calls ``on_shard`` after each. Raises ``UserError`` when the data set is incomplete or the storage fails.
    """
    manifest = read_manifest(folder)
    if not (folder / QUARANTINE).is_file():
        raise UserError(
            f"{folder} has no {QUARANTINE}: run 'python -m pipeline.tokenize --out {folder}' with the same sources "
            "again to write it."
        )
    system, root = locate(uri)
    there = {entry.path.removeprefix(f"{root}/"): entry.size for entry in listing(uri)}
    wanted = {shard.path for shard in manifest.shards}
    strays = [name for name in there if _SHARD.fullmatch(name) and name not in wanted]
    for name in (MANIFEST, *strays):
        if name in there:
            with_retries(uri, partial(system.delete_file, f"{root}/{name}"), "written")

    def send(name: str, label: str) -> None:
        with_retries(uri, lambda: store(folder / name, system, f"{root}/{name}", label), "written")

    sent = 0
    for shard in manifest.shards:
        label = f"application/vnd.apache.arrow.file; xxh3-128={shard.checksum}"
        if there.get(shard.path) != shard.bytes or _label(system, f"{root}/{shard.path}", uri) != label:
            send(shard.path, label)
            sent += 1
        on_shard()
    for name in (QUARANTINE, MANIFEST):
        send(name, "application/json")
    return sent


def download(uri: str, folder: Path, on_shard: Callable[[Manifest], None] = lambda _: None) -> int:
    """Make ``folder`` equal to the finished copy at ``uri``; returns the number of shards fetched.

    Calls ``on_shard`` with the manifest after each. Raises ``UserError`` when there is no finished copy or it is
    damaged, when the storage fails, and when ``folder`` holds another data set.
    """
    system, root = locate(uri)
    with TemporaryDirectory() as incoming:
        try:
            _fetch(system, f"{root}/{MANIFEST}", Path(incoming) / MANIFEST, uri)
        except FileNotFoundError:
            raise UserError(f"{uri} holds no {MANIFEST}: name a folder that '--copy-to' has finished.") from None
        try:
            manifest = read_manifest(Path(incoming))
        except UserError:  # in words for a folder of ours
            raise UserError(
                f"{uri}/{MANIFEST} is damaged, or of another version of this program: make the copy again with "
                f"'--copy-to {uri}'."
            ) from None
    if (folder / MANIFEST).exists() and read_manifest(folder).fingerprint != manifest.fingerprint:
        raise UserError(f"{folder} holds another data set than {uri}: give another --out.")
    fetched = 0
    for shard in manifest.shards:
        if not _SHARD.fullmatch(shard.path):  # the manifest came over the network, and names where to write
            raise UserError(f"{uri}/{MANIFEST} names {shard.path!r}, which no shard is called: make the copy again.")
        path = folder / shard.path
        if not (path.is_file() and path.stat().st_size == shard.bytes and checksum(path) == shard.checksum):
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch_listed(system, root, shard.path, folder, uri, shard.checksum)
            fetched += 1
        on_shard(manifest)
    for name in (QUARANTINE, MANIFEST):
        _fetch_listed(system, root, name, folder, uri)
    return fetched


def _label(system: Any, path: str, uri: str) -> str:
    """The type that a stored file was given, which for shards holds the checksum."""
    with with_retries(uri, lambda: system.open_input_stream(path)) as file:
        return (file.metadata() or {}).get("Content-Type", b"").decode()


def _fetch_listed(system: Any, root: str, name: str, folder: Path, uri: str, expected: str | None = None) -> None:
    """Fetch a file that a finished copy has."""
    try:
        _fetch(system, f"{root}/{name}", folder / name, uri, expected)
    except FileNotFoundError:
        raise UserError(f"{uri} has lost {name}: make the copy again with '--copy-to {uri}'.") from None


def _fetch(system: Any, path: str, file: Path, uri: str, expected: str | None = None) -> None:
    """Fetch one stored file whole. Raises ``UserError`` when its checksum is not the expected one."""

    def fetch() -> None:
        found = xxhash.xxh3_128()
        with system.open_input_stream(path) as source, atomic_file(file) as sink:
            while block := source.read(_BLOCK):
                found.update(block)
                sink.write(block)
            if expected and found.hexdigest() != expected:
                raise UserError(f"{uri}: {file.name} is damaged there; make the copy again with '--copy-to {uri}'.")

    with_retries(uri, fetch)
