"""Finished runs become a law of loss over compute and a chart, or are refused by a sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.schema import to_json
from infra.storage.files import write_json
from train.config import TrainConfig
from train.model_config import PRESETS
from train.reporting.scaling import CHART, draw_law, read_law
from train.result import RunResult

Make = Callable[..., RunResult]
TINY = PRESETS["tiny"]


@pytest.fixture
def write_run(tmp_path: Path, make_result: Make) -> Callable[..., str]:
    """Write the folder of a run whose loss follows 2 + 3 (C / 10^15)^-0.2, and return its path."""

    def write(name: str, tokens: int, **changes: object) -> str:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        loss = 2 + 3 * (tokens * 1e9 / 1e15) ** -0.2
        settings = {"train_tokens": tokens, "flops_per_token": 1e9, "val_loss": loss, "data_fingerprint": "a"}
        result = make_result(**settings | changes)
        config = TrainConfig.of(model=TINY).to_json()
        write_json(folder / "config.json", config)
        write_json(folder / "start.json", {"config": config})
        write_json(folder / "result.json", to_json(result))
        return str(folder)

    return write


def test_a_folder_of_runs_is_read_and_the_law_predicts_and_is_drawn(
    write_run: Callable[..., str], tmp_path: Path
) -> None:
    runs = [write_run(f"run{n}", tokens) for n, tokens in enumerate((10**7, 10**8, 10**9))]
    write_run("interrupted", 10**8, outcome="interrupted")
    write_run("without-validation", 10**8, val_loss=None)
    (tmp_path / "runs" / "search").mkdir()
    measured = read_law([str(tmp_path / "runs")])
    assert [str(run.run_dir) for run in measured.runs] == runs == [str(r.run_dir) for r in read_law(runs).runs]
    assert measured.unit == "nats/token"
    truth = 2 + 3 * 1e5**-0.2
    loss = measured.law.loss(1e20)
    assert loss.low < truth < loss.high
    assert f"{loss.middle:.3g} nats/token" in measured.loss_text(1e20)
    [warning] = measured.warnings
    assert f"{10**7 / TINY.parameters:.3g} to {10**9 / TINY.parameters:.3g} tokens per parameter" in warning
    chart = draw_law(measured, [1e20])
    assert chart == str(tmp_path / "runs" / CHART)
    assert (tmp_path / "runs" / CHART).read_bytes()[:4] == b"\x89PNG"


def test_runs_on_different_data_are_compared_by_the_byte(write_run: Callable[..., str]) -> None:
    runs = [
        write_run(f"run{n}", 10**n, val_loss=9.0, val_bits_per_byte=2.0 - n / 10, data_fingerprint=f"{n}")
        for n in (6, 7, 8)
    ]
    measured = read_law(runs)
    assert (measured.unit, list(measured.law.losses)) == ("bits/byte", pytest.approx([1.4, 1.3, 1.2]))
    assert any("different data" in warning for warning in measured.warnings)
    runs.append(write_run("bare", 10**9, val_bits_per_byte=None, data_fingerprint="9"))
    with pytest.raises(UserError, match=r"--from-runs.*bare.*bits per byte"):
        read_law(runs)


def test_runs_without_a_final_loss_are_refused(write_run: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--from-runs .*gone"):
        read_law([str(tmp_path / "gone")])
    stopped = write_run("stopped", 10**7, outcome="interrupted")
    with pytest.raises(UserError, match=r"stopped has not finished.*--resume"):
        read_law([stopped])
    (Path(stopped) / "result.json").unlink()
    with pytest.raises(UserError, match=r"stopped has not finished"):
        read_law([stopped])
    with pytest.raises(UserError, match=r"no validation loss"):
        read_law([write_run("blind", 10**7, val_loss=None)])
    with pytest.raises(UserError, match=r"there are 2"):
        read_law([write_run("one", 10**7), write_run("two", 10**8)])
