"""The main job as a new user runs it, and every command of the guides, on the sample corpus.

One folder: the demo first, then each ``sh`` block of the README and of each package's, in that order. Blocks marked
``sh gpu`` need a CUDA device and are checked for it by the marker.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pipeline.shards import read_manifest
from tune.suite.catalog import SUITES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "\n".join(
    [README]
    + [(ROOT / package / "README.md").read_text(encoding="utf-8") for package in ("pipeline", "train", "tune", "infra")]
)
"""The README and the guide of each package, in the order in which a new user needs them."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    page for folder in ("pipeline", "train", "tune", "infra", "tests") for page in (ROOT / folder).rglob("*.md")
]
"""Every page of the documentation."""
pytestmark = [
    pytest.mark.timeout(1800),  # a test here is a dozen whole commands
    pytest.mark.any_device,  # the demo trains on what there is; the other commands' GPU is hidden below
]

RUN_BY_OTHERS = ("make test", "make install", "make demo", "mlflow ui")
"""Commands that a test cannot run from inside: itself, what it stands on, and a server that never ends."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""For the commands after the demo: what is expected of them is what a CPU computes."""
LADDER = "python -m tune.ladder"
"""Is interrupted, in a test of its own."""


def commands(marker: str) -> list[str]:
    """The guides' commands in blocks opened by three backticks and ``marker``, continued lines joined."""
    blocks = re.findall(rf"^```{marker}\n(.*?)^```", GUIDES, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    command_lines = [line.partition("  #")[0].strip() for line in lines]
    return [line for line in command_lines if line and not line.startswith(("#", *RUN_BY_OTHERS))]


CANARY = "canary-6f1d2c"
SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_CONNECTION_STRING", "DATABRICKS_TOKEN", "GITHUB_TOKEN", "GOOGLE_API_KEY", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "KAGGLE_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "OPENAI_API_KEY",
    "PGPASSWORD", "REDIS_PASSWORD", "SECRET_OF_MY_OWN", "SLACK_WEBHOOK_URL", "WANDB_API_KEY",
)  # fmt: skip
"""Variables that hold credentials on the machines of our users; every command here runs with all of them set."""

printed: list[str] = []
"""What the commands have printed."""


def environment(**more: str) -> dict[str, str]:
    """This environment with its programs first on the path, planted secrets, and ``more``."""
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return os.environ | path | {name: f"{CANARY}-{number}" for number, name in enumerate(SECRETS)} | more


def run(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command line in ``folder``."""
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment(**more), capture_output=True, text=True, check=False
    )
    printed.extend((done.stdout, done.stderr))
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``make demo`` has run, with a few books for the how-to commands."""
    folder = tmp_path_factory.mktemp("demo")
    run(f"make --directory {ROOT} demo DEMO={folder}", folder)
    books = folder / "books"
    books.mkdir()
    for number in range(5):
        chapters = (
            f"Chapter {i} of book {number}. It was a day like any other, said the {i}th man.\n" for i in range(400)
        )
        (books / f"book {number}.txt").write_text("".join(chapters), encoding="utf-8")
    for name, source in re.findall(r"^```python (\S+)\n(.*?)^```", GUIDES, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(source, encoding="utf-8")
    return folder


def test_the_demo_leaves_shards_a_run_and_a_search(demo: Path) -> None:
    manifest = read_manifest(demo / "data/tokens")
    assert manifest.splits["train"]["books"] + manifest.splits["val"]["books"] == 66
    result = json.loads((demo / "runs/demo/result.json").read_text())
    assert result["outcome"] == "finished"
    first, *_, last = [json.loads(line) for line in (demo / "runs/demo/cycles.jsonl").read_text().splitlines()]
    assert last["train_loss"] < first["train_loss"] - 0.5
    assert 2 < last["val_bits_per_byte"] < 8, "what vocabularies are compared by"
    assert last["val_bits_per_byte"] == pytest.approx(result["val_bits_per_byte"])
    best = json.loads((demo / "runs/demo-search/best.json").read_text())
    assert best["config"]["micro_batch"] * best["config"]["workers"] <= best["config"]["global_batch"]
    assert (demo / "runs/demo-search/trials.csv").read_text().count("\n") > 2


def test_mlflow_holds_the_demo(demo: Path) -> None:
    client = MlflowClient(f"sqlite:///{demo / 'mlflow.db'}")
    names = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
    assert {"pipeline", "train", "tune"} <= set(names)
    fingerprint = read_manifest(demo / "data/tokens").fingerprint
    (made,) = client.search_runs([names["pipeline"]])
    trained = next(run for run in client.search_runs([names["train"]]) if run.info.run_name == "demo")
    for run_ in (made, trained):
        assert run_.info.status == "FINISHED"
        assert run_.inputs is not None
        assert fingerprint.startswith(run_.inputs.dataset_inputs[0].dataset.digest)
        assert run_.data.tags["mlflow.note.content"]
        assert "version.ray" in json.loads(run_.data.tags["provenance"])
    searched = client.search_runs([names["tune"]])
    parents = [run for run in searched if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in searched if "mlflow.parentRunId" in run.data.tags]
    assert len(parents) == 1
    trials = (demo / "runs/demo-search/trials.csv").read_text().splitlines()[1:]
    assert len(children) == len(trials) >= 2, "a trial, a row and a child; both ends of the range are always tried"
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parents[0].info.run_id}
    assert all(run.info.status != "RUNNING" for run in searched)


@pytest.fixture(scope="module")
def used(demo: Path) -> Path:
    """The demo's folder after every command of the guides but the ladder."""
    wanted = [command for command in commands("sh") if not command.startswith(LADDER)]
    assert len(wanted) > 15, "the commands of the guides were not found"
    for command in wanted:
        run(command, demo, **NO_GPU)
    return demo


@pytest.mark.slow
def test_every_command_of_the_guides_works(used: Path) -> None:
    assert read_manifest(used / "data/books").splits["train"]["books"] >= 4
    outcomes = {name: json.loads((used / "runs" / name / "result.json").read_text()) for name in ("first", "best")}
    assert {result["outcome"] for result in outcomes.values()} == {"finished"}
    assert outcomes["first"]["steps"] == 12
    assert json.loads((used / "runs/streamed/stream.json").read_text())["books"] >= 4
    assert (used / "exported/model.safetensors").is_file()


@pytest.mark.slow
def test_no_secret_of_the_environment_is_kept_or_printed(used: Path) -> None:
    """Credentials reach the libraries that need them, and nothing else: not runs, reports, tables or links."""
    files = [path for path in used.rglob("*") if path.is_file()]
    assert len(files) > 100
    assert any(path.name == "mlflow.db" for path in files)
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert len(printed) > 20
    assert not any(CANARY in text for text in printed)


@pytest.mark.slow
def test_the_python_of_the_guides_works(used: Path) -> None:
    """All blocks in one program: later ones use what earlier ones have made."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDES, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=used, env=environment(**NO_GPU), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = read_manifest(used / "data/notebook")
    assert f"{manifest.splits['train']['tokens']} {manifest.fingerprint}" in done.stdout
    result = json.loads((used / "runs/notebook/result.json").read_text())
    assert f"\n{result['train_loss']} Throughput(" in done.stdout
    assert "stopped by the callback StopAtLoss\n" in done.stdout
    best = json.loads((used / "runs/from-python/best.json").read_text())["config"]
    micro, accumulation = best["micro_batch"], best["global_batch"] // best["micro_batch"]
    assert f"\n{micro} {accumulation}\n" in done.stdout
    assert "\ntorch.Size([4, 128]) torch.int64\n" in done.stdout, "four windows of the model tiny"
    assert int(done.stdout.splitlines()[-1]) > 10**8, "bytes that a process with PyTorch needs at least"


@pytest.mark.slow
def test_the_ladder_of_the_guides_is_interrupted_and_resumed(used: Path) -> None:
    (line,) = [command for command in commands("sh") if command.startswith(LADDER)]
    ladder = used / "runs/ladder"
    started = subprocess.Popen(
        shlex.split(line), cwd=used, env=environment(**NO_GPU), stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not list(ladder.glob("trials/control-00-*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)  # the next run is in MLflow
    started.send_signal(signal.SIGINT)
    printed, _ = started.communicate(timeout=120)
    assert started.returncode == 130, printed
    assert "--resume ladder" in printed

    printed = run(f"{LADDER} --resume ladder", used, **NO_GPU).stdout
    assert "1 finished trial\n" in printed
    record = json.loads((ladder / "rungs.json").read_text())
    base, accumulation, cores = record["rows"]
    assert "GPU" in cores["reason"]
    assert base["speed"] > 0
    assert accumulation["speed_low"] <= accumulation["speed"] <= accumulation["speed_high"]
    assert accumulation["total"]["low"] < accumulation["total"]["ratio"] < accumulation["total"]["high"]
    assert accumulation["loss"] == pytest.approx(base["loss"], abs=1e-4), "accumulation keeps the mathematics"
    assert record["device"] == "cpu"
    assert base["mfu"] is None
    assert all((ladder / name).stat().st_size > 5000 for name in ("speed.png", "loss.png"))

    client = MlflowClient(f"sqlite:///{used / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "ladder"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "ladder"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.data.tags["stage"] for run in children) == ["baseline", "baseline", "rung"]
    assert {run.info.status for run in runs} == {"FINISHED"}, "the interrupted rung's too, which was opened again"
    assert {f.path for f in client.list_artifacts(parent.info.run_id)} >= {"speed.png", "loss.png", "summary.md"}

    printed = run(f"{LADDER} --resume ladder --compare ladder", used, **NO_GPU).stdout
    assert "3 finished trials" in printed


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(10800)  # each of two ladders is 31 runs of 20 seconds and their starts, half of them compiled anew
def test_every_gpu_command_of_the_guides_works(demo: Path) -> None:
    for command in commands("sh gpu"):
        run(command, demo)


COMMANDS = (
    "pipeline.tokenize", "pipeline.inspect", "pipeline.vocabulary", "train.run", "train.plan", "train.profile",
    "train.generate", "train.export", "tune.search", "tune.ladder", "infra.doctor",
)  # fmt: skip


def test_the_readme_names_every_command() -> None:
    table = set(re.findall(r"^\| `python -m (\S+)` \|", README, re.MULTILINE))
    assert table == set(COMMANDS)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_what_the_documentation_links_to_exists(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\((?!https?://)([^)]+)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


HELPS = f"""
import runpy, sys
for module in {COMMANDS}:
    print("\\f", end="")
    try:
        sys.argv = [module, "--help"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        assert not leaving.code, module
assert not {{"torch", "ray", "mlflow"}} & set(sys.modules)
"""


def test_help_explains_every_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELPS], env=environment(COLUMNS="200"), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for module, shown in zip(COMMANDS, done.stdout.split("\f")[1:], strict=True):
        assert f"python -m {module}" in shown
        flags = re.split(r"^. (?=-)", shown, flags=re.MULTILINE)[1:]
        assert len(flags) > 3
        for flag in flags:
            name, _, text = re.sub(r"\((default: .*|required)\)", "", flag).partition("  ")
            assert len(re.findall(r"[A-Za-z]{2,}", text)) >= 3, flag
            choices = re.findall(r"[\w-]+", "".join(re.findall("{([^}]+,[^}]+)}", name)))
            assert "--device" in name or all(f"- {choice}: " in text for choice in choices), flag
        if module == "tune.ladder":
            suites = shown[shown.index("--suite") : shown.index("--rungs")]
            assert set(re.findall(r" - (\w+): ", suites)) == set(SUITES)
