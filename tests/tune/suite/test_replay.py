"""What a ladder runs and what it refuses, rung by rung, without the runs themselves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trial_rows import changed

from infra.device.hardware import A100, DeviceInfo, cpu_info
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import read_manifest
from train.config import AUTO, Execution, ResolvedConfig, TrainConfig
from train.estimate.memory import peak_with_margin, predict_peak
from train.loop.memory_limit import RESERVED_OUTSIDE_ALLOCATOR
from train.model_config import ModelConfig
from train.resolved import resolve
from tune.config import LadderConfig
from tune.experiment.machines import Machine
from tune.suite.batches import largest_batch
from tune.suite.catalog import AA, SUITES
from tune.suite.checks import check_baseline_speed, check_suits_device
from tune.suite.replay import Ladder
from tune.suite.runs import RungResult
from tune.suite.suites import STREAMING, Rung, Suite, shorten_for_cpu, streaming_rung
from tune.trial.row import TrialRow
from tune.trial.run import TrialRequest, unmeasured_row

Made = Callable[[TrialRequest, ResolvedConfig], TrialRow]


def well(request: TrialRequest, config: ResolvedConfig, **more: Any) -> TrialRow:
    """The row of a run of eight steps at 1,000 tokens per second."""
    speed = {"tokens_per_second": 1000.0, "low": 990.0, "high": 1010.0, "step_seconds": [1.0] * 8}
    return changed(unmeasured_row(request, "ok", "reached 8 steps", 1.0), **speed | more)


def out_of_memory(request: TrialRequest) -> TrialRow:
    return unmeasured_row(request, "oom", "more than that", 1.0)


def climbed(
    ladder: Ladder, made: Made = well
) -> tuple[list[RungResult], list[RungResult], list[tuple[str, ResolvedConfig]]]:
    """Controls, rungs, and the runs in order, by where they stand; each leaves the row that is ``made`` of it."""
    rows: list[TrialRow] = []
    ran: list[tuple[str, ResolvedConfig]] = []
    while request := ladder.request("here", len(rows) + 1, rows, []):
        rows.append(made(request, request.config))
        ran.append((request.key.rpartition("-")[0], request.config))
    assert ladder.is_finished(rows)
    return *ladder.replay_results(rows), ran


@pytest.fixture
def ladder_of(small_shards: Path, tmp_path: Path) -> Callable[..., Ladder]:
    """A ladder of a suite from a config on, on a made-up device."""

    def make(suite: Suite, start: TrainConfig, facts: DeviceInfo | None = None, **options: Any) -> Ladder:
        machine = Machine("here", facts or cpu_info(), 10**12)
        return Ladder(
            LadderConfig(**options), StorageDir.of(tmp_path), (machine,), read_manifest(small_shards),
            resolve(start, machine.device), options.get("memory_limit"), suite,
        )  # fmt: skip

    return make


Make = Callable[..., Ladder]


@pytest.fixture
def base(small_model: ModelConfig) -> TrainConfig:
    return TrainConfig.of(
        model=small_model, micro_batch=4, global_batch=12, steps=10, device="cpu", precision="fp32", compile="off",
        loss="plain", allocator="default",
    )  # fmt: skip


RUNGS = (
    Rung("chunks", {"loss_chunks": 2}),
    Rung("the same", {"loss_chunks": 2}),
    Rung("fails", {"micro_batch": 3}),
    Rung("smaller pieces", {"micro_batch": 2}),
    Rung("larger", {"global_batch": 24}),
    Rung("a GPU's", {"precision": "tf32"}),
    Rung("several", {"workers": 3}),
    Rung("again"),
)


def sizes(measured: list[RungResult]) -> dict[str, int]:
    return {rung.name: rung.config.batch.micro_batch for rung in measured if rung.config}


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_control_stands_around_every_rung_that_ran(cumulative: bool, base: TrainConfig, ladder_of: Make) -> None:
    suite = Suite("mine", "Mine", {"checkpointing": "full"}, RUNGS, cumulative)

    def made(request: TrialRequest, config: ResolvedConfig) -> TrialRow:
        return out_of_memory(request) if config.batch.micro_batch == 3 else well(request, config)

    controls, rungs, ran = climbed(ladder_of(suite, base), made)
    baseline = resolve(base.replace(checkpointing="full"), cpu_info())
    reasons = {rung.name: rung.reason for rung in rungs if rung.reason}
    unchanged = {"the same": "it changes nothing on this device"} if cumulative else {}
    assert reasons.pop("several").startswith("--workers 3 ")
    gpu = {"a GPU's": "TF32 only exists on GPUs; a CPU would compute in fp32"}
    assert reasons == unchanged | {"fails": "oom: more than that"} | gpu
    assert len(controls) == len(rungs) - len(reasons)
    assert all(config == baseline for label, config in ran if label.startswith("control"))
    assert len({label for label, _ in ran}) == len(ran), "each has a place of its own"
    configs = {rung.name: rung.config for rung in rungs}
    cumulative_settings = {"loss_chunks": 2, "micro_batch": 2, "global_batch": 24} if cumulative else {}
    assert configs["again"] == baseline.replace(**cumulative_settings)
    assert configs["larger"] == baseline.replace(**(cumulative_settings | {"global_batch": 24}))
    assert [rung.name for rung in rungs if rung.changes_numerics] == ["larger"], "another global batch"


BF16 = {
    "a100": {"bf16 without scaler", "bf16 activations"},
    "loop": {"mixed precision bf16"},
    "memory": {"bf16", "bf16 activations", "bf16 AdamW", "all together"},
    "precision": {"bf16", "bf16 activations", "bf16 AdamW"},
}
REFUSED = {
    "a100": {"tensor cores", "mixed precision fp16", "the GPU's attention", "max-autotune"},
    "loop": {"tensor cores", "max-autotune", "all together"},
    "memory": {
        "fp16", "TF32", "optimizer on the CPU", "accumulation, checkpointing, fp16",
        "accumulation, checkpointing, fp16, Adafactor", "accumulation, checkpointing, fp16, 8-bit AdamW",
    },
    "precision": {"fp16", "TF32"},
    "kernels": {"coordinate descent", "max-autotune", "max-autotune with CUDA graphs"},
    "accumulation": {"max-autotune"},
    "loader": set[str](),
    "sizes": {"batch 31"},
    "aa": set[str](),
}  # fmt: skip
"""What no CPU can run and, of ``sizes``, what is the baseline again once it is an eighth the size and rounded up."""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_a_cpu_runs_every_rung_but_those_for_other_hardware(
    suite: Suite, native: bool, base: TrainConfig, ladder_of: Make
) -> None:
    short = replace(shorten_for_cpu(suite), seeds=1)
    short = replace(short, base={name: value for name, value in short.base.items() if name != "model"})
    base = base.replace(model=replace(base.model, width=48))  # which 6, 16 and 24 heads divide
    _, rungs, _ = climbed(ladder_of(short, base, DeviceInfo("cpu", "cpu", bf16=native)))
    expected = REFUSED[suite.name] | (set() if native else BF16.get(suite.name, set()))
    assert {rung.name for rung in rungs if rung.reason} == expected


LARGER = (
    Rung("compile", {"checkpointing": "full", "batch": 6}),
    Rung("rate", {"learning_rate": 1e-3}),
    Rung("batch 8", {"batch": 8}),
    Rung("both", {"seed": 1, "micro_batch": 4, "global_batch": 16}),
    Rung("fails when larger", {"seed": 2, "batch": 24}),
    Rung("smaller", {"seed": 3, "batch": 2}),
)


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_change_with_a_larger_batch_is_first_run_at_the_batch_before_it(
    cumulative: bool, base: TrainConfig, ladder_of: Make
) -> None:
    """Where the batch is all that changes, is set by name, or becomes smaller, there is one run."""

    def made(request: TrialRequest, config: ResolvedConfig) -> TrialRow:
        return out_of_memory(request) if config.batch.micro_batch == 24 else well(request, config)

    controls, rungs, ran = climbed(ladder_of(Suite("mine", "Mine", {"batch": 4}, LARGER, cumulative), base), made)
    previous_batch = 16 if cumulative else 4
    assert sizes(rungs) == {
        "compile, same batch": 4, "compile": 6, "rate": 6 if cumulative else 4, "batch 8": 8, "both": 4,
        "fails when larger, same batch": 4, "fails when larger": 24, "smaller": 2,
    }  # fmt: skip
    configs = {rung.name: rung.config for rung in rungs if rung.config}
    same, larger = configs["compile, same batch"], configs["compile"]
    assert same == larger.replace(micro_batch=4, global_batch=4)
    assert configs["fails when larger, same batch"].batch.global_batch == previous_batch, (
        "the same work as the rung before"
    )
    labeled = {rung.name for rung in rungs if rung.changes_numerics}
    assert labeled == {"compile", "batch 8", "both", "fails when larger", "smaller"}
    assert len(controls) == 1 + len([rung for rung in rungs if rung.speed])
    assert len({label for label, _ in ran}) == len(ran), "each has a place of its own"
    assert [label for label, _ in ran[1:5]] == [
        "01-compile-same-batch", "control-01-same-batch", "01-compile", "control-01",
    ]  # fmt: skip


def test_a_fitted_rung_is_first_run_at_the_batch_before_it(base: TrainConfig, ladder_of: Make) -> None:
    limit = predict_peak(resolve(base.replace(micro_batch=64, global_batch=192), cpu_info()).step).total
    suite = Suite("mine", "Mine", {}, (Rung("checkpointing", {"checkpointing": "full"}),))
    controls, (same, larger), _ = climbed(ladder_of(suite, base, memory_limit=limit, fit_batch=True))
    assert larger.config is not None
    assert same.config == larger.config.replace(micro_batch=64, global_batch=192)
    assert sizes(controls)["control"] == 64 < larger.config.batch.micro_batch
    assert (same.name, larger.name) == ("checkpointing, same batch", "checkpointing")
    assert larger.config.execution.checkpointing == "full"


@pytest.mark.parametrize(("beyond", "fitted"), [(RESERVED_OUTSIDE_ALLOCATOR, 64), (RESERVED_OUTSIDE_ALLOCATOR - 1, 56)])
def test_a_gpus_limit_leaves_room_for_what_is_not_predicted(
    beyond: int, fitted: int, base: TrainConfig, ladder_of: Make
) -> None:
    on_gpu = base.replace(device="cuda")
    limit = predict_peak(resolve(on_gpu.replace(micro_batch=64, global_batch=192), A100).step).total + beyond
    suite = Suite("mine", "Mine", {}, (Rung("seed", {"seed": 1}),))
    controls, _, _ = climbed(ladder_of(suite, on_gpu, A100, memory_limit=limit, fit_batch=True))
    assert sizes(controls[:1]) == {"baseline": fitted}


RETRIED = (
    Rung("rate", {"learning_rate": 1e-3}),
    Rung("checkpointing", {"checkpointing": "full"}),
    Rung("seed", {"seed": 1}),
)


def misjudged(largest: int) -> Made:
    """Batches above ``most`` do not fit, whatever was predicted; twice as large ones do with checkpointing."""

    def made(request: TrialRequest, config: ResolvedConfig) -> TrialRow:
        beyond = config.batch.micro_batch > largest * (2 if config.execution.checkpointing == "full" else 1)
        return out_of_memory(request) if beyond else well(request, config)

    return made


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_fitted_batch_that_does_not_fit_is_made_smaller(cumulative: bool, base: TrainConfig, ladder_of: Make) -> None:
    limit = predict_peak(resolve(base.replace(micro_batch=64, global_batch=192), cpu_info()).step).total
    ladder = ladder_of(Suite("mine", "Mine", {}, RETRIED, cumulative), base, memory_limit=limit, fit_batch=True)
    controls, (rate, same, larger, seed), ran = climbed(ladder, misjudged(50))
    assert set(sizes(controls).values()) == {48}, "of 64, 56 and 48"
    assert controls[0].failed_micro_batches == (64, 56)
    assert not controls[0].changes_numerics
    assert rate.failed_micro_batches == (), "what was learnt of the baseline is known of all that is based on it"
    assert same.failed_micro_batches == ()
    micro_batches = sizes([rate, same, larger, seed])
    assert (micro_batches["rate"], micro_batches[same.name]) == (48, 48)
    assert larger.speed
    assert 48 < micro_batches["checkpointing"] <= 100
    assert micro_batches["seed"] == (micro_batches["checkpointing"] if cumulative else 48)
    assert ("control-00-batch-48", 48) in [(label, config.batch.micro_batch) for label, config in ran]
    assert len({label for label, _ in ran}) == len(ran), "each has a place of its own"


def test_smaller_batches_are_tried_a_few_times_only(base: TrainConfig, ladder_of: Make) -> None:
    """And the suite's own batches are never changed."""
    limit = predict_peak(resolve(base.replace(micro_batch=64, global_batch=192), cpu_info()).step).total
    suite = Suite("mine", "Mine", {}, (Rung("checkpointing", {"checkpointing": "full"}),))
    tried: list[int] = []

    def hopeless(request: TrialRequest, config: ResolvedConfig) -> TrialRow:
        tried.append(config.batch.micro_batch)
        return out_of_memory(request)

    with pytest.raises(UserError, match=r"3 smaller batches .* --memory-limit"):
        climbed(ladder_of(suite, base, memory_limit=limit, fit_batch=True), hopeless)
    assert tried == [64, 56, 48, 40]
    tried.clear()
    with pytest.raises(UserError, match="--fit-batch"):
        climbed(ladder_of(replace(suite, base={"batch": 64}), base, memory_limit=limit), hopeless)
    assert tried == [64]


@pytest.mark.parametrize("cumulative", [True, False])
def test_other_numerics_are_run_with_several_seeds(cumulative: bool, base: TrainConfig, ladder_of: Make) -> None:
    """And so is the rung before, at the same batch; losses are paired by seed."""

    def made(request: TrialRequest, config: ResolvedConfig) -> TrialRow:
        loss = (
            3.0
            + config.dataset.seed / 10
            + 0.5 * (config.execution.precision == "bf16")
            + 0.25 * (config.optimization.optimizer == "adafactor")
        )
        return well(request, config, val_loss=loss)

    rungs = (
        Rung("rate", {"checkpointing": "full"}),
        Rung("bf16", {"precision": "bf16", "batch": 8}, changes_numerics=True),
        Rung("Adafactor", {"optimizer": "adafactor"}, changes_numerics=True),
        streaming_rung(["books"]),
    )
    suite = Suite("mine", "Mine", {"batch": 4}, rungs, cumulative, seeds=3)
    modern = DeviceInfo("cpu", "cpu", bf16=True)
    _, measured, ran = climbed(ladder_of(suite, base, modern), made)
    pairs = {rung.name: rung.held_out for rung in measured}
    assert pairs["rate"] == pairs["bf16"] == (), "equal numerics, and another batch, whose loss may differ anyway"
    assert pairs[STREAMING] == (), "other windows"
    assert pairs["bf16, same batch"] == ((3.0, 3.5), (3.1, 3.6), (3.2, 3.7))
    previous_loss = 0.5 * cumulative
    expected = [(3.0 + previous_loss + seed / 10, 3.25 + previous_loss + seed / 10) for seed in range(3)]
    assert [value for pair in pairs["Adafactor"] for value in pair] == pytest.approx(
        [value for pair in expected for value in pair]
    )
    seeded = {label: config.dataset.seed for label, config in ran if "-seed-" in label}
    assert seeded["02-bf16-same-batch-seed-1"] == 1
    assert ("02-bf16-seed-2" if cumulative else "control-00-seed-2") in seeded, "the rung before"
    _, measured, ran = climbed(ladder_of(replace(suite, seeds=1), base, modern), made)
    assert all(rung.held_out == () for rung in measured)
    assert not any("-seed-" in label for label, _ in ran)


def test_a_ladder_ends_where_its_control_does(base: TrainConfig, ladder_of: Make) -> None:
    def made(request: TrialRequest, config: ResolvedConfig) -> TrialRow:
        return out_of_memory(request) if request.name == "control" else well(request, config)

    with pytest.raises(UserError, match=r"control .* after 'chunks': oom"):
        climbed(ladder_of(Suite("mine", "Mine", {}, RUNGS), base), made)


def test_a_ladder_is_continued_on_the_machine_of_its_first_run_from_what_did_not_fail(
    base: TrainConfig, ladder_of: Make
) -> None:
    ladder = ladder_of(Suite("mine", "Mine", {}, RUNGS), base)
    assert ladder.usable_machines({"here", "there"}, []) == {"here", "there"}
    request = ladder.request("here", 1, [], [])
    assert request is not None
    row = well(request, resolve(base, cpu_info()))
    assert ladder.usable_machines({"here", "there"}, [row]) == {"here"}
    assert ladder.is_reusable(row)
    assert ladder.is_reusable(out_of_memory(request))
    assert not ladder.is_reusable(unmeasured_row(request, "failed", "its process died", 1.0))
    other = ladder_of(ladder.suite, base.replace(seed=1)).request("here", 1, [row], [])
    assert other is not None
    assert other.proposal.stage == "baseline", "the row of another config does not count"


def test_the_batch_that_fits_is_the_largest_that_does(base: TrainConfig) -> None:
    for size, next_size in ((1, 2), (7, 8), (8, 16), (24, 32)):
        limit = predict_peak(resolve(base.replace(micro_batch=size, global_batch=3 * size), cpu_info()).step).total
        fitted = largest_batch(resolve(base, cpu_info()).step, limit)
        assert (fitted.micro_batch, fitted.global_batch) == (size, 3 * size), "with its accumulation"
        larger = predict_peak(
            resolve(base.replace(micro_batch=next_size, global_batch=3 * next_size), cpu_info()).step
        ).total
        assert largest_batch(resolve(base, cpu_info()).step, larger).micro_batch == next_size


def test_a_baseline_without_a_speed_says_what_to_do(base: TrainConfig, ladder_of: Make) -> None:
    request = ladder_of(AA, base).request("here", 1, [], [])
    assert request is not None

    config = resolve(base, cpu_info())

    def check(row: TrialRow) -> None:
        check_baseline_speed(row, row.reason)

    check(well(request, config))
    with pytest.raises(UserError, match=r"7 steps in 3\.0 s; a rung needs 8 .* --time-budget 8s or more"):
        check(well(request, config, step_seconds=[9.0, *[0.5] * 6]))
    short = replace(unmeasured_row(request, "failed", "too few", 1.0), ended_too_early=True, step_seconds=[1.5])
    with pytest.raises(UserError, match=r"--time-budget 24s or more"):
        check(short)
    with pytest.raises(UserError, match=r"baseline failed: no kernel"):
        check(unmeasured_row(request, "failed", "no kernel", 1.0))


def test_what_a_machine_cannot_show_is_refused() -> None:
    modern, old = DeviceInfo("cpu", "cpu", bf16=True), DeviceInfo("cpu", "cpu", bf16=False)
    habits = Execution(device="cuda", ablate=("large-pages", "async-loss"))
    check_suits_device({"ablate": ()}, replace(habits, ablate=()), habits, A100)
    with pytest.raises(UserError, match=r"large pages .* CPU memory"):
        check_suits_device({"ablate": ("async-loss",)}, replace(habits, ablate=("async-loss",)), habits, A100)
    tf32 = Execution(precision="tf32")
    check_suits_device({"seed": 1}, tf32, tf32, old)
    bf16, changes = Execution(precision="bf16"), {"precision": "bf16"}
    check_suits_device(changes, bf16, Execution(), modern)
    with pytest.raises(UserError, match="emulates bf16"):
        check_suits_device(changes, bf16, Execution(), old)


@pytest.mark.parametrize("size", [4, 12])
def test_a_micro_batch_that_is_left_open_is_decided_within_the_ladders_limit(
    size: int, base: TrainConfig, ladder_of: Make
) -> None:
    """Once for each config, in the baseline as in a rung that needs less, and the limit is that of every run."""
    open_base = base.replace(micro_batch=AUTO, model=replace(base.model, context_length=256))
    limit = peak_with_margin(resolve(open_base.replace(micro_batch=size, attention="sdpa"), cpu_info()).step)
    suite = Suite("mine", "Mine", {}, (Rung("seed", {"seed": 1}), Rung("leaner", {"checkpointing": "full"})))
    ladder = ladder_of(suite, open_base, memory_limit=limit)
    request = ladder.request("here", 1, [], [])
    assert request
    assert (request.config.batch.micro_batch, request.memory_limit) == (size, limit)
    controls, rungs, _ = climbed(ladder)
    assert sizes(controls) | sizes(rungs) == {"baseline": size, "control": size, "seed": size, "leaner": size}
    assert controls[0].batch == (f"{size} x {12 // size}" if size < 12 else "12")
