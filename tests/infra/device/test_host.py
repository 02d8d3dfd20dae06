"""Cores and memory are those that this process may use: of its control group, where that has less than the machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from infra.device.host import available_memory, count_oom_kills, cpu_count, total_memory

PROJECT = Path(__file__).resolve().parents[3]

UNIFIED = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
CPU = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:8 - cgroup cgroup rw,cpu,cpuacct\n"
DISK = "24 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,memory\n"

HUGE = 9223372036854771712
"""How version 1 writes that there is no limit."""

GIGABYTE = 10**9

V1 = "memory.limit_in_bytes"


def machine(root: Path, groups: str, mounts: str, files: Mapping[str, object]) -> Path:
    """A file system at ``root`` that describes a process in ``groups``, with ``files`` below /sys/fs/cgroup."""
    paths = {"proc/self/cgroup": groups, "proc/self/mountinfo": DISK + mounts}
    for name, content in (paths | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


IN_SLICE = ("0::/batch.slice/job.scope\n", UNIFIED.format(top="/"))
IN_CONTAINER = ("0::/\n", UNIFIED.format(top="/"))
OUTSIDE_ITS_NAMESPACE = ("0::/../other\n", UNIFIED.format(top="/"))
IN_DOCKER = (
    "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
    MEMORY.format(top="/docker/abc") + CPU.format(top="/docker/abc"),
)
BELOW_DOCKER = ("9:memory:/docker/abc/inner\n", MEMORY.format(top="/docker/abc"))
ON_THE_HOST = ("9:memory:/user/a\n4:cpu,cpuacct:/user/a\n0::/user/a\n", MEMORY.format(top="/") + CPU.format(top="/"))
HYBRID = (
    "9:memory:/job\n0::/job\n",
    MEMORY.format(top="/") + UNIFIED.format(top="/").replace("cgroup rw", "cgroup/unified rw"),
)


@pytest.mark.parametrize(
    ("where", "files", "limit"),
    [
        (IN_SLICE, {"batch.slice/job.scope/memory.max": 2 * GIGABYTE, "batch.slice/memory.max": "max"}, 2 * GIGABYTE),
        (IN_SLICE, {"batch.slice/job.scope/memory.max": "max", "batch.slice/memory.max": GIGABYTE}, GIGABYTE),
        (IN_SLICE, {"batch.slice/job.scope/memory.max": "max", "batch.slice/memory.max": "max"}, None),
        (IN_SLICE, {"memory.max": GIGABYTE, "batch.slice/job.scope/memory.max": 3 * GIGABYTE}, GIGABYTE),
        (IN_CONTAINER, {"memory.max": GIGABYTE}, GIGABYTE),
        (OUTSIDE_ITS_NAMESPACE, {"memory.max": GIGABYTE}, GIGABYTE),
        (IN_DOCKER, {f"memory/{V1}": GIGABYTE}, GIGABYTE),
        (BELOW_DOCKER, {f"memory/inner/{V1}": GIGABYTE, f"memory/{V1}": HUGE}, GIGABYTE),
        (BELOW_DOCKER, {f"memory/inner/{V1}": HUGE, f"memory/{V1}": GIGABYTE}, GIGABYTE),
        (ON_THE_HOST, {f"memory/user/a/{V1}": HUGE, f"memory/{V1}": HUGE}, None),
        (HYBRID, {f"memory/job/{V1}": GIGABYTE, "unified/job/cgroup.procs": ""}, GIGABYTE),
        (("", ""), {}, None),
    ],
    ids=[
        "own group", "group above", "unlimited", "tree's top", "container", "outside its namespace", "v1 container",
        "v1 inside a container", "v1 above", "v1 unlimited", "hybrid", "no groups",
    ],
)  # fmt: skip
def test_the_memory_is_the_smallest_limit_up_the_tree(
    where: tuple[str, str], files: Mapping[str, object], limit: int | None, tmp_path: Path
) -> None:
    uses = {name.replace("memory.max", "memory.current").replace("limit_in", "usage_in"): 10**8 for name in files}
    root = machine(tmp_path, *where, uses | dict(files))
    if limit is None:
        assert total_memory(root) == psutil.virtual_memory().total
        assert available_memory(root) == pytest.approx(psutil.virtual_memory().available, rel=0.5)
    else:
        assert (total_memory(root), available_memory(root)) == (limit, limit - 10**8)


@pytest.mark.parametrize(
    ("where", "folder", "names"),
    [
        (IN_CONTAINER, "", ("memory.max", "memory.current", "inactive_file 3000\nactive_file 2000\ntotal_anon 7")),
        (IN_DOCKER, "memory/", ("memory.limit_in_bytes", "memory.usage_in_bytes",
                                "inactive_file 1\ntotal_inactive_file 3000\ntotal_active_file 2000")),
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_the_cache_of_files_is_available_and_what_exceeds_a_limit_is_not(
    where: tuple[str, str], folder: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    limit, use, statistics = names
    files = {f"{folder}{limit}": 20_000, f"{folder}{use}": 16_000, f"{folder}memory.stat": statistics}
    assert available_memory(machine(tmp_path, *where, files)) == 20_000 - 16_000 + 5_000
    assert available_memory(machine(tmp_path, *where, files | {f"{folder}{use}": 30_000})) == 0


@pytest.mark.parametrize(
    ("where", "files", "cores"),
    [
        (IN_CONTAINER, {"cpu.max": "max 100000"}, 64),
        (IN_CONTAINER, {"cpu.max": "200000 100000"}, 2),
        (IN_CONTAINER, {"cpu.max": "150000 100000"}, 2),
        (IN_CONTAINER, {"cpu.max": "20000 100000"}, 1),
        (IN_SLICE, {"batch.slice/job.scope/cpu.max": "400000 100000", "batch.slice/cpu.max": "300000 100000"}, 3),
        (IN_DOCKER, {"cpu,cpuacct/cpu.cfs_quota_us": 200000, "cpu,cpuacct/cpu.cfs_period_us": 100000}, 2),
        (IN_DOCKER, {"cpu,cpuacct/cpu.cfs_quota_us": -1, "cpu,cpuacct/cpu.cfs_period_us": 100000}, 64),
        (ON_THE_HOST, {"cpu,cpuacct/user/cpu.cfs_quota_us": 50000, "cpu,cpuacct/user/cpu.cfs_period_us": 25000}, 2),
        (("", ""), {}, 64),
    ],
)
def test_the_cores_are_as_many_as_the_time_on_them_is_worth(
    where: tuple[str, str], files: Mapping[str, object], cores: int, tmp_path: Path
) -> None:
    assert cpu_count(machine(tmp_path, *where, files), affinity=64) == cores


def test_the_cores_are_those_of_the_affinity() -> None:
    """Of a real process, which the tokenizer's default of --workers follows."""
    program = "from pipeline.config import TokenizeConfig\nprint(TokenizeConfig().num_workers)"
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\n{program}"],
        capture_output=True, text=True, check=True, cwd=PROJECT,
    )  # fmt: skip
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("where", "files", "kills"),
    [
        (
            IN_SLICE,
            {"batch.slice/job.scope/memory.events": "oom 9\noom_kill 2", "batch.slice/memory.events": "oom_kill 7"},
            2,
        ),
        (IN_DOCKER, {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3"}, 3),
        (("", ""), {"../../../proc/vmstat": "nr_free_pages 5\noom_kill 4"}, 4),
        (("", ""), {}, 0),
    ],
    ids=["v2", "v1", "without groups", "not counted"],
)  # fmt: skip
def test_kills_for_memory_are_counted_in_the_own_group(
    where: tuple[str, str], files: Mapping[str, object], kills: int, tmp_path: Path
) -> None:
    (tmp_path / "sys" / "fs" / "cgroup").mkdir(parents=True)
    assert count_oom_kills(machine(tmp_path, *where, files)) == kills


@pytest.fixture
def memory_group(tmp_path: Path) -> Path:
    """A new control group of 300 MB in this machine's own hierarchy; skips the test where none can be made."""
    for name, limit in (("memory/throughline-test", "memory.limit_in_bytes"), ("throughline-test", "memory.max")):
        group = Path("/sys/fs/cgroup", f"{name}-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text("300000000")
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    pytest.skip("needs to make a control group")


def test_a_real_group_limits_memory_and_counts_what_was_killed(memory_group: Path) -> None:
    joining = f"from pathlib import Path\nimport os\nPath('{memory_group}/cgroup.procs').write_text(str(os.getpid()))\n"
    telling = (
        "from infra.device import host\nprint(host.total_memory(), host.available_memory(), host.count_oom_kills())"
    )

    def tell() -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", joining + telling], capture_output=True, text=True, check=True, cwd=PROJECT
        )
        return [int(word) for word in done.stdout.split()]

    try:
        total, available, before = tell()
        eater = "kept = []\nwhile True: kept.append(bytearray(os.urandom(10_000_000)))"
        assert subprocess.run([sys.executable, "-c", joining + eater]).returncode == -9
        assert tell()[2] == before + 1
    finally:
        memory_group.rmdir()
    assert 290_000_000 < available + 10_000_000 < total + 10_000_000 <= 310_000_000
