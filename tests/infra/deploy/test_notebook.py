"""The notebook for a hosted GPU runs from top to bottom, here on the CPU with a tiny model."""

import os
import shutil
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "infra" / "deploy" / "notebook" / "a100.ipynb"

TINY = {
    "INSTALL": "",
    "BOOKS": "sample",
    "MODEL": "tiny,layers=1,width=32,context_length=64",
    "LADDER": "--suite loop --steps 8 --cycle 8+1 --rungs accumulation",
    "SEARCH": "--global-batch 1 --memory-limit 4GB --trial-steps 8 --confirm 0",
}


def test_the_notebook_is_valid() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.timeout(1800)  # five whole commands
@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, empty_store: Path, cluster: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    named = set(TINY) | {"DATA", "OUT"}
    assert all(f"{name}=" in parameters.source for name in named)
    parameters.source += f"\nos.environ.update({TINY!r})"
    (served,) = [cell for cell in notebook.cells if "PORT = 5000" in cell.source]
    served.source = served.source.replace("PORT = 5000", f"PORT = {free_port}")
    shutil.copy(empty_store, tmp_path)  # creating one takes seconds
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = str([cell.get("outputs", []) for cell in notebook.cells])
    assert (tmp_path / "data" / "tokens" / "manifest.json").exists()
    assert "train with it: python -m train.run --config runs/search/best.json" in shown
    for expected in ("image/png", "metrics.result/tokens_per_second", "<iframe"):
        assert expected in shown
