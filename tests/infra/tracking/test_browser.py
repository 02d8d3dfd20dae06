"""MLflow's pages, as a first visitor sees them: in a real browser, with the numbers that the terminal prints.

The window is that of a small laptop, the profile is fresh, and so the panel of MLflow's assistant is open. One store,
which our own code writes, one MLflow server and one browser for all tests; without Ray.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from learning_rows import TRAIN_TIME, final_rows, speed_row
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from trial_rows import trial_row

from infra.device import provenance
from infra.schema import to_json
from infra.storage.files import write_json
from infra.tracking.run_ref import RunRef
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from pipeline.shards import read_manifest
from train.config import ResolvedConfig
from train.model_config import PRESETS
from train.reporting import tracking
from train.reporting.report import run_report
from train.result import CycleReport, Memory, RunResult, Throughput
from train.run_files.run_folder import RunFolder
from tune.config import LadderConfig, SearchConfig
from tune.experiment.search_plan import make_search
from tune.experiment.tracking import TrialRuns, log_result, open_parent
from tune.learning.plan import make_learning_search
from tune.learning.report import publish_learning
from tune.reporting.report import publish
from tune.space import Candidate
from tune.suite.plan import make_ladder
from tune.trial.row import TrialRow

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(900),
]

PATIENCE = 120_000
"""Milliseconds that a page may take: it takes one or two seconds, and far longer beside another test."""

QUIET = ("--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])], timeout=PATIENCE
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A window in which every test opens its page, so that MLflow's scripts are read once.

    Nobody closes the panel of the assistant, which MLflow opens at the first visit.
    """
    context = browser.new_context(viewport={"width": 1366, "height": 768})
    context.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    yield context.new_page()
    context.close()


def cycle(step: int) -> CycleReport:
    return CycleReport(
        step=step, batches=step, train_loss=8.0 - step / 10, val_loss=8.5 - step / 10, train_tokens=step * 128,
        val_tokens=64, books_seen=2, cycle_seconds=2.0, train_seconds=1.5, data_wait_seconds=0.1,
        optimizer_seconds=0.2, elapsed=2.0 * step, cycle_tokens=1280, epoch_seconds=1.0, learning_rate=1e-3,
        gradient_norm=1.0,
        step_losses=[8.0 - number / 10 for number in range(step - 9, step + 1)], val_bits_per_byte=2.5 - step / 100,
    )  # fmt: skip


def result(speed: float) -> RunResult:
    return RunResult(
        outcome="finished", reason="reached 20 steps", steps=20,
        throughput=Throughput(speed, speed - 10, speed + 20, 17, 3), memory=Memory(None, None, 10**9, "rss"),
        train_loss=6.25, val_loss=6.5, train_tokens=2560, val_tokens=64, books_seen=2, train_seconds=40.0,
        first_step_seconds=1.5, data_wait_fraction=0.01, optimizer_fraction=0.09, flops_per_token=2e6,
        flops_formula="PaLM", flops_per_second=2e9, mfu=None, device="cpu", machine="w1", checkpoint=None,
        data_fingerprint="0" * 64, loss_curve=[(10, 7.0, None), (20, 6.25, 6.5)], val_perplexity=665.1,
        val_bits_per_byte=1.5, predicted_memory=9 * 10**8,
    )  # fmt: skip


def trained(name: str, config: ResolvedConfig, speed: float) -> RunRef:
    """A run of two cycles, as its driver records it."""
    key = create_run("train", name, run_dir=f"/home/me/runs/{name}", tags=provenance.collect_tags() | {"kind": "run"})
    home = RunFolder(Path("runs", name))
    home.path.mkdir(parents=True)
    manifest, run = read_manifest(config.dataset.data), result(speed)
    write_json(home.config, config.to_json())
    write_json(home.start, to_json(tracking.RunStart(config.to_json(), manifest.fingerprint, manifest.splits)))
    for step in (10, 20):
        home.append_report(cycle(step))
    write_json(home.result, to_json(run))
    report = run_report(config.step, config.dataset, config.duration, run, home.location, 8 * 10**9)
    tracking.write_summary(home, report, config.dataset, key.store)
    with Tracker(key) as tracker:
        tracking.fill(tracker, home)
    return key


def trial(size: int, speed: float | None, reason: str = "") -> TrialRow:
    return trial_row(
        key=f"m{size}", number=size, stage="probe", round=0, candidate=Candidate(size, ()), accumulation=8 // size,
        outcome="ok" if speed else "failed", reason=reason, seconds=10.0, tokens_per_second=speed,
        low=speed and speed - 10, high=speed and speed + 20, memory=size * 10**9 if speed else None,
        predicted_memory=size * 1.1e9, node="w1",
    )  # fmt: skip


def learned(training: ResolvedConfig, folder: Path) -> RunRef:
    """A search for the lowest loss with two finalists, of which the control is the slower one to learn."""
    config = SearchConfig(
        training=training, objective="loss", train_time=TRAIN_TIME, knobs=("learning_rate=1e-3",), name="learning",
        out=str(folder), memory_limit=10**10,
    )  # fmt: skip
    search = make_learning_search(config)
    search.folder.mkdir()
    parent = open_parent(search)
    control, best = search.space.candidates
    rows = [speed_row(control), *final_rows(control, 2.0), *final_rows(best, 1.7)]
    rows = [
        replace(row, number=number, labels=search.labels(search.space.label(row.candidate)))
        for number, row in enumerate(rows, 1)
    ]
    evidence = TrialRuns(search.record(parent))
    evidence.fill(rows)
    evidence.close()
    with Tracker(parent) as tracker:
        publish_learning(search, rows)
        log_result(tracker, search.folder)
    return parent


@pytest.fixture(scope="module")
def links(
    tmp_path_factory: pytest.TempPathFactory,
    mlflow_server: Callable[[Path, int], AbstractContextManager[object]],
    small_shards: Path,
) -> Iterator[dict[str, str]]:
    """The addresses of the pages that commands print, by what they show, on a server that runs."""
    folder = tmp_path_factory.mktemp("pages")
    config = ResolvedConfig.of(
        data=str(small_shards), model=PRESETS["tiny"], micro_batch=2, global_batch=4, precision="fp32", device="cpu",
        compile="off", loss="plain",
    )  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch, mlflow_server(folder, port):
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        made = create_run("pipeline", "tokens")
        with Tracker(made) as tracker:
            tracker.log_params({"out": "data/books"})
            tracker.log_metrics({"books/kept": 66, "tokens/train": 975165, "throughput/mb_per_second": 81.5})
            tracker.set_tags({"dropped": "2 empty"})
        resolved = ResolvedConfig.from_resolved(config)
        run = trained("first", resolved, 1234.0)
        trained("second", resolved, 1567.0)
        climb = make_ladder(LadderConfig(data=str(small_shards), device="cpu", name="rungs", out=str(folder)))
        climb.folder.mkdir()
        ladder = open_parent(climb)
        rungs = [replace(trial(1, 1100.0), name="baseline"), replace(trial(2, 1650.0), name="compile")]
        evidence = TrialRuns(climb.record(ladder))
        evidence.fill([replace(rung, losses=[7.0, 6.5], step_seconds=[0.5] * 2, step_tokens=256) for rung in rungs])
        evidence.close()
        Tracker(ladder).finish()
        training = config.replace(global_batch=8)
        search = make_search(
            SearchConfig(training=training, name="search", knobs=(), out=str(folder), memory_limit=10**10)
        )
        search.folder.mkdir()
        parent = open_parent(search)
        rows = [trial(1, 900.0), trial(2, 1400.0), trial(4, 1900.0), trial(8, None, "RuntimeError: no kernel")]
        larger = [replace(trial(8, 2500.0), key="m8-1", number=9), replace(trial(8, None), key="m8-2", outcome="oom")]
        rows += larger  # the fastest trial is of a candidate that did not fit when it ran again
        evidence = TrialRuns(search.record(parent))
        evidence.fill(rows)
        evidence.close()
        with Tracker(parent) as tracker:
            publish(search, rows)
            log_result(tracker, search.folder)
        keys = {"data": made, "run": run, "ladder": ladder, "search": parent, "learning": learned(training, folder)}
        children = ("ladder", "search", "learning")
        printed = {name: ui_link(key, children=name in children) for name, key in keys.items()}
        yield printed | {f"{name}'s page": ui_link(keys[name]) for name in ("search", "learning")}


def view(link: str, name: str, *, charts: bool = False) -> str:
    """The address of a view of the experiment of ``link``, as MLflow's menu opens it, and as its chart view does."""
    experiment = link.partition("/runs")[0]
    shown = "&compareRunsMode=CHART" if charts else ""
    return f"{experiment}/runs?workflowType=machine_learning&viewStateShareKey=throughline-{name}{shown}"


LEADERBOARD = (
    "4 x 2",
    "1,900 (95% CI 1,890 to 1,920)",
    "4.00 GB of 10.00 GB",
    "1,400 (95% CI 1,390 to 1,420)",
    "unranked",
)


@pytest.mark.parametrize(
    ("link", "name", "shown"),
    [
        ("search", None, LEADERBOARD),
        ("search", "leaderboard", LEADERBOARD[1:3]),
        ("search", "memory", ("4.00 GB of 10.00 GB", "2.00 GB of 10.00 GB")),
        ("learning", None, ("01 winner", "learning_rate=0.001", "2.601 (2.536 to 2.629)", "unranked")),
        ("learning", "learning", ("learning_rate=0.0006", "1600")),
        ("ladder", None, ("baseline", "compile", "1,650 (95% CI 1,640 to 1,670)", "1,100 (95% CI 1,090 to 1,120)")),
        ("ladder", "curves", ("baseline", "compile")),
        ("run", "runs", ("1,234 (95% CI 1,224 to 1,254)", "1,567 (95% CI 1,557 to 1,587)", "1.00 GB")),
        ("run", "curves", ("1,234 (95% CI 1,224 to 1,254)",)),
        ("run", "vocabularies", ("1,234 (95% CI 1,224 to 1,254)",)),
        ("run", "memory", ("1.00 GB",)),
        ("data", "data", ("66", "975165", "2 empty")),
    ],
)
def test_a_view_shows_the_numbers(
    links: dict[str, str], page: Page, link: str, name: str | None, shown: tuple[str, ...]
) -> None:
    """The links of a search and a ladder, and the views in the menu of each experiment."""
    page.goto(view(links[link], name) if name else links[link])
    for text in shown:
        expect(page.get_by_role("gridcell").filter(has_text=text).first).to_be_visible()


def test_the_winner_of_a_search_is_the_first_row(links: dict[str, str], page: Page) -> None:
    page.goto(links["search"])
    first = page.locator('.ag-center-cols-container [row-index="0"]')
    expect(first).to_contain_text("01 winner")
    expect(first).to_contain_text("1,900 (95% CI 1,890 to 1,920)")
    expect(first).to_be_in_viewport()


@pytest.mark.parametrize(
    ("link", "name", "titles"),
    [
        ("run", "curves", ("loss/train", "loss/val")),  # MLflow renders the others when they are scrolled to.
        ("run", "vocabularies", ("loss/val_bits_per_byte",)),
        ("run", "memory", ("detail/memory/predicted_gb vs. memory/process_gb",)),
        ("ladder", "curves", ("loss/train",)),
        ("search", "memory", ("memory/predicted_gb vs. memory/process_gb",)),
        ("learning", "learning", ("loss/val_by_time",)),
    ],
)
def test_a_view_has_its_charts(links: dict[str, str], page: Page, link: str, name: str, titles: tuple[str]) -> None:
    page.goto(view(links[link], name, charts=True))
    for title in titles:
        expect(page.get_by_text(title, exact=True).first).to_be_visible()
    expect(page.locator(".js-plotly-plot .trace").first).to_be_visible()


def assistant(page: Page) -> Locator:
    return page.get_by_text("MLflow Assistant")


@pytest.mark.parametrize(
    ("link", "columns"),
    [
        ("search", ("rank", "tokens/s", "memory")),
        ("learning", ("rank", "settings", "predicted_loss")),
        ("ladder", ("tokens/s", "memory")),
        ("runs", ("tokens/s", "memory")),
    ],
)
def test_the_columns_that_matter_are_read_without_scrolling(
    links: dict[str, str], page: Page, link: str, columns: tuple[str, ...]
) -> None:
    """Also beside the panel of the assistant, and whole: no text ends in an ellipsis."""
    page.goto(view(links["run"], "runs") if link == "runs" else links[link])
    expect(assistant(page)).to_be_visible()
    row = page.locator('.ag-center-cols-container [row-index="0"]')
    expect(row).to_be_visible()
    table = page.locator(".ag-center-cols-viewport").bounding_box()
    assert table
    for column in columns:
        heading = page.get_by_role("columnheader").filter(has_text=column).first
        box = heading.bounding_box()
        assert box, column
        assert box["x"] + box["width"] <= table["x"] + table["width"] + 1, column
        cell = row.locator(f'[aria-colindex="{heading.get_attribute("aria-colindex")}"]').first
        is_whole = cell.evaluate(
            "cell => [cell, ...cell.querySelectorAll('*')]"
            ".every(part => !part.clientWidth || part.scrollWidth <= part.clientWidth + 1)"
        )
        assert is_whole, (column, cell.inner_text())


def close_assistant(page: Page) -> None:
    """Close the panel as the line before the link says; its text remains in the page, out of sight."""
    expect(assistant(page)).to_be_in_viewport()
    page.get_by_role("button", name="Close", exact=True).last.click()
    expect(assistant(page)).not_to_be_in_viewport()


MEASURED = ("Tokens/s:", "Peak memory:", "Next:")
"""Lines of the description of a run and of a search for the fastest configuration."""


@pytest.mark.parametrize(
    ("link", "shown", "names"),
    [
        (
            "run", ("1,234 (95% CI 1,224 to 1,254)", "1.00 GB of 8.00 GB", "training 6.250, validation 6.500"),
            ("Run:", *MEASURED),
        ),
        (
            "search's page", ("1,900 (95% CI 1,890 to 1,920)", "4.00 GB of 10.00 GB", "x1.357 vs control"),
            ("Search:", *MEASURED),
        ),
        (
            "learning's page",
            ("2.601 (95% CI 2.536 to 2.629)", "nats lower than the control", "learning_rate=0.001"),
            ("Search:", "Loss:", "Gain:", "Next:"),
        ),
    ],
)  # fmt: skip
def test_what_matters_of_a_description_is_legible(
    links: dict[str, str], page: Page, link: str, shown: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """MLflow shows 100 pixels of a description, of which the lower 60 fade to white."""
    page.goto(links[link])
    close_assistant(page)
    for text in shown:
        expect(page.locator("p").get_by_text(text).first).to_be_in_viewport()
    fade = page.get_by_test_id("truncation-gradient").bounding_box()
    assert fade
    for name in names:
        line = page.locator("p strong").filter(has_text=name).first.bounding_box()
        assert line
        assert line["y"] + line["height"] <= fade["y"] + 0.6 * fade["height"], name
    page.evaluate("localStorage.clear()")  # The next test is a first visit again.
    page.goto("about:blank")
