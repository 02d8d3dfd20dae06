"""The notebook for a hosted GPU runs from top to bottom, here on the CPU with a tiny model, and shows what it found."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from infra.cli.flags import parse_flags
from train.config import ResolvedConfig
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.roofline import REACHED_FRACTION_RANGE, roofline_speed
from train.reporting.charts import draw_curves
from train.run import RunOptions
from train.run_files.run_folder import RunFolder

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "infra" / "deploy" / "notebook" / "a100.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

TINY = {
    'MODEL = ""': 'MODEL = "tiny,layers=1,width=32,context_length=64"',
    "GLOBAL_BATCH = 480": "GLOBAL_BATCH = 1",
    'MEMORY_LIMIT = "40GB"': 'MEMORY_LIMIT = "4GB"',
    'RUNGS = ""': "RUNGS = \"'no synchronization'\"",
    'TRIAL_TIME = "60s"': 'TRIAL_TIME = "5s"',
    'TRAINING_TIME = "5m"': 'TRAINING_TIME = "8s"',
    'CYCLE = "20+2"': 'CYCLE = "4+1"',
}
"""What is filled in for this machine, in the form alone."""

HOSTED = r"""
import re

def eval_js(script):
    return "http://proxy.test:" + re.fullmatch(r"google.colab.kernel.proxyPort\((\d+)\)", script)[1] + "/"
"""
"""A stand-in for the module by which a hosted notebook says at which address its user reaches a port."""


def code(notebook: Any, *changes: tuple[str, str]) -> list[Any]:
    """The notebook's cells with code, each change made at the one place where it applies."""
    for old, new in changes:
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        cell.source = cell.source.replace(old, new)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_form_is_all_that_a_machine_changes() -> None:
    form = code(nbformat.read(NOTEBOOK, as_version=4))[0].source
    assert all(form.count(old) == 1 for old in TINY)


def test_the_notebook_is_valid_and_without_magic() -> None:
    """Python alone, so that any version of IPython runs it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in code(notebook):
        assert not cell.outputs
        ast.parse(cell.source)


def test_output_is_shown_while_a_command_runs_and_a_failure_ends_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):  # which the cell sets
        monkeypatch.setenv(name, "")
    (cell,) = [cell for cell in code(nbformat.read(NOTEBOOK, as_version=4)) if "def run(" in cell.source]
    shown: list[str] = []

    def show(text: str, end: str) -> None:
        shown.append(text)
        if text == "begun\n":
            (tmp_path / "seen").touch()
            raise KeyboardInterrupt

    names: dict[str, Any] = {"print": show}
    exec(cell.source, names)  # noqa: S102
    names["run"](f"echo begun; until [ -e {tmp_path}/seen ]; do sleep 0.1; done; echo saved >&2")
    assert shown == ["begun\n", "saved\n"]
    with pytest.raises(subprocess.CalledProcessError, match="3"):
        names["run"]("exit 3")


def test_a_training_at_an_a100s_speed_has_lines_and_a_picture(
    tmp_path: Path, command_line: Callable[..., AbstractContextManager[None]]
) -> None:
    """At the slow end of the predicted range; the last cell of the training shows the picture."""
    cells = code(nbformat.read(NOTEBOOK, as_version=4))
    settings: dict[str, Any] = {}
    exec(cells[0].source, settings)  # noqa: S102
    (cell,) = [cell for cell in cells if "train.run --config" in cell.source]
    commands: list[str] = []
    shown = {"run": commands.append, "display": lambda picture: None, "Image": lambda filename: None}
    exec(cell.source, settings | shown)  # noqa: S102
    _, _, _, config_flag, _, *flags = shlex.split(commands[0])
    with command_line(*flags):
        duration = parse_flags(RunOptions, "run").training.duration
    config = ResolvedConfig.of(
        global_batch=settings["GLOBAL_BATCH"], micro_batch=24, device="cuda", precision="bf16", attention="flash",
        compile="whole", loss="plain",
    )  # fmt: skip
    speed = REACHED_FRACTION_RANGE[0] * roofline_speed(
        config.model, config.batch, config.execution, load_gpu_rates("A100")
    )
    assert config_flag == "--config"
    assert duration.time_budget
    steps = int(duration.time_budget * speed / config.step_tokens)
    folder, train_steps = RunFolder(tmp_path), duration.cycle.train_steps
    assert train_steps, "the notebook sets its cycle in steps"
    tokens = train_steps * config.step_tokens
    cycle = {
        "train_loss": 5.0, "step_losses": [5.0] * train_steps, "val_loss": 5.1, "cycle_tokens": tokens,
        "cycle_seconds": tokens / speed,
    }  # fmt: skip
    for step in range(train_steps, steps + 1, train_steps):
        folder.append_cycle(cycle | {"step": step, "train_tokens": step * config.step_tokens})
    assert len(list(folder.cycles_until(steps))) >= 4
    draw_curves(folder, "run", "NVIDIA A100", steps, step_tokens=config.step_tokens)
    assert folder.curves.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(1800)  # ten whole commands
@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, empty_store: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "google" / "colab").mkdir(parents=True)
    (tmp_path / "google" / "colab" / "output.py").write_text(HOSTED)
    shutil.copy(empty_store, tmp_path)  # creating one takes seconds
    paths = [str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    settings = ('FOLDER = "~/throughline"', f"FOLDER = {str(tmp_path)!r}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = code(notebook, settings, *TINY.items())
    client = nbclient.NotebookClient(notebook, timeout=900)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        *_, table, page = [html(cell) for cell in cells]
        assert all(f"<td>{kind}</td>" in table for kind in ("trial", "run"))
        numbers = re.findall(r"<td>([\d.]+|NaN)</td>", table)
        assert len(numbers) >= 2 * 4  # two rungs or more, a trial and a run
        assert all(float(number) > 0 for number in numbers)
        if CHROMIUM:
            the_frame_shows_the_leaderboard(page)
    pictures = [cell for cell in cells if "image/png" in str(cell.outputs)]
    assert len(pictures) == 3
    assert "\x1b" not in str([cell.outputs for cell in cells])
    result = tmp_path / "runs" / "run" / "result.json"
    steps = json.loads(result.read_text())["steps"]
    the_next_runtime_continues(settings)
    assert json.loads(result.read_text())["steps"] > steps


def html(cell: Any) -> str:
    """What a cell displays, as a browser gets it."""
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


def the_frame_shows_the_leaderboard(frame: str) -> None:
    """MLflow's page in a page of another origin, at the address of the stand-in for a proxy."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        args = ["--disable-gpu", "--host-resolver-rules=MAP *.test 127.0.0.1"]
        args += ["--disable-features=LocalNetworkAccessChecks"]  # a real proxy is not on this machine
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*args, *(["--no-sandbox"] if os.geteuid() == 0 else [])], timeout=120_000
        )
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.route("http://notebook.test/", lambda route: route.fulfill(body=frame, content_type="text/html"))
        page.goto("http://notebook.test/")
        cell = page.frame_locator("iframe").get_by_role("gridcell").filter(has_text="winner")
        expect(cell.first).to_be_visible(timeout=120_000)
        browser.close()


def the_next_runtime_continues(settings: tuple[str, str]) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    command = 'run("python -m train.run --resume run'
    code(notebook, settings, (f"# {command}", f"{command} --time-budget 12s"))
    (last,) = [number for number, cell in enumerate(notebook.cells) if command in cell.source]
    notebook.cells = notebook.cells[: last + 1]
    nbclient.NotebookClient(notebook, timeout=900).execute()
