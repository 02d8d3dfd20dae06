"""The shards of a data set on this machine's disk, where training memory-maps them.

Every run on this machine shares its copies. They are named by the data set's fingerprint, so that one never stands for
another.
"""

from collections.abc import Callable
from pathlib import Path

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from pipeline.shards import MANIFEST, TOKENIZER_FILE, Manifest, read_manifest

LOCK_TIMEOUT_SECONDS = 24 * 3600.0
"""Seconds to wait for another process of this machine that is fetching the same data set."""


def ensure_local(data: StorageDir, on_shard: Callable[[Manifest, int], None] = lambda manifest, number: None) -> Path:
    """The folder of ``data`` here, in which every shard is there and has been checked.

    Calls ``on_shard`` before each shard that is fetched, with the number of those that are here. Raises ``UserError``
    when the data set is unfinished or damaged, the storage fails, or the disk is full.
    """
    manifest = read_manifest(data)
    workspace = Workspace.of(data, "data", manifest.fingerprint)
    message = f"another process has been fetching {data} for a day: end it."
    with workspace.lock_copy(message, LOCK_TIMEOUT_SECONDS):
        for number, shard in enumerate(manifest.shards):
            if workspace.lacks(shard.path, shard.bytes):
                on_shard(manifest, number)
                try:
                    workspace.pull(shard.path, shard.checksum)
                except FileNotFoundError:
                    raise UserError(
                        f"{data / shard.path} is missing: run 'python -m pipeline.tokenize --out {data}' again."
                    ) from None
        if data.exists(TOKENIZER_FILE):
            workspace.pull(TOKENIZER_FILE)
        if not (workspace.path / MANIFEST).exists():
            manifest.write(workspace.path)
    return workspace.path
