"""A kernel that fails, returns NaN or is wrong is noticed before a run: auto takes the next one."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infra.errors import UserError
from train.config import Execution
from train.loop.attention_check import (
    MAX_ERROR,
    choose_attention,
    compare_results,
    compute_results,
    find_fault,
    first_correct_kernel,
)
from train.model_config import ModelConfig
from train.models.attention import AttentionInputs, Mask, manual, sdpa
from train.models.gpt2_builder import GPT2Builder

CPU = torch.device("cpu")
CUDA = Execution(device="cuda", precision="bf16", attention="auto")
MODEL = ModelConfig(layers=1, heads=4, width=64, context_length=300, vocab_size=257, padded_vocab_size=320)
AUTO = ("cudnn", "flash", "manual")


@pytest.fixture(params=[{"attention": "sdpa"}, {"attention": "sdpa", "mask_books": True}], ids=str)
def inputs(request: pytest.FixtureRequest) -> AttentionInputs:
    """Inputs in 16 bits, causal and within books."""
    made = GPT2Builder(MODEL).attention_inputs(Execution(**{"precision": "bf16", **request.param}), CPU)
    assert made
    return made


class WrongBackward(torch.autograd.Function):
    """Changes a gradient as the kernel's fault would."""

    change: Callable[[Tensor], Tensor]

    @staticmethod
    def forward(ctx: object, keys: Tensor) -> Tensor:
        return keys.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return WrongBackward.change(gradients[0].clone())


def wrong_in_backward(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask = None) -> Tensor:
        WrongBackward.change = staticmethod(change)
        return sdpa(q, WrongBackward.apply(k), v, dropout, mask)  # type: ignore[arg-type]

    return attention


def filled(tensor: Tensor, rows: slice, value: float) -> Tensor:
    tensor[:, :, rows] = value
    return tensor


def failing(*_: object) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image is available\nmore")


FAULTS: Mapping[str, tuple[Callable[..., Tensor], str]] = {
    "fails": (failing, "no kernel image is available)"),
    "NaN in one gradient": (wrong_in_backward(lambda k: filled(k, slice(7, 8), float("nan"))), "gradient of the keys"),
    "sign of a gradient": (wrong_in_backward(lambda k: -k), "gradient of the keys"),
    "last rows of a gradient": (wrong_in_backward(lambda k: filled(k, slice(290, 300), 0.0)), "gradient of the keys"),
    "last row of the output": (lambda *args: filled(sdpa(*args).clone(), slice(299, 300), float("inf")), "output"),
    "not causal": (lambda q, k, v, dropout, mask: manual(q, k, v, dropout, torch.ones(300, 300).bool()), "differs"),
}


def largest_error(inputs: AttentionInputs) -> float:
    return max(compare_results(*compute_results(sdpa, inputs), inputs).values())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(inputs: AttentionInputs, fault: str) -> None:
    attention, name = FAULTS[fault]
    assert name in find_fault(attention, inputs, "test")


def test_a_correct_kernel_has_only_rounding_errors(inputs: AttentionInputs) -> None:
    assert largest_error(inputs) < MAX_ERROR / 2
    exact = AttentionInputs(inputs.queries.float(), inputs.keys.float(), inputs.values.float(), inputs.mask)
    assert largest_error(exact) < 1e-4


@pytest.mark.parametrize("time", [1, 2, 128, 129])
def test_any_length_can_be_compared(time: int) -> None:
    inputs = GPT2Builder(replace(MODEL, context_length=time)).attention_inputs(Execution(precision="bf16"), CPU)
    assert inputs
    assert find_fault(sdpa, inputs, "test") == ""


def test_plain_attention_is_computed_in_parts(inputs: AttentionInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a long context would not fit in memory."""
    monkeypatch.setattr("train.loop.attention_check.MAX_SCORES_BYTES", 100_000)
    assert find_fault(sdpa, inputs, "test") == ""
    assert "keys" in find_fault(FAULTS["sign of a gradient"][0], inputs, "test")


def test_auto_takes_the_next_kernel_and_names_both(inputs: AttentionInputs) -> None:
    functions = {"cudnn": FAULTS["NaN in one gradient"][0], "flash": sdpa}
    choice = first_correct_kernel(AUTO, CUDA, inputs, "GPU X", functions)
    assert (choice.kernel, choice.execution.attention) == ("flash", "flash")
    assert "cudnn" in choice.message
    assert choice.message.endswith("using flash instead")
    assert "GPU X" in choice.message
    choice = first_correct_kernel(AUTO, CUDA, inputs, "GPU X", functions | {"flash": failing})
    assert (choice.kernel, choice.execution.attention) == ("manual", "manual")
    assert "flash fails" in choice.message


def test_what_works_stays_as_it_was_configured(inputs: AttentionInputs) -> None:
    choice = first_correct_kernel(AUTO, CUDA, inputs, "GPU X", {"cudnn": sdpa})
    assert (choice.kernel, choice.execution, choice.message) == ("cudnn", CUDA, "")


def test_a_requested_kernel_must_work(inputs: AttentionInputs) -> None:
    execution = replace(CUDA, attention="flash")
    with pytest.raises(UserError, match=r"--attention flash.* on GPU X\. Use --attention auto"):
        first_correct_kernel(["flash"], execution, inputs, "GPU X", {"flash": failing})


def test_out_of_memory_is_no_fault_of_the_kernel(inputs: AttentionInputs) -> None:
    def greedy(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        first_correct_kernel(AUTO, CUDA, inputs, "GPU X", {"cudnn": greedy})


def test_a_cpu_checks_nothing() -> None:
    assert choose_attention(GPT2Builder(MODEL), Execution(attention="sdpa"), CPU).kernel == "sdpa"
