"""Sources on the disk of the command's machine, for a cluster whose other machines do not have that disk.

Few books travel with their pieces, such as those that ``gutenberg:`` downloads; a corpus belongs in object storage.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from infra.errors import UserError
from infra.ray.machines import run_on_other_nodes
from infra.storage.object_storage import is_remote
from pipeline.books.readers import FileRange
from pipeline.books.sources import EmbeddedFile
from pipeline.job.plan import Partition

MAX_EMBEDDED_BYTES = 100_000_000
"""Most bytes of sources that are sent along: they pass through the memory of the command and of Ray."""
SAMPLED_FILES = 100
"""Files that the other machines are asked for."""


def embed_local_files(partitions: list[Partition]) -> list[Partition]:
    """``partitions`` as every machine of the connected Ray can do them: with the bytes of local files, if one lacks
    them.

    Raises ``UserError`` when these are more than ``MAX_EMBEDDED_BYTES`` bytes.
    """
    local = [part.file for partition in partitions for part in partition.parts if _is_local(part)]
    versions = sorted({(file.uri, file.size, file.modified) for file in local})
    sampled_versions = versions[:: max(1, len(versions) // SAMPLED_FILES)]
    blind = (
        sorted(name for name, is_missing in run_on_other_nodes(is_any_missing, sampled_versions) if is_missing)
        if sampled_versions
        else []
    )
    if not blind:
        return partitions
    if (size := sum(file.size for file in local)) > MAX_EMBEDDED_BYTES:
        raise UserError(
            f"{versions[0][0]} and other sources ({size / 1e6:,.0f} MB) are on this machine's disk, which "
            f"{', '.join(blind)} of the cluster cannot see: copy them to object storage and name them there, such "
            f"as s3://bucket/books (up to {MAX_EMBEDDED_BYTES / 1e6:,.0f} MB are sent along)."
        )
    return [replace(piece, parts=tuple(map(_carried, piece.parts))) for piece in partitions]


def is_any_missing(files: Iterable[tuple[str, int, int]]) -> bool:
    """Whether one of these local files, given with its size and time, is missing on this machine or another version."""
    for path, size, modified in files:
        try:
            status = os.stat(path)  # noqa: PTH116 Path would parse each name
            if status.st_size != size or (modified and status.st_mtime_ns != modified):
                return True
        except OSError:
            return True
    return False


def _is_local(part: FileRange) -> bool:
    return part.file.format != "sample" and not is_remote(part.file.uri)


def _carried(part: FileRange) -> FileRange:
    """``part`` with its file's bytes; as it is where they cannot be read, which its task reports."""
    file = part.file
    if not _is_local(part):
        return part
    try:
        embedded = replace(part, file=EmbeddedFile(**vars(file), content=Path(file.uri).read_bytes()))
    except OSError:
        return part
    file.check_unchanged()
    return embedded
