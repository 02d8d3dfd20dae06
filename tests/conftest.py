"""What tests of several packages share: small token shards that train fast on a CPU, and real servers on loopback."""

import builtins
import itertools
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import requests
import torch
from hypothesis import HealthCheck, settings

from infra.storage import object_storage
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest, ShardRow, write_shard
from train.model_config import ModelConfig

os.environ["RAY_AUTH_MODE"] = "token"  # before Ray is imported: what it does for a Ray of its own, but not to join one
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 with the default, 15, a worker starts in minutes beside a busy program

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes says nothing of what it shows

SMALL_VOCAB_SIZE = 257
"""GPT-2's own 50,257 make the head 97% of a small model's work; tests of the loop do without."""


def pytest_configure() -> None:
    """Have what the tests start and interrupt be interrupted, also where the tests run in the background.

    There interrupts are ignored, and what ignores them hands that on.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


VISIBLE, sees_gpu = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available


@pytest.hookimpl(tryfirst=True)  # before any fixture of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the GPU from a test and from what it starts, because it expects a CPU, unless it is marked otherwise."""
    if item.get_closest_marker("gpu") or item.get_closest_marker("any_device"):
        torch.cuda.is_available = sees_gpu
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({} if VISIBLE is None else {"CUDA_VISIBLE_DEVICES": VISIBLE})
    else:
        torch.cuda.is_available = lambda: False  # once CUDA is initialized, the variable has no effect in this process
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def write_small_shards(folder: Path, *, books: int = 12, tokens: int = 4000, seed: int = 0) -> Path:
    """A data set of ``books`` books of repetitive text over 256 ids, in two training shards and one for validation."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(books):
        words = [random.integers(0, 256, 5) for _ in range(20)]
        text = np.concatenate([words[i] for i in random.integers(0, len(words), tokens // 5)])
        stream = np.append(text, SMALL_VOCAB_SIZE - 1).astype(np.uint16)
        rows.append(ShardRow(f"book-{number}", f"Book {number}", None, "en", "made", "0" * 64, len(text), stream))
    shards = [
        write_shard(folder, "train/000000-000.arrow", "train", rows[: books // 2]),
        write_shard(folder, "train/000001-000.arrow", "train", rows[books // 2 : -1]),
        write_shard(folder, "val/000000-000.arrow", "val", rows[-1:]),
    ]
    Manifest.of(shards, config={}, tokenizer_sha256="small", inputs={}, report={}).write(folder)
    return folder


@pytest.fixture(scope="session")
def make_shards() -> Callable[..., Path]:
    """:func:`write_small_shards`, for tests that need other ones."""
    return write_small_shards


@pytest.fixture(scope="session")
def small_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards for :data:`small_model`."""
    return write_small_shards(tmp_path_factory.mktemp("small-shards"))


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """A two-layer model whose step takes milliseconds on a CPU."""
    return ModelConfig(
        layers=2, heads=2, width=32, context_length=32, vocab_size=SMALL_VOCAB_SIZE, padded_vocab_size=320
    )


@pytest.fixture(scope="session")
def distinct() -> Callable[..., Any]:
    """``distinct(kind, **known)``: a dataclass whose numbers and texts all differ, but for the fields that are known.

    So that a field that is not handed on shows, and one in the place of another.
    """
    numbers = itertools.count(1)

    def value(hint: Any, name: str) -> Any:
        if NoneType in get_args(hint):
            hint = get_args(hint)[0]
        arguments = get_args(hint)
        match get_origin(hint) or hint:
            case kind if is_dataclass(kind):
                return made(kind)
            case typing.Literal:
                return arguments[-1]
            case builtins.bool:
                return True
            case builtins.int:
                return next(numbers)
            case builtins.float:
                return next(numbers) / 64
            case builtins.str:
                return f"{name} {next(numbers)}"
            case builtins.dict:
                return {f"{name} {next(numbers)}": value(arguments[1], name)}
            case builtins.list:
                return [value(arguments[0], name), value(arguments[0], name)]
            case _:
                return tuple(value(each, name) for each in arguments if each is not ...)

    def made(kind: Any, **known: Any) -> Any:
        hints = get_type_hints(kind)
        own = {field.name: value(hints[field.name], field.name) for field in fields(kind) if field.name not in known}
        return kind(**own, **known)

    return made


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *words])
        yield


@pytest.fixture(scope="session")
def command_line() -> Callable[..., AbstractContextManager[None]]:
    """``command_line(*words)``: a block in which this process was started with these words."""
    return _command_line


@pytest.fixture(scope="session")
def command() -> Callable[..., int]:
    """``command(main, *flags)``: the exit code of an entry with these flags, in this process."""

    def called(main: Callable[[], object], *flags: str) -> int:
        with _command_line(*flags), pytest.raises(SystemExit) as leaving:
            main()
        return int(leaving.value.code or 0)

    return called


@pytest.fixture
def refused(command: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(main, *flags)``: with what an entry refuses these flags, on one line."""

    def called(main: Callable[[], object], *flags: str) -> str:
        capfd.readouterr()
        code = command(main, *flags)
        said = " ".join(capfd.readouterr().err.replace("│", " ").split())
        assert (code, "Traceback" in said) == (2, False), said
        return said

    return called


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Ray Train leaves handlers behind that call into a Ray which is gone by the next test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def set_scratch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``set_scratch(folder)``: from then on, TMPDIR is this folder, as on a machine of its own."""
    return lambda folder: monkeypatch.setattr("tempfile.tempdir", str(folder))


@pytest.fixture
def interrupt_when() -> Iterator[Callable[[Callable[[], object]], None]]:
    """``interrupt_when(is_due)`` presses Ctrl-C once ``is_due()`` is true, unless the test has ended by then."""
    ended, threads = threading.Event(), list[threading.Thread]()

    def start(is_due: Callable[[], object]) -> None:
        def work() -> None:
            while not is_due():
                if ended.wait(0.05):
                    return
            os.kill(os.getpid(), signal.SIGINT)

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()


@pytest.fixture(autouse=True)
def no_store_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's fluent functions put their store into the environment, where the next test would find it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of an MLflow store, to copy for a test: creating one takes seconds."""
    from infra.tracking.store import open_store

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_store(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray for tests to share whose point is not Ray's own start or end, which cost seconds.

    It has no GPU on any machine: what these tests expect is a CPU's.
    """
    hold = """
import os, sys
from infra.ray.cluster import _RAY_SETTINGS
os.environ.update(_RAY_SETTINGS, RAY_prestart_worker_first_driver="0")
from infra.ray.local_ray import only_needed_processes
import ray  # and not by connected(), whose own Ray is for nobody else to join
with only_needed_processes():
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as head:
        assert head.stdout is not None
        yield head.stdout.readline().strip()


@pytest.fixture(scope="module")
def joined(cluster: str) -> Iterator[str]:
    """The address of the shared Ray, which this process joins once for a module's tests, and so keeps Ray's workers."""
    from infra.ray.cluster import ray_session

    with ray_session(cluster):
        yield cluster


@pytest.fixture
def shared_ray(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this test, and what they start, join the shared Ray."""
    monkeypatch.setenv("RAY_ADDRESS", cluster)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path) -> Path:
    """The current folder: a new one that holds an empty MLflow store, which commands use by themselves."""
    shutil.copy(empty_store, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[float], None]]]:
    """A real S3 server on loopback, behind a proxy that refuses a share of the requests: its query, and the
    setter. It has the bucket ``places``."""
    from moto.server import ThreadedMotoServer

    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    rate = [0.0]
    chance = random.Random(1)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    running = server._server
    assert running
    application = running.app  # the WSGI application that it serves

    def flaky(environ, start_response):
        if chance.random() < rate[0]:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return application(environ, start_response)

    running.app = flaky
    host, port = server.get_host_and_port()
    requests.post(f"http://{host}:{port}/moto-api/reset", timeout=30)  # what it stores belongs to the process
    requests.put(f"http://{host}:{port}/places", timeout=30).raise_for_status()

    def set_rate(share: float) -> None:
        rate[0] = share
        monkeypatch.setattr(
            object_storage, "RETRY_TIMEOUT_SECONDS", 0.0 if share == 1.0 else 240.0
        )  # it would be in vain
        object_storage._open_store.cache_clear()

    yield f"?endpoint=http://{host}:{port}&region=us-east-1", set_rate
    server.stop()


@pytest.fixture
def bucket(s3: tuple[str, Callable[[float], None]]) -> str:
    """The query of the S3 server."""
    return s3[0]


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorageDir:
    """An empty place: a folder, or one in object storage."""
    if request.param == "folder":
        return StorageDir.of(tmp_path / "place")
    return StorageDir.of(f"s3://places/place/{request.getfixturevalue('bucket')}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _mlflow_server(empty_store: Path, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real MLflow server on loopback, in a process group of its own so that all of it can be killed."""
    if not (folder / "server.db").exists():
        shutil.copy(empty_store, folder / "server.db")
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'server.db'}", "--artifacts-destination", str(folder / "files"),
    ]  # fmt: skip
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise TimeoutError("the MLflow server did not start")
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def mlflow_server(empty_store: Path) -> Callable[[Path, int], AbstractContextManager[subprocess.Popen[bytes]]]:
    """``mlflow_server(folder, port)``: a real one while the block runs, with its database in ``folder``."""
    return partial(_mlflow_server, empty_store)


@pytest.fixture
def free_port() -> int:
    """A port on loopback that nobody listens on."""
    return _free_port()
