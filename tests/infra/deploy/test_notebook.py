"""The notebook for a hosted GPU runs from top to bottom, here on the CPU with a tiny model, and shows what it found."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "infra" / "deploy" / "notebook" / "a100.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

MODEL = "--model tiny,layers=1,width=32,context_length=64"
TINY = {
    "--suite a100 --time-budget 20s": f"--suite a100 --rungs 'no synchronization' --steps 8 --cycle 8+1 {MODEL}",
    "--global-batch 480 --memory-limit 40GB --compile whole": f"{MODEL} --global-batch 1 --memory-limit 4GB "
    "--trial-steps 8 --confirm-rounds 0",
    "--time-budget 5m": "--steps 8 --cycle 4+1",
    "--tokens 60": "--tokens 5",
}
"""What the notebook's commands are given here in place of what a GPU is."""

HOSTED = """
def eval_js(script):
    assert script == "google.colab.kernel.proxyPort({port})"
    return "http://proxy.test:{port}/"
"""
"""A stand-in for the module by which a hosted notebook says at which address its user reaches a port."""


def code(notebook: Any, *changes: tuple[str, str]) -> list[Any]:
    """The notebook's cells with code, each change made at the one place where it applies."""
    for old, new in changes:
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        cell.source = cell.source.replace(old, new)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


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


@pytest.mark.timeout(1800)  # ten whole commands
@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, empty_store: Path, cluster: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "google" / "colab").mkdir(parents=True)
    (tmp_path / "google" / "colab" / "output.py").write_text(HOSTED.format(port=free_port))
    shutil.copy(empty_store, tmp_path)  # creating one takes seconds
    paths = [str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    settings = ('FOLDER = "~/throughline"', f"FOLDER = {str(tmp_path)!r}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = code(notebook, settings, ("PORT = 5000", f"PORT = {free_port}"), *TINY.items())
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
    the_next_runtime_continues(settings)
    assert json.loads((tmp_path / "runs" / "run" / "result.json").read_text())["steps"] == 12


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
    code(notebook, settings, (f"# {command}", f"{command} --steps 12"))
    (last,) = [number for number, cell in enumerate(notebook.cells) if command in cell.source]
    notebook.cells = notebook.cells[: last + 1]
    nbclient.NotebookClient(notebook, timeout=900).execute()
