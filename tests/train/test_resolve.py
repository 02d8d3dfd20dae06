"""What a config leaves open is decided once, so that run, memory estimate, search space and report agree on it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from infra.hardware import A100, DeviceFacts
from train.config import TrainConfig
from train.estimate.memory import predict_peak
from train.resolve import resolve, resolve_for_plan
from tune.space import make_space

V100 = DeviceFacts("cuda", "Tesla V100-SXM2-16GB", (7, 0))
T4 = DeviceFacts("cuda", "Tesla T4", (7, 5))
L4 = DeviceFacts("cuda", "NVIDIA L4", (8, 9), bf16=True)
H100 = DeviceFacts("cuda", "NVIDIA H100 80GB HBM3", (9, 0), bf16=True)
OLD_CPU, NEW_CPU = DeviceFacts("cpu", "cpu"), DeviceFacts("cpu", "cpu", bf16=True)
DEVICES = (V100, T4, A100, H100, OLD_CPU, NEW_CPU)

configs = st.builds(
    lambda device, precision, attention, mask, dropout: {
        "device": device, "precision": precision, "attention": attention, "mask_books": mask, "dropout": dropout,
    },
    st.sampled_from(["auto", "cuda", "cpu"]),
    st.sampled_from(["auto", "fp32", "bf16", "bf16-activations"]),
    st.sampled_from(["auto", "sdpa", "manual"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
)  # fmt: skip


def made(values: dict) -> TrainConfig:
    """The config of generated values."""
    dropout = values.pop("dropout")
    config = TrainConfig(global_batch=8, micro_batch=4, **values)
    return replace(config, model=replace(config.model, dropout=dropout))


@pytest.mark.parametrize(
    ("facts", "device", "precision"),
    [
        (V100, "cuda", "fp32"), (T4, "cuda", "fp32"), (A100, "cuda", "bf16"), (H100, "cuda", "bf16"),
        (OLD_CPU, "cpu", "fp32"), (NEW_CPU, "cpu", "fp32"),
    ],
)  # fmt: skip
def test_what_auto_means(facts: DeviceFacts, device: str, precision: str) -> None:
    """Without bf16 in hardware a GPU trains in fp32; a CPU does in any case."""
    found = resolve(TrainConfig(), facts)
    assert (found.device, found.precision) == (device, precision)
    assert found.attention == ("auto" if device == "cuda" else "sdpa")


@given(configs, st.sampled_from(DEVICES))
@settings(deadline=None)
def test_run_estimate_search_and_report_agree(values: dict, facts: DeviceFacts) -> None:
    asked = made(values)
    if asked.device == "cuda" and facts.kind == "cpu":
        with pytest.raises(UserError, match="there is no CUDA GPU"):
            resolve(asked, facts)
        return
    found = resolve(asked, facts)
    assert "auto" not in (found.device, found.precision)
    for given_value, decided in ((asked.device, found.device), (asked.precision, found.precision)):
        assert given_value in ("auto", decided), "what was asked for is not changed"
    assert resolve(found, facts) == found, "deciding twice is deciding once"
    assert resolve_for_plan(asked, facts) == found, "a plan speaks of the same run"
    space = make_space(found, ("precision",))
    control = space.config(space.candidates()[space.sizes.index(found.micro_batch)])
    assert control == found, "a search's control is that run"
    in_bf16 = predict_peak(replace(found, precision="bf16"))
    assert (predict_peak(found) == in_bf16) is (found.precision == "bf16"), "memory is predicted for what runs"


def test_attention_within_books_is_flexible_where_it_can_be() -> None:
    masked = TrainConfig(mask_books=True)
    assert resolve(masked, A100).attention == "flex"
    assert resolve(masked, NEW_CPU).attention == "sdpa"
    with_dropout = replace(masked, model=replace(masked.model, dropout=0.1))
    assert resolve(with_dropout, A100).attention == "auto", "FlexAttention has no dropout"
    narrow = replace(masked, model=replace(masked.model, heads=96))
    assert resolve(narrow, A100).attention == "auto", "its heads are at least 16 wide"
    assert resolve(replace(masked, model=replace(masked.model, heads=48)), A100).attention == "flex", "as wide as that"


def test_what_a_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="--fp8 needs 8-bit matmuls, which NVIDIA A100 does not have"):
        resolve(TrainConfig(fp8=True), A100)
    assert resolve(TrainConfig(fp8=True), H100).fp8
    assert resolve(TrainConfig(fp8=True), L4).fp8, "the first that has them"
    with pytest.raises(UserError, match="--precision fp16 and --device cpu cannot be combined"):
        resolve(TrainConfig(precision="fp16"), NEW_CPU)
    assert resolve_for_plan(TrainConfig(device="cuda"), OLD_CPU).precision == "bf16", "an A100 stands in"
