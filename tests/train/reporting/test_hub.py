"""A model is pushed to a hub as one commit, with the token and to the server that huggingface_hub uses."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TOKEN = "hf_a_secret_of_the_test"  # noqa: S105 no password


class Hub(ThreadingHTTPServer):
    """A small hub on loopback: it creates repositories, and accepts commits of small files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.rejects = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._reply({"error": "Repository not found"}, 404)

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"] or 0))
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.rejects:
            self._reply({"error": "This token cannot write"}, 403)
        elif self.path.endswith("/repos/create"):
            hub.repositories.append(json.loads(body))
            self._reply({"url": f"{hub.address}/me/books"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._reply({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._reply({"commitUrl": f"{hub.address}/me/books/commit/1", "commitOid": "1" * 40, "success": True})
        else:  # It validates the model card.
            self._reply({"errors": [], "warnings": []})

    def _reply(self, value: Any, code: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        yield server


@contextmanager
def running(server: Hub) -> Iterator[Hub]:
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push(folder: Path, endpoint: str, repo: str = "books", **environment: str) -> subprocess.CompletedProcess[str]:
    """Push ``folder`` in a process of its own, because the library reads HF_ENDPOINT when it is imported."""
    code = (
        "import sys; from pathlib import Path; from train.reporting.hub import check_can_push, push\n"
        "check_can_push(sys.argv[2]); print(push(Path(sys.argv[1]), sys.argv[2], is_private=True))"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder.parent / "home"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), repo],
        env=variables | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "README.md").write_text("---\npipeline_tag: text-generation\n---\n\n# A model\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def test_a_pushed_model_is_private_and_complete(hub: Hub, exported: Path) -> None:
    pushed = push(exported, hub.address, HF_TOKEN=TOKEN)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == f"{hub.address}/me/books"
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}
    (repository,) = hub.repositories
    assert repository["name"] == "books"
    assert repository.get("private") or repository.get("visibility") == "private", repository
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in pushed.stdout + pushed.stderr


def test_a_rejected_push_is_one_sentence_without_the_token(hub: Hub, exported: Path) -> None:
    hub.rejects = True
    pushed = push(exported, hub.address, HF_TOKEN=TOKEN)
    message = pushed.stderr.splitlines()[-1]
    assert message.startswith("infra.errors.UserError: --push books: ")
    assert "403" in message
    assert str(exported) in message
    assert TOKEN not in pushed.stdout + pushed.stderr


@pytest.mark.parametrize(
    ("repo", "token", "expected"),
    [("books", "", "HF_TOKEN"), ("no//name", TOKEN, "OWNER/NAME"), ("x" * 200, TOKEN, "OWNER/NAME")],
)
def test_a_push_that_cannot_work_is_refused_before_the_model_is_written(
    exported: Path, repo: str, token: str, expected: str
) -> None:
    refused = push(exported, "http://127.0.0.1:9", repo, **({"HF_TOKEN": token} if token else {}))
    message = refused.stderr.splitlines()[-1]
    assert message.startswith(f"infra.errors.UserError: --push {repo}")
    assert expected in message
