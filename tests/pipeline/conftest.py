"""What the pipeline's tests share: a Ray that is started once, and books that a test can write."""

import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WORDS = """the of and a to in he was that his it with as had for on at by not she from her but which you they were
    all harbour lantern whale winter morning captain letter garden window road mountain river evening""".split()  # noqa: SIM905


def _prose(seed: int, words: int = 3000) -> str:
    """Reproducible text that passes every filter: sentences in paragraphs, with a number of its own."""
    chance = random.Random(seed)
    paragraphs = []
    for _ in range(max(1, words // 100)):
        chosen = [chance.choice(WORDS) + ("," if chance.random() < 0.1 else "") for _ in range(98)]
        paragraphs.append(f"Number {seed} {' '.join(chosen)}.")
    return "\n\n".join(paragraphs) + "\n"


def _write_books(folder: Path, count: int, words: int = 3000) -> Path:
    """``count`` text files with different prose."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"book {number:04d}.txt").write_text(_prose(number, words), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prose() -> Callable[..., str]:
    """``prose(seed, words=3000)``."""
    return _prose


@pytest.fixture(scope="session")
def write_books() -> Callable[..., Path]:
    """``write_books(folder, count, words=3000)``."""
    return _write_books


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a Ray with two CPUs, started once: starting one takes longer than most tests."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield str(cluster.address)
    cluster.shutdown()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow store, created once."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[float], None]]]:
    """A real S3 server on loopback, behind a proxy that refuses a share of the requests: its query, and the setter."""
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

    def set_rate(share: float) -> None:
        rate[0] = share

    yield f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1", set_rate
    server.stop()
