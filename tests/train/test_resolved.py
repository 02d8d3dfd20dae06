"""What a config leaves open is decided once, so that run, memory estimate, search space and report agree on it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.device.hardware import A100, DeviceInfo
from infra.errors import UserError
from train.config import ACTIVATION_BUDGETS, Loss, TrainConfig
from train.estimate.memory import peak_with_margin, predict_peak
from train.estimate.recomputation import CHECKPOINTING_BY_TIME
from train.model_config import PRESETS
from train.resolved import resolve, resolve_for_plan
from tune.space import make_space

MIB = 2**20
V100 = DeviceInfo("cuda", "Tesla V100-SXM2-16GB", (7, 0), memory=16_384 * MIB)
T4 = DeviceInfo("cuda", "Tesla T4", (7, 5), memory=15_360 * MIB)
A10G = DeviceInfo("cuda", "NVIDIA A10G", (8, 6), bf16=True, memory=22_500 * MIB)
L4 = DeviceInfo("cuda", "NVIDIA L4", (8, 9), bf16=True, memory=23_034 * MIB)
A100_80 = DeviceInfo("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), bf16=True, memory=81_920 * MIB)
H100 = DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", (9, 0), bf16=True, memory=81_559 * MIB)
OLD_CPU, NEW_CPU = DeviceInfo("cpu", "cpu", memory=10**10), DeviceInfo("cpu", "cpu", bf16=True, memory=10**12)
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
    dropout = values.pop("dropout")
    config = TrainConfig.of(global_batch=8, micro_batch=4, **values)
    return config.replace(model=replace(config.model, dropout=dropout))


@pytest.mark.parametrize(
    ("facts", "limit", "expected"),
    [
        (T4, None, ("fp16", "whole", 32, "fused")),
        (A10G, None, ("bf16-activations", "whole", 60, "fused")),
        (A100, None, ("bf16-activations", "whole", 120, "fused")),
        (A100_80, None, ("bf16-activations", "whole", 240, "fused")),
        (H100, None, ("bf16-activations", "whole", 240, "fused")),
        (H100, 40 * 10**9, ("bf16-activations", "whole", 96, "fused")),
        (OLD_CPU, None, ("fp32", "off", 4, "plain")),
        (NEW_CPU, None, ("fp32", "off", 4, "plain")),
        (NEW_CPU, 4 * 10**9, ("fp32", "off", 1, "fused")),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceInfo) else "",
)
def test_what_a_run_is_that_is_given_no_flags(
    facts: DeviceInfo, limit: int | None, expected: tuple[str, str, int, str]
) -> None:
    """GPT-2 124M at 480 sequences a step; without bf16 in hardware in fp16, and in fp32 on a CPU."""
    resolved = resolve(TrainConfig(), facts.with_memory_limit(limit))
    assert (resolved.execution.device, resolved.execution.attention) == (
        facts.kind,
        "auto" if facts.kind == "cuda" else "sdpa",
    )
    assert (
        resolved.execution.precision,
        resolved.execution.compile,
        resolved.batch.micro_batch,
        resolved.execution.loss,
    ) == expected
    assert peak_with_margin(resolved.step) <= min(facts.memory, limit or facts.memory)
    if resolved.execution.device == "cpu" and resolved.execution.loss == "fused":
        plain = resolve(TrainConfig.of(loss="plain"), facts.with_memory_limit(limit))
        assert (
            plain.batch.micro_batch < resolved.batch.micro_batch
            or peak_with_margin(plain.step) > facts.with_memory_limit(limit).memory
        )


@given(
    st.sampled_from(DEVICES), st.integers(1, 500), st.sampled_from([1, 2, 3]), st.sampled_from([1, 8]),
    st.integers(10**8, 10**11),
)  # fmt: skip
def test_the_micro_batch_is_the_largest_that_fits(
    facts: DeviceInfo, global_batch: int, workers: int, loss_chunks: int, limit: int
) -> None:
    """By the fused loss on a GPU; on a CPU by the plain one, unless the fused one allows more."""
    requested = TrainConfig.of(global_batch=global_batch * workers, workers=workers, loss_chunks=loss_chunks)
    device = facts.with_memory_limit(limit)
    actual = resolve(requested, device)

    def fits(size: int, loss: Loss) -> bool:
        return peak_with_margin(actual.step.replace(micro_batch=size, loss=loss)) <= device.memory

    assert (
        actual.batch.global_batch
        == requested.batch.global_batch
        == actual.batch.micro_batch * actual.batch.accumulation * workers
    )
    sizes = actual.micro_batches
    if actual.execution.device == "cpu":
        sizes = [size for size in sizes if size * 1024 <= 4096]
        assert actual.batch.micro_batch in (1, 2, 3, 4)
    larger = [size for size in sizes if size > actual.batch.micro_batch]
    on_cpu = actual.execution.device == "cpu"
    assert not any(fits(size, "fused") for size in larger)
    assert on_cpu or actual.execution.loss == "fused"
    if on_cpu and loss_chunks == 1:
        assert (actual.execution.loss == "plain") is fits(actual.batch.micro_batch, "plain") or not any(
            fits(size, loss) for size in sizes for loss in ("plain", "fused")
        )
    if not fits(actual.batch.micro_batch, actual.execution.loss):
        least = min(peak_with_margin(actual.step.replace(micro_batch=size)) for size in sizes)
        assert peak_with_margin(actual.step) == least, "what needs least is tried"
    given_size = resolve(requested.replace(micro_batch=global_batch), device)
    assert given_size.batch.micro_batch == global_batch, "a size that was given is never changed"


def test_a_size_that_did_not_fit_is_followed_by_the_next_smaller_one() -> None:
    config = resolve(TrainConfig.of(workers=2, global_batch=24), A100)
    assert (config.batch.micro_batch, config.with_smaller_micro_batch([]), config.with_smaller_micro_batch([1])) == (
        12,
        config,
        None,
    )
    smaller = config.with_smaller_micro_batch([12, 6])
    assert smaller
    assert (smaller.batch.micro_batch, smaller.batch.accumulation, smaller.batch.global_batch) == (4, 3, 24)
    prime = resolve(TrainConfig.of(global_batch=37), A100)
    assert [prime.with_smaller_micro_batch(sizes) for sizes in ([37], [37, 1])] == [
        prime.replace(micro_batch=1),
        None,
    ]


def test_a_continued_run_keeps_what_it_found_and_what_is_given_wins() -> None:
    """The fused loss, too, where now the plain one would fit, which changes the sums."""
    requested = TrainConfig()
    decided = requested.replace(micro_batch=24, loss="fused").to_json()
    actual = resolve(requested, H100, decided)
    assert (actual.batch.micro_batch, actual.execution.loss) == (24, "fused")
    assert actual.requested == requested
    assert resolve(requested.replace(workers=80), H100, decided).batch.micro_batch == 6, "24 is no divisor there"
    explicit = resolve(requested.replace(micro_batch=8, loss="plain"), H100, decided)
    assert (explicit.batch.micro_batch, explicit.execution.loss) == (8, "plain")


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        ({}, A100, "whole"),
        ({}, replace(A100, compile_blocker="Triton is not installed"), "off"),
        ({}, NEW_CPU, "off"),
        ({"device": "cpu"}, A100, "off"),
        ({"fsdp": True, "workers": 2}, A100, "blocks"),
        ({"fsdp": True, "workers": 2, "checkpointing": "selective"}, A100, "off"),
        ({"checkpointing": "budget"}, NEW_CPU, "whole"),
        ({"checkpointing": "budget-75"}, A100, "whole"),
        ({"compile": "off"}, A100, "off"),
        ({"compile": "max-autotune"}, A100, "max-autotune"),
    ],
)
def test_what_is_compiled(settings: dict[str, Any], facts: DeviceInfo, expected: str) -> None:
    assert resolve(TrainConfig.of(**settings), facts).execution.compile == expected


TINY = {"model": PRESETS["tiny"], "global_batch": 8}


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        (TINY, A100, "reduce-overhead"),
        (TINY | {"micro_batch": 2}, A100, "reduce-overhead"),
        (TINY | {"global_batch": 64}, A100, "whole"),
        (TINY, L4, "whole"),
        (TINY, replace(A100, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"), "whole"),
        (TINY, replace(A100, compile_blocker="Triton is not installed"), "off"),
        (TINY, NEW_CPU, "off"),
        (TINY | {"compile": "whole"}, A100, "whole"),
        (TINY | {"workers": 2}, A100, "whole"),
        (TINY | {"mask_books": True}, A100, "whole"),
        (TINY | {"checkpointing": "budget"}, A100, "whole"),
        (TINY | {"precision": "fp32"}, A100, "whole"),
        (TINY | {"offload_optimizer": True}, A100, "whole"),
        ({"global_batch": 1}, H100, "reduce-overhead"),
        ({"global_batch": 2}, H100, "whole"),
    ],
)
def test_cuda_graphs_are_used_where_launches_take_longer_than_kernels(
    settings: dict[str, Any], facts: DeviceInfo, expected: str
) -> None:
    """By formulas for GPT-2 in 16 bits and published rates; without either the whole graph is compiled as ever."""
    assert resolve(TrainConfig.of(**settings), facts).execution.compile == expected


def test_bf16_is_kept_where_bf16_activations_are_not_shown_to_learn_as_well() -> None:
    def precision(saved: dict[str, Any] | None = None, **settings: Any) -> str:
        return resolve(TrainConfig.of(global_batch=8, **settings), H100, saved).execution.precision

    saved = TrainConfig.of(global_batch=8, micro_batch=8, loss="fused").to_json()
    assert precision() == "bf16-activations"
    assert precision(fsdp=True, workers=2) == "bf16"
    assert precision(fp8=True) == "bf16"
    assert precision(saved | {"precision": "bf16"}) == "bf16", "the run that is resumed was trained in bf16"
    assert precision(saved | {"precision": "bf16-activations"}) == "bf16-activations"


@pytest.mark.parametrize("compile", ["whole", "reduce-overhead"])
def test_a_resumed_run_is_compiled_as_before(compile: str) -> None:
    for model in ("tiny", "gpt2-124m"):
        requested = TrainConfig.of(model=PRESETS[model], global_batch=8)
        saved = requested.replace(micro_batch=8, loss="fused", compile=compile).to_json()
        assert resolve(requested, A100, saved).execution.compile == compile
        assert resolve(requested, NEW_CPU, saved).execution.compile == "off", "on another device"


@pytest.mark.parametrize(
    ("limit", "settings", "expected"),
    [
        (40, {"micro_batch": 32}, "none"),
        (12, {"micro_batch": 32}, "selective"),
        (8, {"micro_batch": 32}, "budget-25"),
        (9, {"micro_batch": 16}, "budget-75"),
        (6, {"micro_batch": 32}, "full"),
        (3, {"micro_batch": 32}, "full"),
        (12, {"micro_batch": 32, "compile": "blocks"}, "alternate"),
        (12, {}, "none"),
        (3, {}, "alternate"),
    ],
)
def test_the_least_recomputation_that_fits_is_chosen(limit: int, settings: dict[str, Any], expected: str) -> None:
    """With a micro-batch that was set it is the first by time; else a smaller micro-batch may be faster."""
    requested = TrainConfig.of(checkpointing="auto", precision="bf16", **settings)
    device = A100.with_memory_limit(limit * 10**9)
    resolved = resolve(requested, device)
    assert resolved.execution.checkpointing == expected
    assert resolved.format_setting("checkpointing") == f"{expected} (auto)"
    unsupported = ("selective", *ACTIVATION_BUDGETS) if resolved.execution.compile == "blocks" else ()
    peaks = {
        kind: min(peak_with_margin(resolved.step.replace(checkpointing=kind, loss=loss)) for loss in ("plain", "fused"))
        for kind in CHECKPOINTING_BY_TIME
        if kind not in unsupported
    }
    if settings:
        assert expected == next((kind for kind, peak in peaks.items() if peak <= device.memory), "full")
    again = resolve(requested, A100, resolved.to_json())
    assert again.execution.checkpointing == expected, "a resumed run keeps it, also with more memory"


def test_more_recomputation_takes_less_memory_or_less_time() -> None:
    """So that each kind has a limit for which it is the choice; alternate blocks only where blocks are compiled."""
    step = resolve(TrainConfig.of(micro_batch=32, loss="fused"), A100).step
    kinds = [kind for kind in CHECKPOINTING_BY_TIME if kind != "alternate"]
    peaks = [predict_peak(step.replace(checkpointing=kind)).total for kind in kinds]
    assert peaks == sorted(peaks, reverse=True)
    assert CHECKPOINTING_BY_TIME[0] == "none"
    assert CHECKPOINTING_BY_TIME[-1] == "full"


REFUSED = replace(A100, allocator_blocker="device not ready")
UNUSABLE = replace(A100, gpu_blocker="torch has no kernels for it. Install another")
BROKEN = replace(NEW_CPU, gpu_blocker="CUDA does not start. Check it with nvidia-smi")


def test_expandable_segments_are_used_where_they_work() -> None:
    assert resolve(TrainConfig(), A100).execution.allocator == "expandable"
    assert resolve(TrainConfig(), REFUSED).execution.allocator == "default"
    with pytest.raises(UserError, match=r"--allocator expandable .*device not ready.* --allocator default"):
        resolve(TrainConfig.of(allocator="expandable"), REFUSED)


@pytest.mark.parametrize("facts", [UNUSABLE, BROKEN])
def test_a_gpu_that_cannot_be_used_is_not_replaced_by_the_cpu(facts: DeviceInfo) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"cannot be used: .*--device cpu"):
            resolve(TrainConfig.of(device=device), facts)
    assert resolve(TrainConfig.of(device="cpu"), facts).execution.device == "cpu"
    assert resolve_for_plan(TrainConfig(), UNUSABLE).execution.device == "cuda", "a plan needs no torch for it"


@given(configs, st.sampled_from(DEVICES))
def test_run_estimate_search_and_report_agree(values: dict, facts: DeviceInfo) -> None:
    requested = made(values)
    if requested.execution.device == "cuda" and facts.kind == "cpu":
        with pytest.raises(UserError, match="--device cuda: no GPU found"):
            resolve(requested, facts)
        return
    actual = resolve(requested, facts)
    assert "auto" not in (
        actual.execution.device,
        actual.execution.precision,
        actual.execution.compile,
        actual.execution.loss,
    )
    for given_value, decided in (
        (requested.execution.device, actual.execution.device),
        (requested.execution.precision, actual.execution.precision),
    ):
        assert given_value in ("auto", decided), "what was asked for is not changed"
    assert resolve(actual, facts) == actual, "deciding twice is deciding once"
    assert resolve_for_plan(requested, facts) == actual, "a plan speaks of the same run"
    space = make_space(actual, (f"precision={actual.execution.precision}",))
    control = space.config(space.candidates()[space.micro_batches.index(actual.batch.micro_batch)])
    assert control == actual, "a search's control is that run"
    in_bf16 = predict_peak(actual.step.replace(precision="bf16"))
    assert (predict_peak(actual.step) == in_bf16) is (actual.execution.precision in ("bf16", "fp16")), (
        "memory is predicted for what runs"
    )


def test_attention_within_books_is_flexible_where_it_can_be() -> None:
    masked = TrainConfig.of(mask_books=True)
    assert resolve(masked, A100).execution.attention == "flex"
    assert resolve(masked, NEW_CPU).execution.attention == "sdpa"
    with_dropout = masked.replace(model=replace(masked.model, dropout=0.1))
    assert resolve(with_dropout, A100).execution.attention == "auto", "FlexAttention has no dropout"
    narrow = masked.replace(model=replace(masked.model, heads=96))
    assert resolve(narrow, A100).execution.attention == "auto", "its heads are at least 16 wide"
    assert resolve(masked.replace(model=replace(masked.model, heads=48)), A100).execution.attention == "flex", (
        "as wide as that"
    )


def test_what_a_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"--compile whole .*install gcc"):
        resolve(TrainConfig.of(compile="whole"), replace(A100, compile_blocker="install gcc"))
    plan = resolve_for_plan(TrainConfig.of(compile="whole"), replace(A100, compile_blocker="install gcc"))
    assert plan.execution.compile == "whole", "what only plans needs no compiler"
    with pytest.raises(UserError, match=r"--fp8 .*A100"):
        resolve(TrainConfig.of(fp8=True), A100)
    assert resolve(TrainConfig.of(fp8=True), H100).execution.fp8
    assert resolve(TrainConfig.of(fp8=True), L4).execution.fp8, "the first that has them"
    with pytest.raises(UserError, match="--precision fp16 and --device cpu cannot be combined"):
        resolve(TrainConfig.of(precision="fp16"), NEW_CPU)
    assert resolve_for_plan(TrainConfig.of(device="cuda"), OLD_CPU).execution.precision == "bf16-activations", "an A100"
