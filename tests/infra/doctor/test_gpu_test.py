"""The GPU test's order, its report, and what it says when steps fail; no step is run."""

import getpass
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.device.gpu_report import REPORT_FILE, parse_report
from infra.device.hardware import A100, cpu_info
from infra.doctor import __main__ as doctor
from infra.doctor.gpu_test import STEPS, Step, run_in_process, run_test, verdict
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.directory import StorageDir
from train.estimate.gpu_rates import load_gpu_rates

REPORTS = Path(doctor.__file__).parents[1] / "device" / "reports"
VALUES: dict[str, dict[str, Any]] = {
    "device": {
        "device": A100.name, "simulated": False, "software": {"torch": "2.14"},
        "matmul": {"bf16": 250e12, "fp32": 19e12, "tf32": 120e12}, "copy": {"device_to_device": 1.3e12},
    },
    "attention": {"device": A100.name}, "compile": {"device": A100.name},
    "train": {"device": A100.name, "tokens_per_second": 180_000.0}, "nanogpt": {"device": A100.name, "ratio": 1.07},
}  # fmt: skip


class Runner:
    """Returns results of an A100, with ``failing`` steps, and lets time pass."""

    def __init__(self, *failing: str, seconds: float = 30.0, simulated: bool = False) -> None:
        self.failing, self.seconds, self.simulated, self.now = failing, seconds, simulated, 0.0
        self.requests: list[dict[str, Any]] = []

    def __call__(self, step: Step, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.requests.append(json.loads(json.dumps(request)))
        self.now += self.seconds
        if step.name in self.failing:
            return {"outcome": "failed", "summary": "CUDA error", "advice": "use another driver", "values": None}
        values = dict(VALUES[step.name])
        if step.name == "device":
            values["simulated"] = self.simulated
        return {"outcome": "passed", "summary": f"{step.name} is fine", "advice": "", "values": values}

    def clock(self) -> float:
        return self.now


def run(runner: Runner, out: Path) -> Any:
    return run_test(StorageDir.of(out), "gpt2-124m", runner, runner.clock, A100)


def test_all_steps_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = Runner()
    report = run(runner, tmp_path)
    assert [request["step"] for request in runner.requests] == [step.name for step in STEPS]
    assert runner.requests[-1]["values"]["train"]["tokens_per_second"] == 180_000, "which nanoGPT is compared with"
    assert report.passed
    assert all(text in verdict(report) for text in (A100.name, "180,000", "x1.07"))
    printed = capfd.readouterr().out
    assert "0:00 ✓ device" in printed
    assert "2:00 ✓ nanogpt" in printed
    stored = json.loads((tmp_path / REPORT_FILE).read_text())
    assert parse_report(stored, "here") == report
    assert stored["matmul"] == VALUES["device"]["matmul"]


def test_the_steps_after_a_failed_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = run(Runner("attention", "train"), tmp_path)
    assert [step.outcome for step in report.steps] == ["passed", "failed", "passed", "failed", "passed"]
    assert not report.passed
    assert "attention, train" in verdict(report)
    assert "use another driver" in capfd.readouterr().out
    assert len(parse_report(json.loads((tmp_path / REPORT_FILE).read_text()), "here").steps) == 5


def test_the_time_is_bounded(tmp_path: Path) -> None:
    runner = Runner(seconds=200.0)
    report = run(runner, tmp_path)
    assert len(runner.requests) == 3
    assert [step.outcome for step in report.steps][3:] == ["failed", "failed"]


def test_a_step_that_hangs_or_crashes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, reason in (("this", "code 0"), ("no_such_module", "No module named")):
        monkeypatch.setattr("infra.doctor.gpu_test.MODULE", module)
        assert reason in run_in_process(STEPS[0], {}, 60.0)["summary"]
    assert "not finished" in run_in_process(STEPS[0], {}, 0.0)["summary"]


def test_a_report_has_no_names_of_hosts_users_and_folders(tmp_path: Path) -> None:
    secret = (
        f"{socket.gethostname()} {getpass.getuser()}: /home/ada/.cache/x/kernel.py failed, 3/4 of https://a.org/b/c"
    )

    def run_step(step: Step, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        return {"outcome": "failed", "summary": secret, "advice": "", "values": {"list": [{"text": secret}], "n": 1.5}}

    run_test(StorageDir.of(tmp_path), run_step=run_step, info=A100)
    text = (tmp_path / REPORT_FILE).read_text()
    assert "kernel.py failed, 3/4 of https://a.org/b/c" in text
    assert not any(word in text for word in ("/home", "/ada", ".cache", f"{socket.gethostname()} {getpass.getuser()}"))


def test_a_simulated_gpu_is_marked(tmp_path: Path) -> None:
    report = run(Runner(simulated=True), tmp_path)
    assert report.simulated
    assert "simulated" in verdict(report)


def test_a_plan_uses_the_rates_of_a_report(tmp_path: Path) -> None:
    run(Runner(), tmp_path)
    rates = load_gpu_rates(str(tmp_path / REPORT_FILE))
    assert rates.device_info == A100
    assert rates.matmul_rate("bf16") == 250e12
    assert rates.bandwidth == 1.3e12


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda report: report.update(version=9), r"version 9.*Update this program"),
    "older": (lambda report: report.update(version=0), r"version 0.*infra.doctor --gpu"),
    "simulated": (lambda report: report.update(simulated=True), "simulated"),
    "another card": (lambda report: report["facts"].update(name="NVIDIA L4"), "NVIDIA L4.*NVIDIA A100"),
    "no GPU": (lambda report: report.update(facts=to_json(cpu_info())), "no GPU"),
    "damaged": (lambda report: report.update(matmul="fast"), "matmul"),
    "incomplete": (lambda report: report.pop("facts"), "facts"),
    "unmeasured": (lambda report: report.update(matmul={}, copy={}), "infra.doctor"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_report_that_cannot_be_planned_from_is_rejected(tmp_path: Path, damage: str) -> None:
    run(Runner(), tmp_path)
    path = tmp_path / REPORT_FILE
    report = json.loads(path.read_text())
    change, text = DAMAGES[damage]
    change(report)
    path.write_text(json.dumps(report))
    with pytest.raises(UserError, match=text) as mistake:
        load_gpu_rates(str(path))
    assert REPORT_FILE in str(mistake.value)


def test_a_file_that_is_no_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).write_text('{"version": 1, "steps"')
    with pytest.raises(UserError, match=REPORT_FILE):
        load_gpu_rates(str(tmp_path / REPORT_FILE))


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_reports_that_are_kept_can_be_read_and_name_nobody(path: Path) -> None:
    report = parse_report(json.loads(path.read_text()), path.name)
    assert len(report.steps) == len(STEPS)
    assert report.simulated == path.stem.startswith("simulated")
    assert not any(word in path.read_text() for word in ("/home/", "/tmp/", "/root/", "hostname", "GPU-"))  # noqa: S108


@pytest.mark.parametrize("flags", [("--quick",), ("--workers", "2"), ("--address", "auto")], ids=str)
def test_other_modes_are_refused(refused: Callable[..., str], flags: tuple[str, ...]) -> None:
    assert flags[0] in refused(doctor.main, "--gpu", *flags)


def test_a_machine_without_a_gpu_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "CUDA" in refused(doctor.main, "--gpu", "--out", str(tmp_path))
