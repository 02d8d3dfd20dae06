"""Local copies of data sets in object storage, so that training can memory-map their shards.

All runs on a machine share its copies. A copy is named by the data set's fingerprint, so that data sets are never
confused.
"""

from collections.abc import Callable
from pathlib import Path

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from pipeline.shards import MANIFEST, TOKENIZER_FILE, Manifest, read_manifest

LOCK_TIMEOUT_SECONDS = 24 * 3600.0
"""Seconds to wait for another process of this machine that is downloading the same data set."""


def ensure_local(data: StorageDir, on_shard: Callable[[Manifest, int], None] = lambda manifest, number: None) -> Path:
    """Return the local folder of ``data``, after downloading and verifying every missing shard.

    Calls ``on_shard`` before each download, with the number of shards that are complete. Raises ``UserError`` if the
    data set is unfinished or damaged, the storage fails, or the disk is full.
    """
    manifest = read_manifest(data)
    workspace = Workspace.of(data, "data", manifest.fingerprint)
    message = f"Another process has been downloading {data} for a day. End it."
    with workspace.lock_copy(message, LOCK_TIMEOUT_SECONDS):
        for number, shard in enumerate(manifest.shards):
            if workspace.is_missing(shard.path, shard.bytes):
                on_shard(manifest, number)
                try:
                    workspace.pull(shard.path, shard.checksum)
                except FileNotFoundError:
                    raise UserError(
                        f"{data / shard.path} is missing. Run 'python -m pipeline.tokenize --out {data}' again."
                    ) from None
        if data.exists(TOKENIZER_FILE):
            workspace.pull(TOKENIZER_FILE)
        if not (workspace.path / MANIFEST).exists():
            manifest.write(workspace.path)
    return workspace.path
