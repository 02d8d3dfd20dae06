"""Steps of nanoGPT's model on the batches, weights and learning rates of a run of this project."""

import itertools

import torch
from torch import nn

from train.config import ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.source import TrainingData
from train.estimate.memory import peak_with_margin
from train.gpu_test import nanogpt
from train.loop.execution import build_model, use_kernel_cache
from train.loop.timing import mark, seconds_between, wait_for
from train.model_config import ModelConfig
from train.models.optimizer import learning_rate, set_learning_rate


def largest_fitting(config: ResolvedConfig, memory: int) -> ResolvedConfig:
    """Return ``config`` with the largest micro-batch, for the same global batch, at which nanoGPT is expected to fit.

    It stores all logits and computes in bf16 by autocast, as this project does with the plain loss.
    """
    precision = "bf16" if config.execution.precision == "bf16-activations" else config.execution.precision
    for size in reversed([size for size in config.micro_batches if size <= config.batch.micro_batch]):
        candidate = config.replace(micro_batch=size)
        if peak_with_margin(candidate.replace(loss="plain", loss_chunks=1, precision=precision).step) <= memory:
            return candidate
    return config.replace(micro_batch=1)


def train_nanogpt(config: ResolvedConfig, data: TrainingData, device: torch.device) -> tuple[list[float], list[float]]:
    """Train nanoGPT's model for the steps of ``config``, compiled where ``config`` is.

    Returns: (seconds of each step, losses in nats).
    """
    assert isinstance(config.model, ModelConfig), "nanoGPT's model is a GPT-2"
    execution, optimization, steps = config.execution, config.optimization, config.total_steps or 0
    torch.set_float32_matmul_precision("highest" if execution.precision == "fp32" else "high")
    model = nanogpt.NanoGPT(config.model).to(device)
    seed = config.dataset.seed
    nanogpt.load_initial_weights(model, build_model(config.model, execution, optimization.optimizer, seed, device))
    optimizer = nanogpt.make_optimizer(
        model, learning_rate=optimization.learning_rate, betas=(optimization.beta1, optimization.beta2),
        decay=optimization.weight_decay, fused=device.type == "cuda",
    )  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=execution.precision == "fp16")
    forward = model
    if execution.compile != "off":
        use_kernel_cache()
        forward = torch.compile(model, dynamic=False)
    loader = BatchLoader(data.windows, WorkerShare(config.batch), device)
    kind = torch.float16 if execution.precision == "fp16" else torch.bfloat16
    context = torch.autocast(device.type, kind, enabled=execution.precision not in ("fp32", "tf32"))
    marks, losses = [mark(device)], []
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(optimization, step, steps, step / steps))
        total = torch.zeros((), device=device)
        for _ in range(config.batch.accumulation):
            inputs, targets = loader.next()
            with context:
                loss = forward(inputs, targets) / config.batch.accumulation
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), optimization.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        marks.append(mark(device))
    wait_for(marks[-1])
    return list(itertools.starmap(seconds_between, itertools.pairwise(marks))), [loss.item() for loss in losses]
