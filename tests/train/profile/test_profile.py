"""Profiles: classes by name, gaps with their cause, and the command on the CPU, whose findings are true."""

import gzip
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from torch._C._autograd import DeviceType

from infra.tracking.store import store_uri
from train.config import TrainConfig
from train.data.loader import NEXT_BATCH
from train.model_config import ModelConfig
from train.profile import __main__ as profile
from train.profile import record
from train.profile.trace import FORWARD, Profile, analyze, attention_kernel, classify_kernel, findings, idle_gaps
from train.resolved import resolve_local

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"


KINDS = {
    "matmul": (
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8",
        "triton_tem_fused__to_copy_mm_t_7",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<...>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
    ),
    "copies": ("Memcpy HtoD (Pinned -> Device)",),
    "optimizer": ("void at::native::multi_tensor_apply_kernel<...FusedAdamMathFunctor...>",),
    "norms and loss": (
        "void at::native::vectorized_layer_norm_kernel<float>",
        "void at::native::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 32u>",
        "aten::_log_softmax",
        "void cunn_SoftMaxForward<4, float, float, LogSoftMaxForwardEpilogue>",
        "triton_per_fused__to_copy_add_native_layer_norm_3",
        "triton_per_fused_add_addmm_native_layer_norm_view_2",
        "graph_0_cpp_fused__to_copy_add_native_layer_norm_view_3",
    ),
    "element-wise": (
        "void vectorized_elementwise_kernel<4, GeluCUDAKernelImpl(GeluType)::{lambda()#2}>",
        "triton_poi_fused_addmm_gelu_view_3",
        "graph_0_cpp_fused__to_copy_addmm_gelu_view_2",
    ),
}


def test_kernels_are_sorted_by_name() -> None:
    assert {
        kind: tuple(name for name in names if classify_kernel(name) == kind) for kind, names in KINDS.items()
    } == KINDS


def test_the_attention_kernel_is_recognized() -> None:
    assert attention_kernel(["cudnn_generated_fort_native_sdpa_sm90_flash_fprop"]) == "cuDNN"
    assert attention_kernel(["void pytorch_flash::flash_fwd_kernel<...>"]) == "flash"
    assert attention_kernel(["fmha_cutlassF_bf16_aligned_64x64_rf_sm80"]) == "efficient"
    assert attention_kernel(["triton_tem_fused_flex_attention_2"]) == "flex"
    assert attention_kernel(["aten::mm"]) == "not fused"


def event(
    name: str,
    start: float,
    end: float,
    kind: DeviceType = DeviceType.CUDA,
    inside: float = 0.0,
    annotation: bool = False,
) -> Any:
    """One of torch's events, in microseconds, of which ``inside`` were spent in others, and half on the device."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, time_range=span, device_type=kind, is_user_annotation=annotation, cpu_time_total=end - start,
        self_cpu_time_total=end - start - inside, device_time_total=(end - start) / 2,
    )  # fmt: skip


def test_a_range_named_by_the_host_is_not_a_kernel() -> None:
    events = [
        event("nvjet_gemm", 0, 1000), event("multi_tensor_apply_kernel", 3000, 4000),
        event("Optimizer.step#AdamW.step", 3000, 4000, annotation=True),
        event("## Call CompiledFxGraph abc ##", 0, 3000, annotation=True),
    ]  # fmt: skip
    profile = analyze(events, 1, 0.004, cuda=True)
    assert profile.by_class == {"matmul": 1.0, "optimizer": 1.0}
    assert profile.idle == 2.0


def test_a_gap_is_put_down_to_what_the_host_did() -> None:
    kernels = [event("a", 0, 100), event("b", 105, 200), event("c", 1200, 1300), event("d", 1800, 1900)]
    host = [event("cudaStreamSynchronize", 150, 900), event(NEXT_BATCH, 1400, 1700)]
    assert idle_gaps(kernels, host) == {"synchronization": 1.0, "loader": 0.5}


def test_waits_in_the_loop_are_a_finding_with_their_cost() -> None:
    """An idle GPU behind ``.item()``: three milliseconds of a step of ten, and the sentence says so."""
    events = [
        event("nvjet_gemm", 0, 4000), event("aten::item", 3900, 7000, DeviceType.CPU),
        event("nvjet_gemm", 7000, 10000), event("cudaStreamSynchronize", 3950, 6900, DeviceType.CPU),
    ]  # fmt: skip
    sentences = findings(analyze(events, 1, 0.010, cuda=True), optimizer="adamw-fused", compiled=True, cuda=True)
    assert any("item" in line and "3.00 ms" in line for line in sentences)
    assert any("idle 3.00 ms" in line and "synchronization" in line for line in sentences)
    quiet = [event("nvjet_gemm", 0, 5000), event("nvjet_gemm", 5000, 10000)]
    sentences = findings(analyze(quiet, 1, 0.010, cuda=True), optimizer="adamw-fused", compiled=True, cuda=True)
    assert not any("item" in line or "idle" in line for line in sentences)


def test_a_profile_is_of_one_step() -> None:
    """Of two recorded ones, of 10 ms each: all but the calls and times of the kernels is per step."""
    host = DeviceType.CPU
    once = [
        event("nvjet_gemm", 0, 4000), event("multi_tensor_apply_kernel", 6000, 10000),
        event(FORWARD, 0, 2000, host), event("autograd::engine::evaluate_function: Mm", 2000, 5000, host),
        event(NEXT_BATCH, 5000, 5500, host), event("cudaMemcpyAsync", 5600, 5700, host),
        event("cudaStreamSynchronize", 7000, 8000, host),
    ]  # fmt: skip
    later = [
        event(e.name, e.time_range.start + 10000, e.time_range.end + 10000, e.device_type) for e in once
    ]  # fmt: skip
    profile = analyze([*once, *later], 2, 0.020, cuda=True)
    assert profile.step == 10.0
    assert [(k.name, k.calls, k.milliseconds) for k in profile.kernels] == [
        ("nvjet_gemm", 2, 8.0), ("multi_tensor_apply_kernel", 2, 8.0)
    ]  # fmt: skip
    assert profile.by_class == {"matmul": 4.0, "optimizer": 4.0}
    assert (profile.forward, profile.backward, profile.loader) == (1.0, 1.5, 0.5)
    assert profile.gaps == {"loader": 2.0}
    assert profile.idle == 2.0
    assert (profile.waits, profile.wait_calls) == (1.0, 1.0)


def test_a_cpus_operators_count_without_what_they_call() -> None:
    host = DeviceType.CPU
    events = [
        event("aten::linear", 0, 5000, host, inside=4000), event("aten::addmm", 500, 4500, host),
        event("aten::copy_", 6000, 8000, host), event("train/loop/trainer.py(90): run", 0, 8000, host),
        event("autograd::engine::evaluate_function: Mm", 0, 5000, host), event(FORWARD, 0, 2000, host),
    ]  # fmt: skip
    events[-1].is_user_annotation = True
    profile = analyze(events, 1, 0.010, cuda=False)
    assert [(kernel.name, kernel.milliseconds) for kernel in profile.kernels] == [
        ("aten::addmm", 4.0), ("aten::copy_", 2.0), ("aten::linear", 1.0)
    ], "the costliest first"  # fmt: skip
    assert list(profile.by_class.items()) == [("matmul", 5.0), ("copies", 2.0)]
    assert (profile.forward, profile.backward) == (2.0, 5.0)


NOTHING = Profile(
    steps=1, step=100.0, kernels=[], by_class={"matmul": 80.0, "element-wise": 20.0}, idle=2.0,
    gaps={"launching": 1.0, "loader": 1.0}, forward=0.0, backward=0.0, loader=0.0, waits=0.0, wait_calls=0.0,
    attention="flash",
)  # fmt: skip
"""A profile just below all that is remarkable."""


@pytest.mark.parametrize(
    ("changes", "optimizer", "sentence"),
    [
        ({}, "muon", None),
        ({"gaps": {"loader": 1.5}}, "muon", "The GPU waits 1.50 ms per step for batches (1.5%)"),
        ({"idle": 3.0}, "muon", "The GPU is idle 3.00 ms per step"),
        ({"by_class": {"element-wise": 30.0, "matmul": 70.0}}, "muon", "Element-wise operations take 30%"),
        ({}, "adamw", "The optimizer launches many small kernels"),
        ({"forward": 20.0, "backward": 50.0}, "muon", "The backward pass takes 2.5 times the forward pass"),
        ({"attention": "not fused"}, "muon", "Attention is not fused"),
        ({"wait_calls": 1.0, "gaps": {"synchronization": 0.5}}, "muon", "waits for the device 1 times per step"),
    ],
)
def test_only_what_stands_out_is_a_finding(changes: dict[str, Any], optimizer: str, sentence: str | None) -> None:
    first, *other_sentences = findings(replace(NOTHING, **changes), optimizer=optimizer, compiled=False, cuda=True)
    assert "of the GPU's time" in first
    assert len(other_sentences) == (sentence is not None)
    assert all(sentence and sentence in other for other in other_sentences)


def test_a_compiled_model_is_not_advised_to_be_compiled_nor_one_without_attention_to_fuse_it() -> None:
    profile = replace(NOTHING, by_class={"element-wise": 100.0}, attention="not fused")
    assert len(findings(profile, optimizer="muon", compiled=True, cuda=True, attention=False)) == 1


def test_overlapping_kernels_leave_no_gap() -> None:
    """The long one still runs where the short one has ended; a gap as short as a launch is none either."""
    kernels = [event("long", 0, 1000), event("short", 100, 200), event("next", 1010, 1100), event("last", 1130, 1200)]
    assert idle_gaps(kernels, []) == {"launching": 0.03}
    copy = event("cudaMemcpyAsync", 1090, 1140, DeviceType.CPU)
    assert idle_gaps(kernels, [copy]) == {"copying": 0.03}


@pytest.mark.parametrize(("written", "whole"), [('{"traceEvents": []}', True), ('{"traceEvents": [', False)])
def test_a_trace_that_was_cut_short_is_a_full_disk(tmp_path: Path, written: str, whole: bool) -> None:
    recorder: Any = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(written))
    path = tmp_path / "trace.json.gz"
    if whole:
        record._export(recorder, path)
        assert gzip.decompress(path.read_bytes()).decode() == written
    else:
        with pytest.raises(OSError, match="No space left on device"):
            record._export(recorder, path)
    assert [left.name for left in tmp_path.iterdir()] == (["trace.json.gz"] if whole else [])


def test_the_steps_behind_the_warm_ones_are_recorded(
    tmp_path: Path, small_shards: Path, small_model: ModelConfig
) -> None:
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=8, device="cpu", steps=3
    )
    profile, _ = record.record(resolve_local(config), tmp_path, lambda *arguments: 0)
    assert profile.steps == 2
    calls = {kernel.name: kernel.calls for kernel in profile.kernels}
    assert calls["aten::embedding_dense_backward"] == 2 * 2 * 2, "two steps of two micro-batches, two embeddings"


def test_a_profile_on_the_cpu(
    command: Callable[..., int], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    small_shards: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    flags = ["--data", str(small_shards), "--model", MODEL, "--micro-batch", "4", "--global-batch", "8"]
    code = command(profile.main, *flags, "--attention", "manual", "--device", "cpu", "--name", "one")
    printed = capfd.readouterr().out
    assert code == 0, printed
    actual = json.loads(Path("runs/one/profile.json").read_text())
    assert actual["steps"] == 2
    assert actual["forward"] > 0
    assert actual["backward"] > 0
    passes = actual["forward"] + actual["backward"]
    assert 0 < actual["by_class"]["matmul"] < passes < actual["step"], "each is within the next"
    assert actual["loader"] > 0
    assert any("not fused" in line for line in actual["findings"])
    assert all("): " not in kernel["name"] for kernel in actual["kernels"])
    trace = json.loads(gzip.decompress(Path("runs/one/trace.json.gz").read_bytes()))
    assert any(e.get("name") == "throughline: forward" for e in trace["traceEvents"])
    assert Path("runs/one/memory.png").stat().st_size > 5000
    client = MlflowClient(store_uri())
    (run,) = client.search_runs(["1"])
    assert run.info.status == "FINISHED"
    assert {f.path for f in client.list_artifacts(run.info.run_id)} >= {"trace.json.gz", "memory.png", "profile.json"}
    assert "already exists. Use another --name." in refused(profile.main, *flags, "--name", "one")


@pytest.mark.slow
def test_the_fused_kernels_of_a_cpu_are_named(tmp_path: Path, small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, device="cpu", compile="whole"
    )
    torch.compiler.reset()
    profile, _ = record.record(resolve_local(config), tmp_path)
    fused = {kernel.name: kernel.kind for kernel in profile.kernels if "cpp_fused" in kernel.name}
    assert {kind for name, kind in fused.items() if "layer_norm" in name} == {"norms and loss"}
    activations = {kind for name, kind in fused.items() if "gelu" in name and "norm" not in name}
    assert activations == {"element-wise"}
    assert any("backward" in name for name in fused), "the backward pass is compiled later, with its first step"


def test_what_torch_fails_to_follow_is_all_that_is_missing(
    tmp_path: Path, small_shards: Path, small_model: ModelConfig
) -> None:
    """An assertion of torch's in the memory timeline, or a torch that does not have it any more."""

    def fail(*_: object) -> int:
        raise AssertionError("expected one storage, got two\nand a page of detail")

    config = TrainConfig.of(data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, device="cpu")
    profile, words = record.record(resolve_local(config), tmp_path, fail)
    assert "memory.png" in words[-1]
    assert words[-1].endswith("AssertionError: expected one storage, got two")
    assert profile.forward > 0
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json.gz", "profile.json"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--name", "full"], "GB free"), (["--out", "file/runs"], "file/runs"),
        (["--stream", "books", "--steps", "8"], "--stream books"),
    ],
)  # fmt: skip
def test_what_cannot_be_profiled_is_refused_and_nothing_is_started(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_shards: Path,
    flags: list[str], named: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    if named == "GB free":
        monkeypatch.setattr(profile, "MAX_TRACE_BYTES", 10**18)
    assert named in refused(profile.main, "--data", str(small_shards), *flags)
    assert not Path("runs").exists() or list(Path("runs").iterdir()) == []


def test_a_disk_that_fills_while_tracing_is_one_sentence(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_shards: Path
) -> None:
    """No file may grow beyond 1.5 MB while the trace is written, which takes several, as on a full disk."""
    monkeypatch.chdir(tmp_path)
    flags = ["--data", str(small_shards), "--model", MODEL, "--micro-batch", "4", "--global-batch", "8"]
    plain = torch.profiler.profile.export_chrome_trace

    def on_a_full_disk(*arguments: Any) -> None:
        old, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard_limit))
        try:
            plain(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (old, hard_limit))

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", on_a_full_disk)
    message = refused(profile.main, *flags, "--device", "cpu", "--name", "full")
    assert "Cannot write the profile to" in message
    assert "No space left on device" in message
    assert not list(Path("runs/full").glob("trace*")), "what is cut short would fill the disk"
    (run,) = MlflowClient(store_uri()).search_runs(["1"])
    assert run.info.status == "FAILED"


@pytest.mark.gpu
def test_a_profile_on_a_gpu_names_the_kernel_that_ran(
    tmp_path: Path, small_shards: Path, small_model: ModelConfig
) -> None:
    model = replace(small_model, width=128, heads=2, context_length=256)
    config = TrainConfig.of(data=str(small_shards), model=model, micro_batch=8, global_batch=8, precision="bf16",
                         attention="flash", device="cuda")  # fmt: skip
    profile, _ = record.record(resolve_local(config), tmp_path)
    assert profile.attention == "flash"
    assert profile.by_class["matmul"] > 0
    assert (tmp_path / "memory.pickle").stat().st_size > 1000
