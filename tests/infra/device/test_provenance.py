"""A result says how it was made: with which command line, by which code, and on which machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.device import provenance
from infra.device.gpu import GpuState

ROOT = Path(__file__).resolve().parents[3]

WORK = """
import json, sys
from infra.cli import command
from infra.device import provenance
command.program = sys.argv.pop(1)
print(json.dumps(provenance.collect()))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with this package and a command of its own, which is no git checkout yet."""
    shutil.copytree(ROOT / "infra", tmp_path / "infra", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


def collected(folder: Path, *words: str) -> dict[str, str]:
    """What ``python`` with these words records in ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, cwd=folder, env=environment
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "command", "name"),
    [
        (["-m", "work", ""], "python -m work --data 'my books'", "work"),
        (["work.py", ""], "python -P work.py --data 'my books'", "work.py"),
        (["work.py", "throughline run"], "throughline run --data 'my books'", "work.py"),
    ],
    ids=["a module", "a file", "the console script"],
)
def test_the_command_can_be_repeated(checkout: Path, words: list[str], command: str, name: str) -> None:
    tags = collected(checkout, *words, "--data", "my books")
    assert (tags["command"], tags["program"]) == (command, name)
    assert {"python", "user", "host", "platform", "version.torch", "version.ray"} <= tags.keys()
    assert "commit" not in tags


def commit_all(folder: Path) -> str:
    """Make ``folder`` a repository with a commit of all its files, whose hash is returned."""
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "--allow-empty", "-m", "All"]):
        subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me@example.org", *words], cwd=folder, check=True)
    return (folder / ".git" / "logs" / "HEAD").read_text().split()[1]


def test_the_commit_is_known_and_whether_files_differ_from_it(checkout: Path) -> None:
    made = commit_all(checkout)
    clean = collected(checkout, "-m", "work", "")
    assert (clean["commit"], clean["commit_is_dirty"]) == (made, "false")
    (checkout / "notes").write_text("not committed")
    changed = collected(checkout, "-m", "work", "")
    assert (changed["commit"], changed["commit_is_dirty"]) == (made, "true")


@pytest.mark.parametrize("folder", [".venv/lib/site-packages", "."], ids=["an environment", "its own folder"])
def test_the_commit_of_a_repository_into_which_the_package_is_installed_is_not_recorded(
    checkout: Path, folder: str
) -> None:
    repository = checkout / "theirs"
    repository.mkdir()
    commit_all(repository)
    installed = repository / folder
    installed.mkdir(parents=True, exist_ok=True)
    for name in ("infra", "work.py"):
        (checkout / name).rename(installed / name)
    assert "commit" not in collected(installed, "-m", "work", "")


def test_the_repository_whose_hook_runs_a_command_is_not_taken_for_this_projects(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = commit_all(checkout), tmp_path_factory.mktemp("theirs")
    commit_all(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert collected(checkout, "-m", "work", "")["commit"] == own


@pytest.mark.parametrize(("limit", "said"), [(699.5, "699.5"), (700.0, "700"), (None, None)])
def test_a_gpu_is_recorded_with_its_limit(limit: float | None, said: str | None) -> None:
    state = GpuState("H200", "570", 140 * 10**9, 0, None, (), 1980, limit, 40, 0)
    tags = provenance.describe_machine(lambda: state)
    assert (tags["gpu"], tags["driver"], tags.get("gpu_power_limit_watts")) == ("H200", "570", said)


def test_a_run_has_one_tag_for_all_of_it() -> None:
    """Each tag takes space above the run's description; MLflow itself shows the program and the commit."""
    tags = provenance.collect_tags()
    values = json.loads(tags.pop("provenance"))
    assert values == provenance.collect()
    assert tags.pop("mlflow.source.name") == values["program"]
    assert tags == ({"mlflow.source.git.commit": values["commit"]} if "commit" in values else {})


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under any id."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 77)
    assert provenance.find_user_name() == str(2**31 - 77)
