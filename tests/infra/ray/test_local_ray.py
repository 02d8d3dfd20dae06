"""A Ray of our own: on loopback, out of our process group, and what happens where Ray no longer lets us do so."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray.util
from ray import _raylet
from ray._private import node, ray_constants, services

from infra.errors import UserError
from infra.ray.cluster import PROJECT_DIR, ray_session
from infra.ray.local_ray import (
    choose_temporary_folder,
    on_loopback,
    only_needed_processes,
    own_process_group,
    same_interpreter,
)

UV = str(Path(sys.executable).with_name("uv"))


@pytest.fixture
def node_address(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``node_address(address)``: the address of this machine that Ray finds."""
    return lambda address: monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)


PROGRAM = """
import json, os, psutil, ray
from infra.ray.cluster import ray_session
from infra.ray.machines import wait_for_accelerator
from infra.errors import UserError

def train_of_worker():
    import train
    return train.__file__

with ray_session(cpus=1):
    imported = ray.get(ray.remote(train_of_worker).remote())  # in a worker, which listens too
    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        listening = [at.laddr.ip for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN]
        found[process.pid] = process.name(), os.getpgid(process.pid) == os.getpgid(0), listening
    try:
        wait_for_accelerator("A100")
    except UserError as lack:
        refused = str(lack)
    started_by = ray.get_runtime_context().runtime_env.get("py_executable")
print(json.dumps([list(found.values()), imported, refused, os.environ.get("RAY_AUTH_MODE"), started_by]))
"""


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str, str, str, str | None]:
    """What PROGRAM finds, run by ``uv run`` as a console script is, from a folder that holds a ``train.py``."""
    folder, script = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("bin") / "program"
    (folder / "train.py").write_text("")
    script.write_text(PROGRAM)
    unset = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [UV, "run", "--no-project", "--offline", "--python", sys.executable, "python", str(script)],
        cwd=folder, capture_output=True, text=True, timeout=120, env=unset | {"PYTHONPATH": str(PROJECT_DIR)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_a_local_ray_listens_on_loopback_and_is_out_of_our_process_group(
    local_ray: tuple[list[Any], str, str, str, str | None],
) -> None:
    (_, _, ours), *rays = local_ray[0]
    assert {"gcs_server", "raylet"} <= {name for name, _, _ in rays}
    assert not any(in_our_group for _, in_our_group, _ in rays)
    addresses = {
        address.removeprefix("::ffff:") for listening in (ours, *(at for _, _, at in rays)) for address in listening
    }
    assert addresses == {"127.0.0.1"}


def test_a_local_ray_has_no_idle_processes_imports_our_packages_and_has_no_accelerator_to_wait_for(
    local_ray: tuple[list[Any], str, str, str, str | None],
) -> None:
    """One Python waits in place of the dashboard's agent; the current folder has a ``train`` of its own."""
    (_, *rays), imported, refused, *_ = local_ray
    assert imported == str(PROJECT_DIR / "train" / "__init__.py")
    assert "This machine has no A100 (--accelerator)" in refused
    names = [name for name, _, _ in rays if name != "ray::IDLE"]
    assert sorted(names) == sorted(["gcs_server", "raylet", "ray::RuntimeEnvAgent", Path(sys.executable).name])


@pytest.mark.parametrize(
    ("name", "foreign", "usual"),
    [("tmp", False, True), ("x" * 46, False, False), ("tmp", True, False), ("ü" * 20, False, False)],
)
def test_ray_has_its_files_where_it_can_make_sockets(name: str, foreign: bool, usual: bool) -> None:
    """Another user's folder ``ray`` is one that this process may not write to once it is no longer root's."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as top:
        Path(top).chmod(0o755)
        folder = Path(top, name)
        folder.mkdir()
        folder.chmod(0o1777)
        if foreign:
            (folder / "ray").mkdir(mode=0o555)
        program = """
import os, tempfile
import infra.storage.directory
from infra.ray.local_ray import choose_temporary_folder
if os.getuid() == 0:
    os.setuid(65534)
print(choose_temporary_folder(), os.getuid())
"""
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=PROJECT_DIR, env=os.environ | {"TMPDIR": str(folder)},
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        found, user = done.stdout.split()
        assert found == (str(folder) if usual else f"/tmp/throughline-{user}")  # noqa: S108


@pytest.mark.parametrize(("name", "reason"), [("x" * 46, "too long"), ("file/ray", "Set it to your own folder")])
def test_a_folder_that_was_named_for_ray_and_does_not_do_is_refused(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as top:
        Path(top, "file").touch()
        monkeypatch.setenv("RAY_TMPDIR", f"{top}/{name}")
        with pytest.raises(UserError, match=f"RAY_TMPDIR {top}/{name[:4]}.*{reason}.*unset it"):
            choose_temporary_folder()
        monkeypatch.setenv("RAY_TMPDIR", f"{top}/new")
        assert choose_temporary_folder() == f"{top}/new"
        monkeypatch.chdir(top)
        monkeypatch.setenv("RAY_TMPDIR", "here")
        assert choose_temporary_folder() == f"{top}/here", "Ray's processes run in other folders"


@pytest.mark.slow
def test_a_local_ray_starts_where_tmpdir_is_too_long_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 46)
    folder.mkdir()
    program = """
from infra.ray.cluster import ray_session
with ray_session(cpus=1):
    import ray
    print(ray.get(ray.remote(lambda: 3).remote()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT_DIR, env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["3"], done.stderr


def test_a_ray_without_the_switch_for_loopback_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, node_address: Callable[[str], None]
) -> None:
    monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    node_address("192.0.2.9")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = psutil.Process().children()
    with pytest.raises(UserError, match=r"would listen on 192.0.2.9, .*instead of 127.0.0.1.* use --address"):
        ray_session().__enter__()
    assert psutil.Process().children() == before
    assert not hasattr(ray_constants, "ENABLE_RAY_CLUSTER")


def test_a_ray_that_ignores_the_switch_is_refused_and_stopped(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared Ray stands for it: it was started without the switch."""
    init = ray.init
    monkeypatch.setattr(ray, "init", lambda **settings: init(address=cluster, log_to_driver=False))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="would listen on"):
        ray_session().__enter__()
    assert not ray.is_initialized()


def test_a_ray_that_obeys_the_environment_alone_is_accepted(
    monkeypatch: pytest.MonkeyPatch, node_address: Callable[[str], None]
) -> None:
    monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    node_address("127.0.0.1")
    with on_loopback():
        pass


@pytest.mark.parametrize("before", [None, 0o755])
def test_the_token_of_a_local_ray_is_for_its_user_alone(
    before: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_address: Callable[[str], None]
) -> None:
    node_address("127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    if before:
        (tmp_path / ".ray").mkdir(mode=before)
    with on_loopback():
        assert (tmp_path / ".ray").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("home", ["/proc/nowhere", "/dev/null"])
def test_a_local_ray_has_a_token_of_its_own_where_no_home_can_be_written(
    home: str, monkeypatch: pytest.MonkeyPatch, node_address: Callable[[str], None]
) -> None:
    node_address("127.0.0.1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.setenv("HOME", home)
    with on_loopback():
        token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    with on_loopback():
        assert os.environ["RAY_AUTH_TOKEN"] == token, "its workers know it already"
    monkeypatch.setenv("RAY_AUTH_TOKEN", own := "a user's own")
    with on_loopback():
        assert os.environ["RAY_AUTH_TOKEN"] == own


def test_a_local_ray_asks_for_a_token(local_ray: tuple[list[Any], str, str, str, str | None]) -> None:
    """Without anybody having set it: other users of the machine reach 127.0.0.1, too."""
    assert local_ray[3] == "token"


def test_uv_run_does_not_start_the_workers_of_a_local_ray(
    local_ray: tuple[list[Any], str, str, str, str | None],
) -> None:
    """Each would look for an environment, or make one, in a copy of the current folder."""
    assert local_ray[4] is None


@pytest.mark.parametrize(("user", "hook"), [(None, False), ("0", True), ("1", True)])
def test_a_user_decides_whether_uv_run_starts_the_workers(
    user: str | None, hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has read the variable already when it is known that a Ray starts."""
    variable = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    monkeypatch.delenv(variable, raising=False)
    assert getattr(ray_constants, variable)
    if user:
        monkeypatch.setenv(variable, user)
    with same_interpreter():
        assert getattr(ray_constants, variable) == hook
    assert getattr(ray_constants, variable)


@pytest.mark.slow
def test_a_search_runs_under_uv_run(tmp_path: Path, small_shards: Path) -> None:
    """In a project with an environment: in Ray's copy of its folder uv would make an empty one for each worker."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "books"\nversion = "0"\nrequires-python = ">=3.11"\n')
    (tmp_path / ".venv").symlink_to(sys.prefix)
    flags = [
        "--data", str(small_shards), "--model", "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,"
        "padded_vocab_size=320", "--global-batch", "1", "--searcher", "grid", "--confirm-rounds", "1",
        "--device", "cpu", "--trial-steps", "8", "--memory-limit", "8GB", "--name", "uv",
    ]  # fmt: skip
    outside = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "RAY_ADDRESS")}
    done = subprocess.run(
        [UV, "run", "--no-sync", "--offline", "python", "-m", "tune.search", *flags],
        cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "uv" / "best.json").exists()


def test_a_ray_that_starts_processes_otherwise_stays_in_our_group_and_that_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(services, "ConsolePopen")
    with caplog.at_level(logging.WARNING), own_process_group():
        assert not hasattr(services, "ConsolePopen")
    assert "runs in the command's process group" in caplog.text


def test_a_ray_that_starts_its_processes_otherwise_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = ["raylet", "--session_dir=/tmp", "--node_id=1", "--dashboard_agent_command=agent"]
    monkeypatch.delattr(node.Node, "start_monitor")
    monkeypatch.delattr(node.Node, "start_log_monitor")
    monkeypatch.setattr(node.Node, "start_api_server", lambda _, **settings: settings)
    monkeypatch.setattr(services, "ConsolePopen", lambda command, **_: command)
    monkeypatch.delattr(ray_constants, "DASHBOARD_ADDRESS")
    monkeypatch.delattr(_raylet, "persist_port")
    with only_needed_processes():
        assert not hasattr(node.Node, "start_monitor")
        assert not hasattr(node.Node, "start_log_monitor")
        started: Any = node.Node.start_api_server
        assert started(None, include_dashboard=False) == {"include_dashboard": False}
        assert services.ConsolePopen(raylet) == raylet
    assert not hasattr(node.Node, "start_monitor")


def test_replaced_attributes_are_restored() -> None:
    def replaced() -> tuple[Any, ...]:
        return ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen, node.Node.start_monitor

    before = replaced()
    with on_loopback(), own_process_group(), only_needed_processes():
        assert all(now != then for now, then in zip(replaced(), before, strict=True))
    assert replaced() == before
