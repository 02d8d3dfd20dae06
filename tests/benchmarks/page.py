"""How long does MLflow's page of a long run take to open in Chromium, with the store in SQLite?

    python -P tests/benchmarks/page.py [--steps 100000] [--rounds 5] [--record FILE.json] [--note TEXT]

The run is written as the trainer writes it: thinned losses, the metrics of every cycle of 200 steps, telemetry and a
result. Each round opens three pages in a browser with an empty cache, and then again: the run's description, its
charts (until the first is drawn), and the experiment's view Curves. Seconds are from the address to the pixels.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from infra.device.downsampling import sampling_interval
from infra.device.telemetry import POINTS_PER_INTERVAL
from infra.storage.files import write_json
from infra.tracking.run_ref import RunRef
from infra.tracking.saved_views import VIEW_KEY
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from train.reporting.tracking import cycle_metrics

PATIENCE = 600_000
"""Milliseconds for a page."""

TELEMETRY = [f"system/reading_{number}" for number in range(12)]
"""As many metrics as a GPU and its machine have."""


def main() -> None:
    """Write the run, open its pages, and record the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--note", default="", help="what else the machine did, for the record")
    options = parser.parse_args()
    record_file = options.record and options.record.resolve()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("needs Chromium: apt-get install chromium")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        key, points = write_run(f"sqlite:///{place}/mlflow.db", options.steps)
        with served(Path(place)) as server, sync_playwright() as playwright:
            quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update"]
            root = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=chromium, args=quiet + root, timeout=PATIENCE)
            for number in range(options.rounds):
                for row in opened(browser, server, key):
                    rows.append({"round": number, "load": round(os.getloadavg()[0], 2)} | row)
                    print(json.dumps(rows[-1]), flush=True)
        os.chdir("/")
    names = dict.fromkeys((row["page"], row["cache"]) for row in rows)
    medians = {
        f"{page}, {cache}": median(row["seconds"] for row in rows if (row["page"], row["cache"]) == (page, cache))
        for page, cache in names
    }
    record = {
        "command": "python -P tests/benchmarks/page.py", "steps": options.steps, "points": points,
        "python": platform.python_version(), "mlflow": version("mlflow"), "machine": {"cores": os.cpu_count()},
        "note": options.note, "median_seconds": medians, "rows": rows,
    }  # fmt: skip
    print(json.dumps(medians, indent=1))
    if record_file:
        write_json(record_file, record)


def write_run(store: str, steps: int) -> tuple[RunRef, int]:
    """A run of ``steps`` steps, one each second, in a new store, and the number of its points."""
    key = create_run("train", "long", tracking_uri=store, tags={"kind": "run"})
    points, length = 0, 200
    with Tracker(key) as tracker:

        def write(values: dict[str, float | None], step: int) -> int:
            tracker.log_metrics(values, step)
            return len(values)

        for step in range(length, steps + 1, length):
            cycle = {
                "step": step, "step_losses": [11 - number / steps for number in range(step - length, step)],
                "train_loss": 11 - step / steps, "val_loss": 11 - step / steps, "cycle_tokens": 1,
                "cycle_seconds": length,
                "train_tokens": step * 1024, "books_seen": step // 100, "elapsed": step, "train_seconds": 1,
                "data_wait_seconds": 0, "optimizer_seconds": 0, "learning_rate": 6e-4, "gradient_norm": 1,
                "val_bits_per_byte": 2 - step / steps,
            }  # fmt: skip
            points += sum(write(values, position) for position, values in cycle_metrics(cycle))
        second = 0
        while (second := second + sampling_interval(second, POINTS_PER_INTERVAL)) <= steps:
            points += write(dict.fromkeys(TELEMETRY, float(second % 100)), second)
        tracker.log_metrics({"result/tokens_per_second": 1024.0})
        tracker.set_tags({"outcome": "finished", "tokens/s": "1,024 (1,020 to 1,030)"})
        tracker.set_description("**What:** a long run  \n**Speed:** 1,024 tokens/s")
    return key, points


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of an MLflow server on the store in ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
    ]  # fmt: skip
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def opened(browser: Browser, server: str, key: RunRef) -> Iterator[dict[str, Any]]:
    """The seconds that each page takes with an empty cache, and with what the first visit has left in it."""
    runs = f"{server}/#/experiments/{key.experiment_id}/runs"
    pages = {
        "description": (f"{runs}/{key.run_id}?workflowType=machine_learning", "text=a long run"),
        "charts": (f"{runs}/{key.run_id}/model-metrics?workflowType=machine_learning", ".js-plotly-plot .trace"),
        "Curves": (
            f"{runs}?workflowType=machine_learning&viewStateShareKey={VIEW_KEY}-curves&compareRunsMode=CHART",
            ".js-plotly-plot .trace",
        ),
    }
    for name, (address, awaited) in pages.items():
        context = browser.new_context(viewport={"width": 1920, "height": 1080})
        context.set_default_timeout(PATIENCE)
        for cache in ("empty cache", "again"):
            page = context.new_page()
            yield {"page": name, "cache": cache, "seconds": round(seconds_until(page, address, awaited), 2)}
            page.close()
        context.close()


def seconds_until(page: Page, address: str, awaited: str) -> float:
    """From the address to the first element that ``awaited`` selects."""
    began = time.perf_counter()
    page.goto(address)
    page.locator(awaited).first.wait_for(state="visible")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
