"""Sending of sources on the driver's disk to a cluster whose other machines cannot read that disk.

A few books, such as downloads of ``gutenberg:``, are sent with their partitions. A large corpus must be in object
storage.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from infra.errors import UserError
from infra.ray.machines import run_on_other_nodes
from infra.storage.object_storage import is_remote
from pipeline.books.readers import FileRange
from pipeline.books.sources import EmbeddedFile, SourceFile
from pipeline.job.plan import Partition

MAX_EMBEDDED_BYTES = 100_000_000
"""Maximum size in bytes of embedded sources, because they pass through the memory of the driver and of Ray."""
SAMPLED_FILES = 100
"""Maximum number of files that the other machines look for on their disks."""


def machines_without_files(partitions: list[Partition]) -> list[str]:
    """Return the other machines of the connected Ray that cannot read the local files of ``partitions``."""
    versions = sorted({(file.uri, file.size, file.modified) for file in _local_files(partitions)})
    sampled_versions = versions[:: max(1, len(versions) // SAMPLED_FILES)]
    if not sampled_versions:
        return []
    return sorted(name for name, is_missing in run_on_other_nodes(is_any_missing, sampled_versions) if is_missing)


def embed_local_files(
    partitions: list[Partition], missing_on: list[str], max_bytes: int = MAX_EMBEDDED_BYTES
) -> list[Partition]:
    """Return ``partitions`` with embedded local files, if machines ``missing_on`` cannot read these files.

    Raises ``UserError`` if the files have more than ``max_bytes`` bytes.
    """
    if not missing_on:
        return partitions
    files = _local_files(partitions)
    if (size := sum(file.size for file in files)) > max_bytes:
        raise UserError(
            f"{min(file.uri for file in files)} and other sources ({size / 1e6:,.0f} MB) are on this machine's disk, "
            f"which {', '.join(missing_on)} cannot read. Copy them to object storage and use that address, for example "
            f"s3://bucket/books (up to {max_bytes / 1e6:,.0f} MB are sent with the tasks)."
        )
    return [replace(partition, ranges=tuple(map(_with_content, partition.ranges))) for partition in partitions]


def is_any_missing(files: Iterable[tuple[str, int, int]]) -> bool:
    """Return whether a local file is missing on this machine or has another size or modification time."""
    for path, size, modified in files:
        try:
            status = os.stat(path)  # noqa: PTH116 Path would parse each name
            if status.st_size != size or (modified and status.st_mtime_ns != modified):
                return True
        except OSError:
            return True
    return False


def _local_files(partitions: list[Partition]) -> list[SourceFile]:
    return [file_range.file for partition in partitions for file_range in partition.ranges if _is_local(file_range)]


def _is_local(file_range: FileRange) -> bool:
    return file_range.file.format != "sample" and not is_remote(file_range.file.uri)


def _with_content(file_range: FileRange) -> FileRange:
    """Return ``file_range`` with its file's bytes; unchanged if they cannot be read, so that its task reports it."""
    file = file_range.file
    if not _is_local(file_range):
        return file_range
    try:
        embedded = replace(file_range, file=EmbeddedFile(**vars(file), content=Path(file.uri).read_bytes()))
    except OSError:
        return file_range
    file.check_unchanged()
    return embedded
