"""Local copies of data sets in object storage, so that training can memory-map their shards.

All runs on a machine share the copies of the machine. The name of a copy is the fingerprint of its data set, so that
copies of different data sets are never mixed up.
"""

from collections.abc import Callable
from pathlib import Path

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from pipeline.shards import MANIFEST_FILE, TOKENIZER_FILE, Manifest, read_manifest

LOCK_TIMEOUT_SECONDS = 24 * 3600.0
"""Time limit of the wait for another process of this machine that downloads the same data set."""


def ensure_local(data: StorageDir, on_shard: Callable[[Manifest, int], None] = lambda manifest, number: None) -> Path:
    """Download and verify the missing shards of ``data``, and return its local folder.

    Calls ``on_shard`` with the number of complete shards before each download. Raises ``UserError`` if the data set is
    unfinished or damaged, the storage fails, or the disk is full.
    """
    manifest = read_manifest(data)
    workspace = Workspace.of(data, "data", manifest.fingerprint)
    message = f"Another process of this machine has been downloading {data} for a day. Stop it, then try again."
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
        if not (workspace.path / MANIFEST_FILE).exists():
            manifest.write(workspace.path)
    return workspace.path
