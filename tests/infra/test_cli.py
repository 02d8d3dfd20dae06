"""The console script runs every command, also where ``python -m`` would run a file of the current folder."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infra import cli
from infra.help import flags_of

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_with_its_options(name: str) -> None:
    module, options, _ = cli.COMMANDS[name]
    assert importlib.util.find_spec(module) is not None
    defined, _, kind = options.partition(":")
    assert all(flag.text for flag in flags_of(getattr(importlib.import_module(defined), kind))), "each is described"


def test_a_command_runs_in_a_folder_that_holds_a_train_py(script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('another train.py')")
    shown = throughline(script, "run", "--help", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: throughline run ")
    refused = throughline(script, "run", "--micro-batch", "0", folder=tmp_path)
    assert refused.returncode == 2
    assert "micro-batch" in refused.stderr
    assert "another train.py" not in refused.stderr


def test_help_lists_all_commands_and_imports_none(script: Path, tmp_path: Path) -> None:
    shown = throughline(script, "--help", folder=tmp_path)
    assert shown.returncode == 0
    assert all(f"  {name} " in shown.stdout for name in cli.COMMANDS)
    loaded = (
        "import sys, infra.cli; print([m for m in sys.modules if m in ('tyro', 'rich', 'torch', 'ray', 'pydantic')])"
    )
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout == "[]\n", found.stderr


def test_an_unknown_command_is_refused_in_one_sentence(script: Path, tmp_path: Path) -> None:
    refused = throughline(script, "trane", folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: throughline has no command trane: 'throughline --help' lists them.\n"


def test_bash_completes_commands_flags_and_values(script: Path, tmp_path: Path) -> None:
    completion = tmp_path / "new folder" / "completion"
    assert cli.write_completion([cli.COMPLETION, "bash", str(completion)]) == 0
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

    assert set(cli.COMMANDS) <= set(complete(""))
    assert complete("run", "--micro") == ["--micro-batch"]
    assert complete("ladder", "--sui") == ["--suite"]  # described in several lines
    assert complete("run", "--device", "") == ["auto", "cuda", "cpu"]


def test_zsh_gets_a_completion_too_and_an_unknown_shell_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.write_completion([cli.COMPLETION, "zsh", str(tmp_path / "_throughline")]) == 0
    written = (tmp_path / "_throughline").read_text()
    assert written.startswith("#compdef throughline\n")
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", str(tmp_path / "_throughline")], check=True)
    assert cli.write_completion([cli.COMPLETION, "tash", "-"]) == 2
    assert "bash, zsh" in capsys.readouterr().err
    assert cli.write_completion([cli.COMPLETION, "zsh", str(tmp_path)]) == 2
    assert "cannot be written (Is a directory)" in capsys.readouterr().err
