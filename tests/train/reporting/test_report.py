"""What a person reads of a run: every number under its own name and in its unit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.cli.table import Report
from infra.cli.units import GB
from infra.device.hardware import A100, cpu_info
from infra.storage.directory import StorageDir
from infra.storage.local_directory import LocalDir
from pipeline.shards import read_manifest
from train.config import Execution, ResolvedConfig, TrainConfig
from train.estimate.memory import predict_peak
from train.model_config import ModelConfig
from train.reporting import report
from train.result import Diagnosis, Memory, MemoryShortage, RunResult, Throughput

Make = Callable[..., RunResult]

HOME = StorageDir.of("runs/one")


def make_report(
    config: ResolvedConfig, result: RunResult, run_dir: StorageDir = HOME, memory_limit: int | None = None
) -> Report:
    return report.run_report(config.step, config.dataset, config.duration, result, run_dir, memory_limit)


@pytest.fixture
def config(small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        model=small_model, micro_batch=2, global_batch=8, workers=2, precision="fp32", device="cpu", compile="off",
        loss="plain",
    )  # fmt: skip


def test_what_a_model_has_learned_to_write_is_text_in_mlflow(config: ResolvedConfig, make_result: Make) -> None:
    """Books may contain Markdown, and a model that was trained on them writes it."""
    result = make_result(sample="<script>a</script> ![x](http://a/b.png) | [y](javascript:z)")
    page = make_report(config, result, HOME).markdown()
    row = r"| sample | &lt;script>a&lt;/script> !\[x](http://a/b.png) \| \[y](javascript:z) |"
    assert row in page.splitlines()


def test_the_result_as_rows(config: ResolvedConfig, make_result: Make) -> None:
    result = make_result(val_bits_per_character=1.25, sample="so\n it  goes", predicted_memory=3 * GB, val_windows=6)
    *first, (name, command) = report.run_report(
        config.step, config.dataset, config.duration, result, HOME, 2 * GB
    ).summary
    assert first == [
        ("Run", f"{config.model.text} on `tokens`; finished: reached 10 steps"),
        ("Tokens/s", "1,000 (95% CI 990 to 1,020)"),
        ("Peak memory", "1.00 GB of 2.00 GB, 50.0% (predicted 3.00 GB)"),
        ("Loss", "training 3.250, validation 3.500 nats/token"),
        ("Time", "3.5s; first step after 1.5 s"),
    ]
    assert name == "Next"
    assert "train.generate --checkpoint one" in command
    assert dict(report.detail_rows(config.model, config.batch, result)) == {
        "measurement": "median of 7 steps after a warm-up of 3 steps",
        "utilization": "0.002 TFLOP/s; MFU unknown: no peak FLOP/s listed for 'cpu'",
        "compute": "0.5 PF-days = 320 tokens x 2.0 MFLOP",
        "validation": "perplexity 33.1 over 257 token ids; 1.500 bits per byte; 1.250 bits per character; "
        "6 windows (0.75 global batches)",
        "tokens seen": "320 training + 64 validation = 384 in total",
        "books seen": "2",
        "time": "2s; first step after 1.5 s",
        "step time": "90.0% compute, 9.0% optimizer, 1.00% waiting for data",
        "checkpoint": "runs/one/checkpoints/step-00000010",
        "sample": "so it goes",
    }
    streamed = dict(
        report.detail_rows(config.model, config.batch, make_result(machine="w1", encoded_on={"w2": 300, "w1": 100}))
    )
    assert streamed["step time"].endswith("w1 (25%), w2 (75%)")
    on_gpu = make_result(device="NVIDIA H100", mfu=0.5, throughput=None, val_loss=None)
    rows = dict(report.detail_rows(config.model, config.batch, replace(on_gpu, joules_per_million_tokens=1754.0)))
    assert rows["energy"].startswith("1.75 kJ")
    assert dict(make_report(config, on_gpu, HOME).summary)["Tokens/s"].startswith("not measured")
    measured = replace(on_gpu, throughput=Throughput(1.0, 1.0, 1.0, 3, 1), matmul_utilization=0.625)
    assert "50.0%" in dict(make_report(config, measured, HOME).summary)["Tokens/s"]
    rows = dict(report.detail_rows(config.model, config.batch, replace(measured, hfu=0.75, paused_seconds=60.0)))
    assert all(number in rows["utilization"] for number in ("0.002", "62.5%", "HFU 75.0%"))
    assert "1m" in rows["pause"]


def test_the_predicted_memory_is_beside_what_was_measured(config: ResolvedConfig, make_result: Make) -> None:
    """Of a run that did not fit also its weights, gradients and the optimizer's state."""
    peak = predict_peak(config.step)
    memory = Memory(2 * GB, 3 * GB, 4 * GB, "nvml")
    lines = {name: cells for name, *cells in report.memory_table(peak, make_result(memory=memory)).rows}
    assert {name: cells[1] for name, cells in lines.items() if cells[1]} == {
        "context": "1.000", "allocated": "2.000", "reserved": "3.000", "process (NVML)": "4.000"
    } | ({"unused": "1.000"} if "unused" in lines else {})  # fmt: skip
    assert lines["allocated"][0] == f"{peak.allocated / GB:.3f}"
    assert lines["process (NVML)"][0] == f"{peak.total / GB:.3f}"
    assert lines["weights"] == [f"{peak.weights / GB:.3f}", ""]
    shortage = MemoryShortage("running the backward pass of step 1", None, 4 * GB, {"weights": GB})
    lines = report.memory_table(peak, make_result(memory=memory, shortage=shortage)).rows
    assert ("weights", f"{peak.weights / GB:.3f}", "1.000") in lines


def test_what_is_about_to_be_trained(
    config: ResolvedConfig, small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(small_shards)
    config, cut_off = config.replace(data=str(small_shards)), replace(A100, compile_blocker="there is no C compiler")
    config = replace(config, requested=TrainConfig.of(attention="sdpa"))
    report.print_header(config, manifest, LocalDir("runs/a name"), cut_off)
    printed = " ".join(capfd.readouterr().out.split())
    for expected in (f"{manifest.splits['train']['tokens']:,}", "2 (auto)", "fp32 (auto)", "off (auto)", "runs/a name"):
        assert expected in printed
    assert "no C compiler" not in printed, "which a CPU's run does not miss"
    report.print_header(config.replace(device="cuda"), manifest, LocalDir("runs/a name"), cut_off)
    assert "no C compiler" in capfd.readouterr().out


def test_each_fallback_of_a_device_has_a_line() -> None:
    lacking = replace(
        A100, bf16=False, compile_blocker="no gcc", allocator_blocker="device not ready", pinned_blocker="no memory",
        memory_cap_reason="WSL2 would spill", nvml_failure="Not Supported",
    )  # fmt: skip
    requested = TrainConfig().execution
    on_gpu = Execution(device="cuda", precision="fp16")
    lines = report.device_lines(requested, on_gpu, lacking)
    for line, part in zip(
        lines, ("no gcc", "loss scaling", "not ready", "pinned", "WSL2 would spill", "Not Supported"), strict=True
    ):
        assert part in line
    explicit = replace(requested, precision="fp16", compile="off", allocator="default")
    assert len(report.device_lines(explicit, on_gpu, lacking)) == 3
    assert report.device_lines(requested, on_gpu, A100) == []


def test_cuda_graphs_that_were_chosen_have_a_reason() -> None:
    requested = TrainConfig().execution
    graphs = Execution(device="cuda", precision="bf16", compile="reduce-overhead")
    (line,) = report.device_lines(requested, graphs, A100)
    assert "CUDA graphs" in line
    assert report.device_lines(replace(requested, compile="reduce-overhead"), graphs, A100) == []


def test_a_run_on_the_cpu_says_why() -> None:
    requested, on_cpu = TrainConfig().execution, Execution(device="cpu")
    without_gpu = replace(cpu_info(), gpu_absence="there is no NVIDIA driver")
    (line,) = report.device_lines(requested, on_cpu, without_gpu)
    assert "no NVIDIA driver" in line
    assert report.device_lines(replace(requested, device="cpu"), on_cpu, without_gpu) == []


@pytest.mark.parametrize(
    ("outcome", "checkpoint", "expected_text"),
    [
        ("finished", "c", "train.export --checkpoint one"), ("finished", None, "one/config.json"),
        ("interrupted", "c", "--resume one"), ("interrupted", None, "another --name"),
        ("diverged", "c", "--resume one --learning-rate"), ("diverged", None, "--learning-rate below 0.0006"),
        ("oom", None, "python -m train.run --config runs/one/config.json --loss fused"),
    ],
)  # fmt: skip
def test_the_last_fact_says_what_to_do_next(
    config: ResolvedConfig,
    make_result: Make,
    capfd: pytest.CaptureFixture[str],
    outcome: str,
    checkpoint: str,
    expected_text: str,
) -> None:
    advice = "try again: ", "python -m train.run --config runs/one/config.json --loss fused"
    diagnosis = Diagnosis([("logits", "19.78 GB predicted")], *advice) if outcome == "oom" else None
    result = make_result(outcome=outcome, checkpoint=checkpoint, diagnosis=diagnosis)
    text = report.run_report(
        config.step, config.dataset, config.duration, result, StorageDir.of(Path("runs/one").resolve())
    )
    report.print_result(text, result, "the link")
    printed = " ".join(capfd.readouterr().out.split())
    assert ("logits 19.78 GB predicted" in printed) == (outcome == "oom")
    assert expected_text in printed.partition("Next")[2].partition("the link")[0]


@pytest.mark.parametrize("is_gpu", [False, True])
def test_what_a_run_prints_at_its_end_is_at_most_ten_lines(
    config: ResolvedConfig, make_result: Make, capfd: pytest.CaptureFixture[str], is_gpu: bool
) -> None:
    """Besides the table of a GPU's memory, which a CPU cannot measure. The description in MLflow has all of it."""
    memory = Memory(2 * GB, 3 * GB, 4 * GB, "nvml", capacity=8 * GB) if is_gpu else Memory(None, None, GB, "rss")
    result = make_result(memory=memory, no_sample_reason="the loss of 3.50 is not yet below 3.00")
    text = make_report(config, result)
    report.print_result(text, result, "mlflow ui\nhttp://127.0.0.1:5000")
    printed = capfd.readouterr().out
    table = "weights" in printed
    assert table == is_gpu
    lines = printed.rpartition("\n\n")[2].splitlines() if is_gpu else printed.splitlines()
    assert len(lines) <= 10
    for expected in ("1,000 (95% CI 990 to 1,020)", "3.500", "3.5s", "train longer", "http"):
        assert expected in printed
    assert ("4.00 GB of 8.00 GB, 50.0%" in printed) == is_gpu
    assert "not yet below 3.00" in printed
    for expected in ("| books seen | 2 |", "weights", "median of 7 steps", "not yet below 3.00"):
        assert expected in text.markdown()
