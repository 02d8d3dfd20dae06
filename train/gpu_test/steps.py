"""The steps of the GPU test, each of which shows one thing that only a GPU can show.

In: the model's name, and the values of earlier steps by the name of the step. Out: the outcome, a line on what was
found, advice on a failure, and the measured values. On a CPU the steps run, too, as far as there is something to run.
"""

import math
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infra import ceilings
from infra.cli.units import GB
from infra.device.gpu import read_gpu
from infra.device.hardware import DeviceInfo
from infra.device.host import is_wsl
from infra.errors import UserError, first_line
from train.config import Cycle, ResolvedConfig, TrainConfig
from train.estimate.memory import predict_peak
from train.gpu_test.data import open_random_data
from train.gpu_test.peer import largest_fitting, train_nanogpt
from train.loop import memory
from train.loop.attention_check import MAX_ERROR, compare_results, compute_results
from train.loop.execution import autocast_context, build_model, compile_model, configure_allocator
from train.loop.trainer import Trainer
from train.model_config import ModelConfig, parse_model
from train.models.attention import ATTENTION, KERNELS, AttentionInputs
from train.models.builders import builder_of
from train.resolved import resolve

Values = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What the steps have in common."""

    model: str
    """Name of the model, as in ``--model``."""
    info: DeviceInfo
    """Description of the GPU, or of the CPU for a rehearsal."""
    values: Values = field(default_factory=dict)
    """Values of the earlier steps, by the name of the step."""

    @property
    def device(self) -> torch.device:
        """The device to test."""
        return torch.device("cuda", 0) if self.info.kind == "cuda" else torch.device("cpu")

    @property
    def device_name(self) -> str:
        """Name of the device that the step runs on."""
        return torch.cuda.get_device_name(0) if self.info.kind == "cuda" else self.info.name

    @property
    def is_simulated(self) -> bool:
        """Whether the GPU computes nothing."""
        return bool(self.values.get("device", {}).get("simulated"))

    def automatic_config(self) -> ResolvedConfig:
        """Return ten steps of what ``train.run`` would do here, with one micro-batch per step to be short."""
        requested = TrainConfig.of(
            data="", model=parse_model(self.model), steps=TRAIN_STEPS, cycle=Cycle(TRAIN_STEPS, 0), keep_checkpoints=0
        )
        config = resolve(requested, self.info)
        return config.replace(global_batch=config.batch.micro_batch)


TRAIN_STEPS = 10
COMPARED_LAYERS, COMPARED_SEQUENCES = 2, 4
MAX_LOSS_DIFFERENCE = 0.03
"""Maximum difference in nats of two losses of the same batch and weights: bf16 has 8 bits, and ten steps add to it."""
MAX_GRADIENT_ERROR = 0.05
"""Maximum difference of two gradients of a weight in 16 bits, relative to their norm."""
CAP_BYTES = 2**28
"""Bytes of the cap that is tried, and half of what is then allocated."""


def examine_gpu(setup: Setup) -> Result:
    """Measure the maximum rates, try the cap on memory, and name what does not work on the GPU and is done without.

    The driver, the build of torch, NVML by UUID, and one expandable and one pinned allocation have been tried when the
    GPU was described.
    """
    info, device = setup.info, setup.device
    configure_allocator("default" if info.allocator_blocker else "expandable")
    measured: Values = {"device": setup.device_name, "software": _software()}
    notes = {
        "no expandable segments": info.allocator_blocker, "no pinned memory": info.pinned_blocker,
        "NVML": info.nvml_failure, "memory is capped": info.memory_cap_reason, "no torch.compile": info.compile_blocker,
    }  # fmt: skip
    problem = _cap_problem(device) if device.type == "cuda" else ""
    measured["notes"] = {name: reason for name, reason in notes.items() if reason}
    measured["simulated"] = device.type == "cuda" and not _computes(device)
    if measured["simulated"]:
        rates = "it computes nothing, so it is simulated"
    else:
        measured["matmul"] = ceilings.measure_matmul_rates(device)
        measured["copy"] = ceilings.measure_copy_rates(device)
        kind, best = max(measured["matmul"].items(), key=lambda item: item[1])
        rates = f"{best / 1e12:,.1f} TFLOP/s ({kind}), {measured['copy']['device_to_device'] / 1e9:,.0f} GB/s"
    capability = ".".join(map(str, info.capability))
    summary = f"{info.name}, {info.memory / GB:.1f} GB, capability {capability}; {rates}"
    advice = "; ".join(filter(None, [problem, *(f"{name}: {reason}" for name, reason in measured["notes"].items())]))
    return _result("failed" if problem else "passed", summary, advice, measured)


def check_attention(setup: Setup) -> Result:
    """Compare each attention kernel with plain attention, and time it at the micro-batch of the automatic config."""
    config, device = setup.automatic_config(), setup.device
    builder, execution = builder_of(config.model), replace(config.execution, attention="sdpa")
    inputs = builder.attention_inputs(execution, device)
    shape = config.model
    assert inputs, "the test trains a GPT-2"
    assert isinstance(shape, ModelConfig)
    real = (config.batch.micro_batch, shape.context_length, 3, shape.heads, shape.width // shape.heads)
    q, k, v = torch.randn(real, device=device, dtype=inputs.queries.dtype).permute(2, 0, 3, 1, 4).unbind(0)
    rows: dict[str, Values] = {}
    for kernel in KERNELS if device.type == "cuda" else ["sdpa"]:
        try:
            errors = compare_results(*compute_results(ATTENTION[kernel], inputs), inputs)
            worst = max(errors.values(), key=lambda error: math.inf if math.isnan(error) else error)
            seconds = ceilings.measure_seconds(
                lambda kernel=kernel: compute_results(ATTENTION[kernel], AttentionInputs(q, k, v)), device
            )
            rows[kernel] = {"error": worst, "milliseconds": 1000 * seconds, "works": worst <= MAX_ERROR}
        except RuntimeError as failure:
            rows[kernel] = {"reason": first_line(failure), "works": False}
    texts = [
        f"{kernel} {row['milliseconds']:.1f} ms (error {row['error']:.1%})" if row["works"] else f"{kernel} fails"
        for kernel, row in rows.items()
    ]
    working = [kernel for kernel, row in rows.items() if row["works"]]
    wrong = [kernel for kernel, row in rows.items() if "error" in row and not row["works"]]
    advice = f"do not use --attention {' or '.join(wrong)} here; auto leaves it out" if wrong else ""
    if not working:
        advice = "no fused attention works: install another build of torch; until then auto uses plain operations"
    measured = {"device": setup.device_name, "micro_batch": config.batch.micro_batch, "kernels": rows}
    if setup.is_simulated:
        measured["kernels"] = {kernel: {"works": row["works"]} for kernel, row in rows.items()}
        return _result("not compared", f"{', '.join(rows)} ran; a simulated GPU computes no attention", "", measured)
    return _result("failed" if advice else "passed", "; ".join(texts), advice, measured)


def check_compiled(setup: Setup) -> Result:
    """Compare two compiled layers with the same layers in eager execution: the loss, and all gradients."""
    config, device = setup.automatic_config(), setup.device
    config = config.replace(
        model=replace(config.model, layers=COMPARED_LAYERS), micro_batch=COMPARED_SEQUENCES,
        global_batch=COMPARED_SEQUENCES,
    )  # fmt: skip
    mode = config.execution.compile
    eager, eager_gradients = _loss_and_gradients(config.replace(compile="off"), device)
    compiled, gradients = _loss_and_gradients(config, device)
    errors = {
        name: float((gradients[name] - expected).norm() / expected.norm().clamp_min(1e-12))
        for name, expected in eager_gradients.items()
    }
    name, worst = max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    measured = {
        "device": setup.device_name, "compile": mode, "eager_loss": eager, "compiled_loss": compiled,
        "largest_gradient_error": worst, "parameter": name,
    }  # fmt: skip
    losses = f"loss {compiled:.4f}, eager {eager:.4f}"
    summary = f"compile {mode}: {losses}; gradients differ by at most {worst:.1%} ({name})"
    if setup.is_simulated:
        return _result("not compared", f"compile {mode} ran; a simulated GPU computes no loss", "", measured)
    is_equal = abs(compiled - eager) <= MAX_LOSS_DIFFERENCE and worst <= MAX_GRADIENT_ERROR
    advice = "" if is_equal else "use --compile off, and report this with the JSON"
    return _result("passed" if is_equal else "failed", summary, advice, measured)


def train_automatic(setup: Setup) -> Result:
    """Train ten steps of the automatic config, and compare its memory with the prediction."""
    config = setup.automatic_config()
    with tempfile.TemporaryDirectory() as folder:
        failed: list[int] = []
        while True:
            config = config.replace(data=folder)
            data = open_random_data(Path(folder), config)
            trainer = Trainer(config, data)
            result = trainer.run()
            if result.outcome != "oom" or not (smaller := _smaller(config)):
                break
            failed.append(config.batch.micro_batch)
            config = smaller
            torch.cuda.empty_cache()
    predicted, process = predict_peak(config.step).total, result.memory.process
    speed = result.throughput.tokens_per_second if result.throughput and not setup.is_simulated else None
    rates = setup.values.get("device", {}).get("matmul", {})
    ceiling = ceilings.find_matmul_rate({"matmul": rates}, config.execution.precision)
    share = result.flops_per_second / ceiling if result.flops_per_second and ceiling else None
    losses = [loss for report in trainer.times.reports for loss in report.step_losses]
    measured = {
        "device": setup.device_name, "outcome": result.outcome, "reason": result.reason, "config": _settings(config),
        "failed_micro_batches": failed, "attention": result.attention, "tokens_per_second": speed,
        "share_of_ceiling": share, "predicted_bytes": predicted, "process_bytes": process,
        "allocated_bytes": result.memory.allocated, "reserved_bytes": result.memory.reserved,
        "first_step_seconds": result.first_step_seconds, "losses": losses,
    }  # fmt: skip
    speed_text = f"{speed:,.0f} tokens/s" if speed else "no speed"
    if share:
        speed_text += f", {share:.0%} of the measured matmul rate"
    summary = (
        f"micro-batch {config.batch.micro_batch}, {config.execution.precision}, attention {result.attention}: "
        f"{speed_text}; {process / GB:.1f} GB (predicted {predicted / GB:.1f} GB)"
    )
    if result.outcome != "finished":
        advice = "set a smaller --micro-batch, and report this with the JSON"
        return _result("failed", f"{result.outcome}: {result.reason}", advice, measured)
    if setup.is_simulated:
        del measured["losses"], measured["first_step_seconds"]
        return _result("not compared", f"{summary}; a simulated GPU has no speed", "", measured)
    return _result("passed", summary, "", measured)


def compare_with_nanogpt(setup: Setup) -> Result:
    """Train nanoGPT's model from the same weights on the same batches, and compare speed and losses."""
    ours = setup.values.get("train")
    if not ours or ours.get("outcome") != "finished":
        raise UserError("There is nothing to compare nanoGPT with, because the ten steps did not finish.")
    settings = ours["config"]
    config = setup.automatic_config().replace(
        micro_batch=settings["micro_batch"], global_batch=settings["micro_batch"], precision=settings["precision"]
    )
    device = setup.device
    with tempfile.TemporaryDirectory() as folder:
        config = largest_fitting(config.replace(data=folder), setup.info.memory)
        while True:
            try:
                seconds, losses = train_nanogpt(config, open_random_data(Path(folder), config), device)
                break
            except torch.OutOfMemoryError as failure:
                shortage = first_line(failure)
            if (smaller := config.with_smaller_micro_batch([config.batch.micro_batch])) is None:
                return _result("failed", f"nanoGPT's model does not fit: {shortage}", "use a smaller --model", {})
            config = smaller
            memory.reset_after_oom(config.execution)
    batch = f"micro-batch {config.batch.micro_batch} x {config.batch.accumulation}"
    measured: Values = {
        "device": setup.device_name, "micro_batch": config.batch.micro_batch, "step_seconds": seconds, "losses": losses,
    }  # fmt: skip
    if setup.is_simulated:
        text = f"nanoGPT's model ran with {batch}; a simulated GPU has neither speeds nor losses"
        return _result("not compared", text, "", {name: measured[name] for name in ("device", "micro_batch")})
    steady = sorted(seconds[3:])
    peer_speed = config.step_tokens / steady[len(steady) // 2]
    ratio = ours["tokens_per_second"] / peer_speed if ours["tokens_per_second"] else None
    difference = max(abs(a - b) for a, b in zip(ours["losses"], losses, strict=True))
    measured |= {"tokens_per_second": peer_speed, "ratio": ratio, "largest_loss_difference": difference}
    speed_text = f"x{ratio:.2f} of nanoGPT's {peer_speed:,.0f} tokens/s ({batch})" if ratio else "no ratio of speeds"
    summary = f"{speed_text}; losses of {len(losses)} steps differ by at most {difference:.4f} nats"
    is_equal = difference <= MAX_LOSS_DIFFERENCE
    advice = "" if is_equal else "the losses differ by more than rounding; report this with the JSON"
    return _result("passed" if is_equal else "failed", summary, advice, measured)


STEPS: dict[str, Callable[[Setup], Result]] = {
    "device": examine_gpu,
    "attention": check_attention,
    "compile": check_compiled,
    "train": train_automatic,
    "nanogpt": compare_with_nanogpt,
}


def _smaller(config: ResolvedConfig) -> ResolvedConfig | None:
    """Return the config with half the micro-batch; None if it is 1."""
    half = config.batch.micro_batch // 2
    return config.replace(micro_batch=half, global_batch=half) if half else None


def _loss_and_gradients(config: ResolvedConfig, device: torch.device) -> tuple[float, dict[str, Tensor]]:
    """Compute one forward and backward pass.

    Returns: (the loss, the gradients in fp32 by name).
    """
    torch.set_float32_matmul_precision("highest" if config.execution.precision == "fp32" else "high")
    module = build_model(config.model, config.execution, config.optimization.optimizer, config.dataset.seed, device)
    forward = compile_model(module, config.execution)
    torch.manual_seed(config.dataset.seed)
    shape = (config.batch.micro_batch, config.model.context_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape).to(device)
    with autocast_context(config.execution):
        loss = forward(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}


def _cap_problem(device: torch.device) -> str:
    """Return why a cap on this process's memory does not hold; empty if it does."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total, device)
    try:
        torch.empty(2 * CAP_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return ""
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return "the cap on GPU memory does not hold; --memory-limit cannot be relied on"


def _computes(device: torch.device) -> bool:
    """Return whether the device computes: the product of two matrices of ones."""
    ones = torch.ones(64, 64, device=device)
    return (ones @ ones).tolist() == [[64.0] * 64] * 64


def _software() -> dict[str, str]:
    cudnn, state = torch.backends.cudnn.version(), read_gpu()
    versions = {
        "torch": torch.__version__, "CUDA": torch.version.cuda, "cuDNN": cudnn and str(cudnn),
        "driver": state and state.driver,
        "system": "WSL2" if is_wsl() else platform.system(),
    }  # fmt: skip
    return {name: value for name, value in versions.items() if value}


def _settings(config: ResolvedConfig) -> Values:
    """Return the settings that decide speed and memory; the rest, such as paths, does not belong into a report."""
    return {
        "model": config.model.text, "micro_batch": config.batch.micro_batch, "precision": config.execution.precision,
        "compile": config.execution.compile, "loss": config.execution.loss, "allocator": config.execution.allocator,
        "optimizer": config.optimization.optimizer,
    }  # fmt: skip


def _result(outcome: str, summary: str, advice: str, values: Values) -> Result:
    return {"outcome": outcome, "summary": summary, "advice": advice, "values": values}
