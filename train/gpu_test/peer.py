"""Steps of nanoGPT's model on the batches, weights and learning rates of a run of this project."""

import itertools

import torch
from torch import nn

from train.config import ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.source import TrainingData
from train.gpu_test import nanogpt
from train.loop.execution import build_model, use_kernel_cache
from train.loop.timing import mark, seconds_between, wait_for
from train.model_config import ModelConfig
from train.models.optimizer import learning_rate, set_learning_rate


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
        inputs, targets = loader.next()
        with context:
            loss = forward(inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), optimization.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        marks.append(mark(device))
    wait_for(marks[-1])
    return list(itertools.starmap(seconds_between, itertools.pairwise(marks))), [loss.item() for loss in losses]
