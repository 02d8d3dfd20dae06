"""Check of the attention kernel before a run: it computes once, and is compared with plain attention in fp32.

A kernel can be available and still fail when it runs, or return NaN in its backward pass alone. Then the run would fail
in its first step, or train on NaN. The check takes milliseconds and little memory, because it has few sequences and
heads: a kernel computes each of them by the same code. Length, head width, type and layout are those of the run.
Dropout is left out, because kernels draw different random numbers. FlexAttention is not checked: its kernel is compiled
with the model, and compiling it a second time would take longer than finding NaN in the first gradient norm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from infra.errors import UserError, first_line
from train.config import Execution
from train.loop.memory import is_oom_error
from train.models.attention import ATTENTION, AttentionFunction, AttentionInputs, manual
from train.models.builder import ModelBuilder

CHECKED_KERNELS = ("sdpa", "flash", "cudnn", "efficient")
"""Values of ``--attention`` whose kernels are not plain operations, and need no compiler."""
MAX_ERROR = 0.05
"""Maximum error of a block relative to its norm. Rounding to 16 bits leaves about 0.01; a wrong sign, scale or mask of
a few rows leaves more than 0.1."""
BLOCK_POSITIONS = 128
"""Positions whose error is computed together, so that a fault in the last rows of a long sequence is noticed."""
MAX_SCORES_BYTES = 2**26
"""Maximum bytes of the attention scores that plain attention computes at a time."""
RESULTS = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


@dataclass(frozen=True)
class AttentionChoice:
    """The attention kernel of a run."""

    kernel: str
    """Name of the kernel: the configured one, or the choice of ``auto``."""
    execution: Execution
    """Settings that build the model with this kernel."""
    message: str = ""
    """Line that names the kernels that failed the check, and the one used instead; empty if none failed."""


def choose_attention(builder: ModelBuilder, execution: Execution, device: torch.device) -> AttentionChoice:
    """Choose the first attention kernel for the model of ``builder`` that passes the check.

    On a CPU nothing is checked, because its kernels depend on neither a driver nor the model of a GPU. Raises
    ``UserError`` if the requested kernel fails, or if a kernel leaves CUDA unusable in this process.
    """
    kernels = builder.attention_kernels(execution, device)
    inputs = builder.attention_inputs(execution, device) if device.type == "cuda" else None
    if inputs is None:
        return AttentionChoice(kernels[0], execution)
    choice = first_correct_kernel(kernels, execution, inputs, torch.cuda.get_device_name(device))
    del inputs
    torch.cuda.empty_cache()  # The memory of the run must not depend on the check.
    return choice


def first_correct_kernel(
    kernels: Sequence[str],
    execution: Execution,
    inputs: AttentionInputs,
    device_name: str,
    functions: Mapping[str, AttentionFunction] = ATTENTION,
) -> AttentionChoice:
    """Return the first of ``kernels`` that computes the ``inputs`` as plain attention does.

    ``functions`` has the kernels by name. Raises ``UserError`` if ``execution`` requests a kernel that does not.
    """
    faults: list[str] = []
    for kernel in kernels:
        fault = ""
        if kernel in CHECKED_KERNELS:
            fault = find_fault(functions[kernel], inputs, f"{kernel} attention on {device_name}")
        if not fault:
            chosen = replace(execution, attention=kernel) if faults else execution
            return AttentionChoice(kernel, chosen, f"{'; '.join(faults)}; using {kernel} instead" if faults else "")
        faults.append(f"attention {kernel} {fault} on {device_name}")
    raise UserError(
        f"--attention {execution.attention} cannot be used: {'; '.join(faults)}. Use --attention auto, which takes the "
        "first kernel that works."
    )


def find_fault(attention: AttentionFunction, inputs: AttentionInputs, name: str) -> str:
    """Run the ``attention`` kernel forward and backward; return what is wrong with it, empty if nothing is.

    Raises ``UserError`` if CUDA cannot be used after a failure of the kernel with this ``name``.
    """
    try:
        results, gradient = compute_results(attention, inputs)
    except RuntimeError as failure:
        if is_oom_error(failure):
            raise
        _check_device_usable(inputs.queries.device, name, failure)
        return f"fails ({first_line(failure)})"
    errors = compare_results(results, gradient, inputs)
    if not all(map(math.isfinite, errors.values())):
        names = [result for result, error in errors.items() if not math.isfinite(error)]
        return f"returns NaN or infinite values ({', '.join(names)})"
    result, error = max(errors.items(), key=lambda item: item[1])
    return f"is wrong: its {result} differs from plain attention by {error:.0%}" if error > MAX_ERROR else ""


def compute_results(attention: AttentionFunction, inputs: AttentionInputs) -> tuple[list[Tensor], Tensor]:
    """Compute attention and its gradients.

    Returns: (the results in the order of ``RESULTS``, the gradient of the output that they are computed from).
    """
    q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in inputs.tensors]
    output = attention(q, k, v, 0.0, inputs.mask)
    gradient = torch.randn_like(output)
    results = [output.detach(), *torch.autograd.grad(output, leaves, gradient)]
    if output.is_cuda:
        torch.cuda.synchronize(output.device)  # A kernel's failure is reported when the host waits for it.
    return results, gradient


def compare_results(results: Sequence[Tensor], gradient: Tensor, inputs: AttentionInputs) -> dict[str, float]:
    """Return the largest relative error of a block by result, compared with plain attention in fp32; NaN if a value is
    not finite."""
    expected = _plain_attention(inputs, gradient)
    errors = torch.stack([_largest_error(*pair) for pair in zip(results, expected, strict=True)])
    return dict(zip(RESULTS, errors.tolist(), strict=True))


def _plain_attention(inputs: AttentionInputs, gradient: Tensor) -> list[Tensor]:
    """Compute the output and the gradients by plain attention in fp32, for as many queries at a time as memory
    allows."""
    queries, keys, values = (tensor.detach().float() for tensor in inputs.tensors)
    batch, heads, time, _ = queries.shape
    positions = torch.arange(time, device=queries.device)
    rows_at_a_time = max(1, MAX_SCORES_BYTES // (4 * batch * heads * time))
    outputs, query_gradients = [], []
    sums = [torch.zeros_like(keys), torch.zeros_like(values)]
    for rows in positions.split(rows_at_a_time):
        q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in (queries[:, :, rows], keys, values)]
        mask = positions <= rows[:, None] if inputs.mask is None else inputs.mask[..., rows, :]
        output = manual(q, k, v, 0.0, mask)
        of_queries, *others = torch.autograd.grad(output, leaves, gradient[:, :, rows].float())
        outputs.append(output.detach())
        query_gradients.append(of_queries)
        for total, part in zip(sums, others, strict=True):
            total += part
    return [torch.cat(outputs, 2), torch.cat(query_gradients, 2), *sums]


def _largest_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the largest relative error of a block of positions; NaN if a value of ``actual`` is not finite."""
    missing = -actual.size(2) % BLOCK_POSITIONS
    difference, reference = (
        F.pad(tensor, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK_POSITIONS)).square().sum((0, 1, 3, 4)).sqrt()
        for tensor in (actual.float() - expected, expected)
    )
    block_values = actual.numel() * BLOCK_POSITIONS / actual.size(2)
    # Inputs have a deviation of 1, so that results this small are rounding, such as a gradient that is exactly 0.
    return (difference / reference.clamp_min(1e-3 * math.sqrt(block_values))).max()


def _check_device_usable(device: torch.device, name: str, failure: RuntimeError) -> None:
    """Raise ``UserError`` if the kernel's ``failure`` left CUDA unusable, as an illegal memory access does."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise UserError(
            f"{name} crashed ({first_line(failure)}), and CUDA cannot be used in this process any more. Use another "
            "--attention, such as efficient or manual."
        ) from failure
