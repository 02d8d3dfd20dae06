"""The console script runs every command, also where ``python -m`` would run a file of the current folder."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infra.cli import main

ROOT = Path(__file__).resolve().parents[3]
COMPLETION = "--tyro-write-completion"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip installs for the entry in pyproject.toml."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["throughline"]
    module, _, function = entry.partition(":")
    path = tmp_path_factory.mktemp("bin") / "throughline"
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return path


def throughline(script: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_a_command_runs_in_a_folder_that_holds_a_train_py(script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('another train.py')")
    shown = throughline(script, "run", "--help", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: throughline run ")
    refused = throughline(script, "run", "--micro-batch", "0", folder=tmp_path)
    assert refused.returncode == 2
    assert "micro-batch" in refused.stderr
    assert "another train.py" not in refused.stderr


HELP = """
import atexit, sys
from infra.cli.main import main
atexit.register(lambda: print(*{"torch", "ray", "mlflow"} & set(sys.modules), file=sys.stderr, end=""))
sys.argv = ["throughline", "--help"]
main()
"""


def test_help_describes_all_commands_and_imports_no_large_library() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert {name for name in main.COMMANDS if re.search(rf"{name} +[A-Z][a-z]+ ", shown.stdout)} == set(main.COMMANDS)


def test_bash_completes_commands_flags_and_values(script: Path, tmp_path: Path) -> None:
    completion = tmp_path / "completion"
    assert throughline(script, COMPLETION, "bash", str(completion), folder=tmp_path).returncode == 0
    ask = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        registered=($(complete -p throughline))
        "${registered[2]}"
        echo "${COMPREPLY[@]}"
    """

    def complete(*words: str) -> list[str]:
        command = ["bash", "-c", ask, "bash", str(completion), "throughline", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert set(main.COMMANDS) <= set(complete(""))
    assert complete("run", "--micro") == ["--micro-batch"], "which is described in several lines"
    assert complete("run", "--device", "") == ["auto", "cuda", "cpu"]


def test_zsh_gets_a_completion_too(script: Path, tmp_path: Path) -> None:
    assert throughline(script, COMPLETION, "zsh", "_throughline", folder=tmp_path).returncode == 0
    assert (tmp_path / "_throughline").read_text().startswith("#compdef throughline\n")
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", str(tmp_path / "_throughline")], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trane"], "trane"), ([COMPLETION, "tash", "completion"], "tash"), ([COMPLETION, "zsh", "."], "write .:"),
        ([COMPLETION, "bash", "none/completion"], "none/completion"), ([COMPLETION, "bash"], COMPLETION),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(script: Path, tmp_path: Path, words: list[str], said: str) -> None:
    refused = throughline(script, *words, folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1
