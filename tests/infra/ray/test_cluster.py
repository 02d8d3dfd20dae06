"""Joining a Ray cluster that is not there, and leaving one that is only starting."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import ray
from mlflow.tracking import MlflowClient

from infra.errors import UserError
from infra.ray.cluster import PROJECT_DIR, _runtime_env, ray_session
from infra.ray.machines import max_cores_per_worker, wait_for_resources
from pipeline.config import TokenizeConfig
from pipeline.tokenize import main


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "nowhere.invalid"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(address: str) -> None:
    """Ray by itself tries for a quarter of an hour."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listened at
        with pytest.raises(
            UserError, match=r"Cannot connect to Ray at --address .*[^.]\. Start a cluster with 'ray start"
        ):
            ray_session(f"{address}:{taken.getsockname()[1]}").__enter__()


def test_the_error_names_the_environment_variable_that_gave_the_address(
    monkeypatch: pytest.MonkeyPatch, working_folder: Path
) -> None:
    """The tokenizer asks for the address in advance, because it does otherwise on a cluster."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    (working_folder / "book.txt").write_text("It was a book. " * 100)
    for refused in (ray_session().__enter__, partial(main, TokenizeConfig(sources=("book.txt",), out="tokens"))):
        with pytest.raises(UserError, match=r"RAY_ADDRESS 127.0.0.1:9: "):
            refused()


@pytest.mark.parametrize("address", ["elsewhere", "127.0.0.1:port", "ray://127.0.0.1:9"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"Cannot connect to Ray at --address {address}: "):
        ray_session(address).__enter__()


def test_an_address_at_which_something_else_listens_is_refused_after_one_attempt() -> None:
    """Ray by itself makes twenty attempts of 40 seconds; here each is given a few."""
    with socket.create_server(("0.0.0.0", 0)) as other:  # noqa: S104 where Ray looks for what is on this machine
        program = (
            f"from infra.ray.cluster import ray_session; ray_session('127.0.0.1:{other.getsockname()[1]}').__enter__()"
        )
        short = {"RAY_py_gcs_connect_timeout_s": "1", "RAY_gcs_rpc_server_connect_timeout_s": "1"}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=PROJECT_DIR, env=os.environ | short, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
    assert "UserError: Cannot connect to Ray at --address 127.0.0.1:" in done.stderr


def test_an_address_is_not_ignored_where_ray_is_connected_already(cluster: str) -> None:
    """The same Ray under another name of this machine is joined by the block inside, another one is refused."""
    port = cluster.rpartition(":")[2]
    with ray_session(cluster):
        for same in (cluster, f"localhost:{port}", "auto", None):
            with ray_session(same):
                assert ray.is_initialized()
        for other in ("127.0.0.1:9", f"nowhere.invalid:{port}"):
            with pytest.raises(UserError, match=rf"--address {other}: .* {cluster}\. Remove --address"):
                ray_session(other).__enter__()
        assert ray.is_initialized()


@pytest.mark.slow
def test_a_ray_of_our_own_is_the_only_one_that_gets_its_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    for module in ("/one/model.py", "/two/model.py"):
        with ray_session(code=[module]):
            found = ray.get(ray.remote(lambda: os.environ["PYTHONPATH"]).remote())
        assert found == os.pathsep.join([str(PROJECT_DIR), str(Path(module).parent), "/nowhere"])
        assert os.environ["PYTHONPATH"] == "/nowhere"


@pytest.mark.slow
def test_an_interrupt_while_ray_starts_is_not_lost() -> None:
    """Half a Ray cannot be shut down: the command ended in a segmentation fault."""
    program = """
import sys, time
from infra.ray.cluster import ray_session
try:
    with ray_session():
        time.sleep(60)  # where this process was slow to see the log, Ray has started by now
except KeyboardInterrupt:
    sys.exit(130)
"""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # which is short, for sockets
        environment = os.environ | {"RAY_TMPDIR": folder}
        starting = subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT_DIR, env=environment)
        log = "ray/session_*/logs/python-core-driver-*.log"  # the first thing that Ray's own part makes
        while starting.poll() is None and not any(Path(folder).glob(log)):
            time.sleep(0.005)
        starting.send_signal(signal.SIGINT)
        assert starting.wait(timeout=50) == 130


CPU, GPUS = {"CPU": 2.0}, {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("nodes", "workers", "gpu", "cores"),
    [
        ([CPU, CPU], 1, False, 2),  # and not 4, which no machine has
        ([CPU, CPU], 2, False, 2),
        ([CPU, CPU], 3, False, 1),
        ([CPU, CPU], 5, False, 0),
        ([{"CPU": 8.0}, CPU], 1, False, 8),
        ([{"CPU": 8.0}, CPU], 3, False, 2),
        ([{"CPU": 7.0}], 2, False, 3),
        ([{}, CPU], 1, False, 2),
        ([{"CPU": 0.5}], 1, False, 0),
        ([{"CPU": 96.0}, {"CPU": 16.0, "GPU": 1.0}], 1, True, 16),
        ([{"CPU": 96.0}, {"CPU": 16.0, "GPU": 1.0}], 2, True, 0),
        ([GPUS], 1, True, 8),  # the GPU's share
        ([GPUS], 8, True, 8),
        ([GPUS, {"CPU": 16.0, "GPU": 1.0}], 1, True, 16),
        ([GPUS, {"CPU": 16.0, "GPU": 1.0}], 9, True, 8),
        ([{"CPU": 4.0, "GPU": 8.0}], 4, True, 1),
    ],
)
def test_a_worker_runs_on_one_machine(nodes: list[dict[str, float]], workers: int, gpu: bool, cores: int) -> None:
    assert max_cores_per_worker(nodes, workers, gpu=gpu) == cores


def nothing_is_reserved() -> bool:
    """Whether every placement group of the connected Ray is removed, within the seconds that it takes Ray."""
    deadline = time.monotonic() + 20
    while any(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_room_is_waited_for_and_none_of_it_is_kept(cluster: str) -> None:
    with ray_session(cluster):
        cores = int(ray.cluster_resources()["CPU"])
        wait_for_resources("work", [{"CPU": cores}])
        assert nothing_is_reserved()
        others = ray.util.placement_group([{"CPU": cores}])
        assert others.wait(60)
        threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            wait_for_resources("work", [{"CPU": 1}])
        threading.Timer(0.5, ray.util.remove_placement_group, [others]).start()
        wait_for_resources("work", [{"CPU": cores}])
        assert nothing_is_reserved()


@pytest.mark.parametrize(
    "command",
    [
        ["train.run", "--steps", "5", "--name", "one"],
        ["tune.search", "--trial-steps", "8", "--memory-limit", "8GB", "--name", "two"],
    ],
)
@pytest.mark.slow
def test_work_that_cannot_be_placed_is_reported_and_ends_on_ctrl_c(
    cluster: str, small_shards: Path, tmp_path: Path, command: list[str]
) -> None:
    """It waited for ever, in silence, and SIGTERM did not end it."""
    flags = ["--model", "tiny", "--global-batch", "4", "--micro-batch", "4", "--device", "cpu", "--address", cluster]
    with ray_session(cluster):
        cores = int(ray.cluster_resources()["CPU"])
        others = ray.util.placement_group([{"CPU": cores}])
        assert others.wait(60)
        waiting = subprocess.Popen(
            [sys.executable, "-m", *command, "--data", str(small_shards), *flags],
            cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert waiting.stderr
        said = next(line for line in waiting.stderr if not line.startswith("... "))
        assert said.startswith(f"Waiting for {cores} CPU for ")
        assert f"The cluster has {socket.gethostname()}: {cores} CPU; free: 0 CPU." in said
        waiting.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        waiting.communicate(timeout=60)
        took = time.monotonic() - asked
        ray.util.remove_placement_group(others)
        assert nothing_is_reserved(), "what has ended still has the cluster's cores"
    assert waiting.returncode == 130
    assert took < 30
    assert not (tmp_path / "runs" / "one").exists(), "its name is free again"
    runs = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    assert {run.info.status for run in runs} == {"KILLED"}


@pytest.mark.parametrize("command", ["train.run", "tune.search"])
@pytest.mark.slow
def test_a_machine_that_an_autoscaler_may_bring_is_waited_for(
    cluster: str, small_shards: Path, tmp_path: Path, command: str
) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", command, "--data", str(small_shards), "--address", cluster, "--accelerator", "A100",
         "--global-batch", "8"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert waiting.stderr
    said = next(line for line in waiting.stderr if not line.startswith("..."))
    assert said.startswith("Waiting for a machine with A100 for --accelerator A100. The cluster has ")
    waiting.send_signal(signal.SIGTERM)
    waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert list(tmp_path.glob("runs/*")) == [], "nothing was made"


@pytest.mark.parametrize("address", [None, pytest.param("a cluster", marks=pytest.mark.slow)])
def test_a_long_step_ends_on_ctrl_c(
    address: str | None, request: pytest.FixtureRequest, small_shards: Path, tmp_path: Path
) -> None:
    program = (
        "from infra.cli.interrupts import interrupts; interrupts.stop_timeout_seconds = 1\n"
        "from train.run import main; main()"
    )
    where = ["--address", request.getfixturevalue("cluster")] if address else []
    flags = ["--model", "gpt2-124m", "--global-batch", "40", "--micro-batch", "1", "--device", "cpu"]
    slow = subprocess.Popen(
        [sys.executable, "-c", program, "--data", str(small_shards), "--name", "one", *where, *flags],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    locked = tmp_path / "runs/one/lock"  # by the worker, once it has begun
    while slow.poll() is None and not locked.exists():
        time.sleep(0.05)
    time.sleep(5)  # its first step takes minutes
    slow.send_signal(signal.SIGTERM)
    _, said = slow.communicate(timeout=60)
    assert slow.returncode == 130
    assert "within 1 s" in said


def test_our_code_and_the_users_travel_to_other_machines(tmp_path: Path) -> None:
    """Which have what they depend on, and neither our source nor the user's."""
    mine = tmp_path / "mine.py"
    environment = _runtime_env({"PYTHONPATH": "there"}, [str(mine)])
    assert environment["env_vars"] == {"PYTHONPATH": "there"}
    ours = [str(PROJECT_DIR / package) for package in ("infra", "pipeline", "train", "tune")]
    assert sorted(environment["py_modules"]) == sorted([*ours, str(mine)])
