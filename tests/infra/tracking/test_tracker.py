"""Runs reach MLflow in a real store, and a store that goes away neither loses entries nor stops the work."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from infra.errors import UserError
from infra.tracking.orphaned_runs import is_complete
from infra.tracking.send import send
from infra.tracking.store import (
    create_child_run,
    create_run,
    find_children,
    open_store,
    read_logged,
    reopen_run,
    run_exists,
    store_uri,
)
from infra.tracking.tracker import Tracker, TrackerTiming

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_everything_that_was_logged_is_in_the_embedded_store(tmp_path: Path) -> None:
    key = create_run("train", "first", tags={"kind": "run"})
    child = create_child_run(key, "train", "child", {"config_hash": "abc"})
    (tmp_path / "picture.png").write_bytes(b"png")
    with Tracker(key) as tracker:
        for step in range(1200):  # more than MLflow takes in one call
            tracker.log_metrics({"loss/train": 1.0 / (step + 1)}, step)
        tracker.log_params({f"setting.{number}": number for number in range(250)})
        tracker.set_description("# What this run found")
        tracker.log_text("a,b\n1,2\n", "table.csv")
        tracker.log_file(tmp_path / "picture.png", "plots")
        tracker.log_dataset("books", "f" * 64, str(tmp_path), {"tokens": 7}, "training")
        tracker.finish()
    client = MlflowClient(key.store)
    run = client.get_run(key.run_id)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(key.run_id, "loss/train")) == 1200
    assert len(run.data.params) == 250
    assert run.data.tags["mlflow.note.content"] == "# What this run found"
    assert {file.path for file in client.list_artifacts(key.run_id)} == {"table.csv", "plots"}
    assert run.inputs is not None
    assert run.inputs.dataset_inputs[0].dataset.name == "books"
    assert find_children(key, "config_hash") == {"abc": (child, False)}
    assert (tmp_path / "mlflow.db").is_file()


def test_a_long_description_ends_with_a_whole_row_and_names_the_complete_report() -> None:
    rows = [f"| rung {number} | {number} tokens/s |" for number in range(1000)]
    key = create_run("tune", "long")
    with Tracker(key) as tracker:
        tracker.set_description("\n".join(["**What:** a ladder", "", *rows]))
        tracker.finish()
    description = MlflowClient(key.store).get_run(key.run_id).data.tags["mlflow.note.content"]
    *kept, empty, note = description.split("\n")
    assert kept == ["**What:** a ladder", "", *rows][: len(kept)]
    assert (len(kept) > 200, empty) == (True, "")
    assert "summary.md" in note


@pytest.mark.parametrize(
    ("said", "raised", "becomes"),
    [
        (None, None, "FINISHED"), ("KILLED", None, "KILLED"), ("FAILED", None, "FAILED"),
        (None, ValueError, "FAILED"), (None, KeyboardInterrupt, "KILLED"), ("FINISHED", ValueError, "FAILED"),
    ],
)  # fmt: skip
def test_a_run_gets_the_status_of_its_block_unless_it_raises(
    said: str | None, raised: type[BaseException] | None, becomes: str
) -> None:
    key = create_run("train", "ends")
    with pytest.raises(raised) if raised else nullcontext(), Tracker(key) as tracker:
        tracker.status = said or tracker.status
        if raised:
            raise raised
    assert MlflowClient(key.store).get_run(key.run_id).info.status == becomes


def test_an_entry_that_mlflow_rejects_does_not_affect_others(capfd: pytest.CaptureFixture[str]) -> None:
    key = create_run("train", "refused")
    other = Tracker(key)
    other.log_params({"rate": 1})
    assert other.flush()
    with Tracker(key) as tracker:
        tracker.log_params({"rate": 2, "seed": 3})
        tracker.set_tags({"device": "cpu"})
        tracker.log_metrics({"loss": 3.0})
    run = MlflowClient(key.store).get_run(key.run_id)
    assert run.data.params == {"rate": "1", "seed": "3"}
    assert run.data.tags["device"] == "cpu"
    assert run.data.metrics == {"loss": 3.0}
    assert "MLflow rejected an entry" in capfd.readouterr().err


def test_what_a_continued_run_has_is_not_sent_again() -> None:
    """But for results, which are at step 0."""
    key = create_run("train", "continued")
    with Tracker(key) as tracker:
        tracker.log_params({"seed": 1})
        tracker.log_metrics({"result/mfu": 0.4})
        for step in (5, 10):
            tracker.log_metrics({"loss/step": 1.0 * step}, step)
            tracker.log_metrics({"loss/step": 7.0}, step)
    reopen_run(key)
    with Tracker(key, read_logged(key)) as tracker:
        assert tracker.logged.last_step("loss/") == 10
        tracker.log_params({"seed": 2, "width": 3})
        tracker.log_metrics({"result/mfu": 0.5})
        for step in (5, 10, 15):
            tracker.log_metrics({"loss/step": 2.0 * step, "loss/val": 1.0}, step)
    client = MlflowClient(key.store)
    run = client.get_run(key.run_id)
    assert run.data.params == {"seed": "1", "width": "3"}
    assert run.data.metrics["result/mfu"] == 0.5
    points = [(point.step, point.value) for point in client.get_metric_history(key.run_id, "loss/step")]
    assert points == [(5, 5.0), (10, 10.0), (15, 30.0)]
    assert [point.step for point in client.get_metric_history(key.run_id, "loss/val")] == [5, 10, 15]


def test_a_store_whose_creation_was_killed_is_created_by_the_next_command(tmp_path: Path) -> None:
    Path("mlflow.db").unlink()
    program = "from infra.tracking.store import open_store; open_store()"
    for seconds in (0.0, 0.2, 0.4):
        left = set(tmp_path.iterdir())
        creating = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)})
        while set(tmp_path.iterdir()) == left and creating.poll() is None:
            time.sleep(0.002)
        time.sleep(seconds)
        creating.kill()
        creating.wait()
    assert find_children(create_run("train", "after"), "none") == {}


def test_commands_that_start_at_once_create_one_store() -> None:
    Path("mlflow.db").unlink()
    program = """
import os
from infra.tracking.store import create_run
other = os.fork()  # when MLflow is imported, which takes long and not always as long
create_run("train", f"of {os.getpid()}")
os._exit(os.waitpid(other, 0)[1] != 0 if other else 0)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    client = MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")
    (experiment,) = [found for found in client.search_experiments() if found.name == "train"]
    assert len(client.search_runs([experiment.experiment_id])) == 2
    assert not list(Path.cwd().glob(".mlflow.db-*")), "what it was made in is gone"


def test_the_store_that_a_flag_names_goes_before_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert store_uri() == "http://127.0.0.1:1"
    assert store_uri("sqlite:///other.db") == f"sqlite:///{tmp_path}/other.db"


def test_a_store_is_in_its_folder_whatever_characters_the_name_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "within" / "My%20Project? #1, 50%"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with Tracker(create_run("train", "first")) as tracker:
        tracker.log_json({"steps": 3}, "config.json")
    (folder / "mlflow.db").rename(folder / "moved.db")
    store = "sqlite:///moved.db"
    assert tracker.run_ref.store == store_uri()
    assert not tracker.run_ref.is_reachable
    (found,) = MlflowClient(store).search_runs([tracker.run_ref.experiment_id])
    assert found.info.run_id == tracker.run_ref.run_id
    assert (folder / f"mlartifacts/train/{found.info.run_id}/artifacts/config.json").is_file()
    assert list(folder.parent.iterdir()) == [folder]


def test_what_was_deleted_in_mlflow_is_to_be_restored() -> None:
    key = create_run("ladder", "deleted")
    client = MlflowClient(key.store)
    with Tracker(key, timing=TrackerTiming(retry_seconds=0.1)) as tracker:
        tracker.log_metrics({"loss/step": 5.0}, step=1)
        assert tracker.flush()
        client.delete_run(key.run_id)
        tracker.log_metrics({"loss/step": 4.0}, step=2)
        assert not tracker.flush(2), "it waits"
        assert not run_exists(key)
        with pytest.raises(UserError, match=rf"{key.run_id} .* was deleted. Restore it.* runs restore"):
            reopen_run(key)
        client.restore_run(key.run_id)
    assert [point.value for point in client.get_metric_history(key.run_id, "loss/step")] == [5.0, 4.0]
    reopen_run(key)
    client.delete_experiment(key.experiment_id)
    with pytest.raises(UserError, match=r"experiment ladder .* was deleted. Restore it"):
        create_run("ladder", "next")
    client.restore_experiment(key.experiment_id)
    assert create_run("ladder", "next").experiment_id == key.experiment_id


def test_a_store_that_does_not_answer_is_refused_before_any_work(free_port: int) -> None:
    with pytest.raises(UserError, match="--tracking-uri"):
        create_run("train", "nowhere", tracking_uri=f"http://127.0.0.1:{free_port}")


def test_a_password_in_the_address_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://me:canary@127.0.0.1:1"
    with pytest.raises(UserError, match=r"contains a password.*MLFLOW_TRACKING_PASSWORD") as refused:
        create_run("train", "secret", tracking_uri=address)
    assert "canary" not in str(refused.value)
    for hidden in (address, "postgresql://127.0.0.1:1/mlflow?password=canary"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", hidden)
        with pytest.raises(UserError, match="contains a password") as refused:
            open_store()
        assert "canary" not in str(refused.value)


def test_entries_survive_the_server_and_arrive_later(
    tmp_path: Path,
    mlflow_server: Callable,
    free_port: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without a further entry, and before the run ends."""
    with mlflow_server(tmp_path, free_port) as process:
        key = create_run("train", "outage", tracking_uri=f"http://127.0.0.1:{free_port}")
        tracker = Tracker(key, timing=TrackerTiming(retry_seconds=0.5))
        tracker.log_metrics({"loss": 1.0}, 1)
        tracker.set_tags({"state": "before"})
        assert tracker.flush()
        os.killpg(process.pid, signal.SIGSTOP)  # who waits for its answer does so for 15 seconds
        started = time.monotonic()
        tracker.log_metrics({"loss": 2.0}, 2)
        tracker.set_tags({"state": "meanwhile"})
        assert time.monotonic() - started < 10, "logging waited for a server that does not answer"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not tracker.flush()
    with mlflow_server(tmp_path, free_port):
        client = MlflowClient(key.store)
        deadline = time.monotonic() + 30
        while client.get_run(key.run_id).data.tags["state"] == "before" and time.monotonic() < deadline:
            time.sleep(0.2)
        tracker.log_metrics({"loss": 3.0}, 3)
        tracker.finish()
        history = client.get_metric_history(key.run_id, "loss")
        assert sorted(point.value for point in history) == [1.0, 2.0, 3.0]
        run = client.get_run(key.run_id)
        assert (run.data.tags["state"], run.info.status) == ("meanwhile", "FINISHED")
        assert is_complete(key)
    assert capfd.readouterr().err.count("does not respond") == 1, "it is said once"


def test_a_tag_set_during_and_after_an_outage_keeps_the_later_value() -> None:
    """The store loses its database and gets it back; the third value comes before the next attempt is due."""
    key = create_run("train", "outage")
    with Tracker(key, timing=TrackerTiming(batch_seconds=0.0)) as tracker:
        database = Path("mlflow.db").rename("away.db")
        tracker.set_tags({"state": "first", "other": "first"})
        assert not tracker.flush()
        database.rename("mlflow.db")
        tracker.set_tags({"state": "second"})
        tracker.set_tags({f"tag.{number}": number for number in range(200)})  # more than MLflow takes in one call
        tracker.set_tags({"state": "third", "other": "third"})
        tracker.set_tags({"state": "last"})
    tags = MlflowClient(key.store).get_run(key.run_id).data.tags
    assert (tags["state"], tags["other"], tags["tag.199"]) == ("last", "third", "199")


@pytest.mark.parametrize("returns", [True, False])
def test_the_end_of_a_run_waits_for_a_store_that_is_away_but_not_long(
    returns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    timing = TrackerTiming(end_timeout_seconds=60.0 if returns else 4.0)
    key = create_run("train", "outage", run_dir="/runs/outage")
    database = Path("mlflow.db").rename("away.db")
    started = time.monotonic()
    if returns:
        threading.Timer(1.5, lambda: database.rename("mlflow.db")).start()
    with Tracker(key, timing=timing) as tracker:
        tracker.log_metrics({"loss": 4.0})
    assert (1.5 if returns else 4.0) < time.monotonic() - started < (60 if returns else 12)
    said = " ".join(capfd.readouterr().err.split())
    assert ("2 entries of this run are unsent" in said) != returns
    if not returns:
        database.rename("mlflow.db")
    run = MlflowClient(key.store).get_run(key.run_id)
    assert (run.info.status, is_complete(key)) == (("FINISHED", True) if returns else ("RUNNING", False))


def test_a_batch_of_tags_alone_is_sent() -> None:
    key = create_run("train", "tags")
    client = MlflowClient(key.store)
    send(client, key.run_id, [{"kind": "tag", "key": "state", "value": "known"}])
    send(client, key.run_id, [{"kind": "tag", "key": f"tag.{n}", "value": str(n)} for n in range(150)])
    tags = client.get_run(key.run_id).data.tags
    assert (tags["state"], tags["tag.0"], tags["tag.149"]) == ("known", "0", "149")


def test_an_empty_value_removes_a_tag() -> None:
    """Also one that an earlier process has set, whose removal is sent twice, or that is set again at once."""
    key = create_run("train", "tags")
    client = MlflowClient(key.store)
    with Tracker(key) as tracker:
        tracker.set_tags({"reason": "interrupted", "outcome": "interrupted", "never": ""})
    with Tracker(key, read_logged(key)) as tracker:
        tracker.set_tags({"reason": "", "outcome": ""})
        tracker.set_tags({"outcome": "finished"})
    tags = client.get_run(key.run_id).data.tags
    assert tags["outcome"] == "finished"
    assert {"reason", "never"}.isdisjoint(tags)
    for _ in range(2):
        send(client, key.run_id, [{"kind": "tag", "key": "reason", "value": ""}])


def test_an_interrupted_command_ends_even_if_its_writer_is_stuck() -> None:
    """Here the lock of Python's logging, as a Ctrl-C within ``Logger.setLevel`` leaves it."""
    key = create_run("train", "interrupted")
    with logging._lock, Tracker(key, timing=TrackerTiming(end_timeout_seconds=2.0)) as tracker:  # type: ignore[attr-defined]
        logging.getLogger("any").setLevel(logging.ERROR)  # so that the next who would log asks for the lock
        tracker.log_metrics({"loss": 5.0})
        started = time.monotonic()
        tracker.finish("KILLED")
        assert 1.9 < time.monotonic() - started < 15, "it was not held up, or it waited"
        assert MlflowClient(key.store).get_run(key.run_id).info.status == "RUNNING"


def test_a_run_ends_when_its_work_ended() -> None:
    key = create_run("train", "earlier")
    with Tracker(key) as tracker:
        tracker.finish("FAILED", ended=1_700_000_000.0)
    info = MlflowClient(key.store).get_run(key.run_id).info
    assert (info.status, info.end_time) == ("FAILED", 1_700_000_000_000)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_is_not_writable_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    open_store(f"sqlite:///{folder}/mlflow.db")
    for place in (folder / "mlflow.db", folder):
        mode = place.stat().st_mode
        place.chmod(0o555)
        with pytest.raises(UserError, match="is not writable"):
            open_store(f"sqlite:///{folder}/mlflow.db")
        place.chmod(mode)


def test_stores_that_cannot_be_used_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "damaged.db").write_text("this is no database, however long one looks at it" * 100)
    for store in (f"sqlite:///{tmp_path}", f"sqlite:///{tmp_path}/damaged.db", "postgresql://nobody@127.0.0.1/none"):
        with pytest.raises(UserError, match=r"The MLflow store .*--tracking-uri|is a folder"):
            open_store(store)
