"""CPU cores and memory of this machine that this process may use.

A control group (cgroups(7), version 1 or 2) limits a container or a batch job to a part of its machine. The usual
system calls describe the whole machine, but the kernel kills a process if its group exceeds its memory. The limits of
the groups above apply, too, as far as they are visible inside the container.

Every function takes the ``root`` of the file system that describes the machine.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

ROOT = Path("/")


def cpu_count(root: Path = ROOT, affinity: int | None = None) -> int:
    """Return the number of cores that this process may keep busy, by its affinity and its group's CPU time quota."""
    cores = affinity or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quotas = [
        *(_parse_ratio(_read_text(group / "cpu.max")) for group in _find_groups("cpu", 2, root)),
        *(
            _parse_ratio(f"{_read_text(group / 'cpu.cfs_quota_us')} {_read_text(group / 'cpu.cfs_period_us')}")
            for group in _find_groups("cpu", 1, root)
        ),
    ]
    return min([cores, *(max(1, math.ceil(quota)) for quota in quotas if quota)])


def total_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that all processes of this process's control group may use together."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _read_memory_limits(root))])


def is_wsl() -> bool:
    """Return whether this is a Linux inside Windows (WSL), where Windows manages the GPU's memory."""
    return "microsoft" in os.uname().release.lower()


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes of free memory. The page cache counts as free, because the kernel shrinks it when needed."""
    return min(
        [psutil.virtual_memory().available, *(max(0, limit - used) for limit, used in _read_memory_limits(root))]
    )


def count_oom_kills(root: Path = ROOT) -> int:
    """Return the number of processes that the kernel killed because this process's control group ran out of memory.

    If the group does not count them, returns the number for the whole machine.
    """
    files = [
        *(group / "memory.events" for group in _find_groups("memory", 2, root)),
        *(group / "memory.oom_control" for group in _find_groups("memory", 1, root)),
        root / "proc/vmstat",
    ]
    return next((numbers["oom_kill"] for file in files if "oom_kill" in (numbers := _read_numbers(file))), 0)


def _read_memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use without the page cache) of each control group with a limit, the innermost first."""
    names = {
        2: ("memory.max", "memory.current", "inactive_file", "active_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    }
    for version, (limit, use, *cached) in names.items():
        for group in _find_groups("memory", version, root):
            with suppress(ValueError):  # The file is missing, or contains "max".
                statistics = _read_numbers(group / "memory.stat")
                in_use = int(_read_text(group / use)) - sum(statistics.get(name, 0) for name in cached)
                yield int(_read_text(group / limit)), in_use


def _find_groups(controller: str, version: int, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group of ``controller`` and of the visible groups above it."""
    lines = (line.split(":", 2) for line in _read_text(root / "proc/self/cgroup").splitlines())
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    path = paths.get(controller if version == 1 else "")
    for line in _read_text(root / "proc/self/mountinfo").splitlines() if path else ():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind != ("cgroup2" if version == 2 else "cgroup") or (version == 1 and controller not in options.split(",")):
            continue
        top, folder = mount.split(" ")[3:5]
        # A container without a cgroup namespace reads the host's path, of which only the lower part exists in it.
        group = PurePosixPath(path or "/")
        is_below = group.is_relative_to(top) and ".." not in group.parts
        relative_group = group.relative_to(top) if is_below else PurePosixPath()
        for part in (relative_group, *relative_group.parents):
            yield root / folder.lstrip("/") / part


def _read_text(file: Path) -> str:
    """Read the text of ``file``; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_numbers(file: Path) -> dict[str, int]:
    """Read the numbers by name from a ``file`` whose lines are a name and a number."""
    words = (line.split() for line in _read_text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _parse_ratio(text: str) -> float | None:
    """Return the quotient of two positive numbers in ``text``; None for other texts, such as "max 100000"."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or "0" in words:
        return None
    return int(words[0]) / int(words[1])
