"""What a ladder runs and what it refuses, rung by rung, without the runs themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.hardware import A100, DeviceFacts, cpu_facts
from infra.place import Place, WorkingCopy
from infra.schema import to_json
from infra.storage import write_json
from infra.tracking.key import RunKey
from pipeline.shards import Manifest, read_manifest
from train.config import TrainConfig, config_from_json
from train.estimate.memory import predict_peak
from train.ladder import runner
from train.ladder.runner import Ladder, Measured, largest_batch, refuse_short, refuse_unsuited, worker_reason
from train.ladder.suites import STREAMING, SUITES, Rung, Suite, short_form, streamed
from train.loop.memory_limit import UNMEASURED
from train.model_config import ModelConfig
from train.result import RunResult

Make = Callable[..., RunResult]


KEY = RunKey("", "", "")


def in_folder(folder: Path) -> WorkingCopy:
    """Where a ladder on this machine writes."""
    return WorkingCopy(Place.of(folder), folder)


@dataclass(frozen=True)
class MadeUp(Ladder):
    """A ladder whose runs take no time and have this result."""

    result: RunResult | None = None
    ran: list[tuple[str, TrainConfig]] = field(default_factory=list)

    def _measure(self, name: str, rung: Rung, config: TrainConfig) -> Measured:
        self.ran.append((name, config))
        assert self.result is not None
        fails = config.micro_batch == 3
        return Measured(
            rung.name, name, config.to_json(), None if fails else self.result, "oom" * fails,
            rung.changes_numerics,
        )  # fmt: skip


@pytest.fixture
def base(small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(model=small_model, micro_batch=4, global_batch=12, steps=10, device="cpu", precision="fp32")


RUNGS = (
    Rung("chunks", {"loss_chunks": 2}),
    Rung("the same", {"loss_chunks": 2}),
    Rung("fails", {"micro_batch": 3}),
    Rung("smaller pieces", {"micro_batch": 2}),
    Rung("larger", {"global_batch": 24}),
    Rung("a GPU's", {"precision": "tf32"}),
    Rung("again"),
)


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return read_manifest(small_shards)


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_control_stands_around_every_rung_that_ran(
    cumulative: bool, base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    said: list[str] = []
    suite = Suite("mine", "Mine", {"checkpointing": "full"}, RUNGS, cumulative)
    made = MadeUp(
        in_folder(tmp_path),
        KEY,
        suite,
        base,
        manifest,
        cpu_facts(),
        say=said.append,
        result=make_result(),
    )
    controls, rungs = made.run()
    baseline = replace(base, checkpointing="full")
    reasons = {rung.name: rung.reason for rung in rungs if rung.reason}
    unchanged = {"the same": "here it changes nothing"} if cumulative else {}
    assert reasons == unchanged | {"fails": "oom", "a GPU's": "TF32 is for GPUs; a CPU computes the same fp32"}
    assert len(controls) == 1 + len(rungs) - len(reasons)
    assert all(config == baseline for name, config in made.ran if name.startswith("control"))
    assert len({name for name, _ in made.ran}) == len(made.ran), "each has a folder of its own"
    configs = {rung.name: rung.config for rung in rungs}
    kept = {"loss_chunks": 2, "micro_batch": 2, "global_batch": 24} if cumulative else {}
    assert configs["again"] == replace(baseline, **kept).to_json()
    assert configs["larger"] == replace(baseline, **(kept | {"global_batch": 24})).to_json()
    assert [rung.name for rung in rungs if rung.changes_numerics] == ["larger"], "another global batch"
    assert len(said) == len(unchanged) + 1


BF16 = {
    "a100": {"bf16 without scaler", "bf16 activations"},
    "loop": {"mixed precision bf16"},
    "memory": {"bf16", "bf16 activations", "bf16 AdamW", "all together"},
    "precision": {"bf16", "bf16 activations", "bf16 AdamW"},
}
REFUSED = {
    "a100": {"tensor cores", "mixed precision fp16", "the GPU's attention", "max-autotune"},
    "loop": {"tensor cores", "max-autotune", "all together"},
    "memory": {"fp16", "TF32"},
    "precision": {"fp16", "TF32"},
    "kernels": {"coordinate descent", "max-autotune", "max-autotune with CUDA graphs"},
    "accumulation": {"max-autotune"},
    "loader": set[str](),
    "sizes": {"batch 31"},
    "aa": set[str](),
}
"""What no CPU can run and, of ``sizes``, what is the baseline again once it is an eighth the size and rounded up."""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_a_cpu_runs_every_rung_but_those_for_other_hardware(
    suite: Suite, native: bool, base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:  # fmt: skip
    short = short_form(suite)
    short = replace(short, base={name: value for name, value in short.base.items() if name != "model"})
    base = replace(base, model=replace(base.model, width=48))  # which 6, 16 and 24 heads divide
    cpu = DeviceFacts("cpu", "cpu", bf16=native)
    made = MadeUp(
        in_folder(tmp_path),
        KEY,
        short,
        base,
        manifest,
        cpu,
        result=make_result(),
    )
    _, rungs = made.run()
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
    cumulative: bool, base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    """Where the batch is all that changes, is set by name, or becomes smaller, there is one run."""

    @dataclass(frozen=True)
    class TooLarge(MadeUp):
        def _measure(self, name: str, rung: Rung, config: TrainConfig) -> Measured:
            measured = super()._measure(name, rung, config)
            return replace(measured, result=None, reason="oom") if config.micro_batch == 24 else measured

    suite = Suite("mine", "Mine", {"batch": 4}, LARGER, cumulative)
    made = TooLarge(
        in_folder(tmp_path),
        KEY,
        suite,
        base,
        manifest,
        cpu_facts(),
        result=make_result(),
    )
    controls, rungs = made.run()
    batches = {rung.name: rung.config["micro_batch"] for rung in rungs}
    before = 16 if cumulative else 4
    assert batches == {
        "compile, same batch": 4, "compile": 6, "rate": 6 if cumulative else 4, "batch 8": 8, "both": 4,
        "fails when larger, same batch": 4, "fails when larger": 24, "smaller": 2,
    }  # fmt: skip
    configs = {rung.name: rung.config for rung in rungs}
    same, larger = configs["compile, same batch"], configs["compile"]
    assert {name for name in same if same[name] != larger[name]} == {"micro_batch", "global_batch"}
    assert configs["fails when larger, same batch"]["global_batch"] == before, "the same work as the rung before"
    labelled = {rung.name for rung in rungs if rung.changes_numerics}
    assert labelled == {"compile", "batch 8", "both", "fails when larger", "smaller"}
    assert len(controls) == 1 + len([rung for rung in rungs if rung.speed])
    assert len({name for name, _ in made.ran}) == len(made.ran), "each has a folder of its own"
    assert [name for name, _ in made.ran[1:5]] == [
        "01-compile-same-batch", "control-01-same-batch", "01-compile", "control-01",
    ]  # fmt: skip


def test_a_fitted_rung_is_first_run_at_the_batch_before_it(
    base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    limit = predict_peak(replace(base, micro_batch=64, global_batch=192)).total
    suite = Suite("mine", "Mine", {}, (Rung("checkpointing", {"checkpointing": "full"}),))
    made = MadeUp(
        in_folder(tmp_path), KEY, suite, base, manifest, memory_limit=limit, fit=True,
        facts=DeviceFacts("cpu", "cpu"), result=make_result(),
    )  # fmt: skip
    controls, (same, larger) = made.run()
    assert controls[0].config["micro_batch"] == same.config["micro_batch"] == 64 < larger.config["micro_batch"]
    assert (same.name, larger.name) == ("checkpointing, same batch", "checkpointing")
    assert same.config["checkpointing"] == larger.config["checkpointing"] == "full"


@pytest.mark.parametrize(("beyond", "fitted"), [(UNMEASURED, 64), (UNMEASURED - 1, 56)])
def test_a_gpus_limit_leaves_room_for_what_is_not_predicted(
    beyond: int, fitted: int, base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    on_gpu = replace(base, device="cuda")
    limit = predict_peak(replace(on_gpu, micro_batch=64, global_batch=192)).total + beyond
    made = MadeUp(
        in_folder(tmp_path), KEY, Suite("mine", "Mine", {}, (Rung("seed", {"seed": 1}),)), on_gpu, manifest,
        memory_limit=limit, fit=True, facts=A100, result=make_result(),
    )  # fmt: skip
    controls, _ = made.run()
    assert controls[0].config["micro_batch"] == fitted


@dataclass(frozen=True)
class Misjudged(MadeUp):
    """One in which batches above ``most`` do not fit, whatever was predicted."""

    most: int = 0

    def _measure(self, name: str, rung: Rung, config: TrainConfig) -> Measured:
        measured = super()._measure(name, rung, config)
        too_large = config.micro_batch > self.most * (2 if config.checkpointing == "full" else 1)
        return replace(measured, result=None, reason="over_limit: more than that") if too_large else measured


RETRIED = (
    Rung("rate", {"learning_rate": 1e-3}),
    Rung("checkpointing", {"checkpointing": "full"}),
    Rung("seed", {"seed": 1}),
)


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_fitted_batch_that_does_not_fit_is_made_smaller(
    cumulative: bool, base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    limit = predict_peak(replace(base, micro_batch=64, global_batch=192)).total
    said: list[str] = []
    made = Misjudged(
        in_folder(tmp_path), KEY, Suite("mine", "Mine", {}, RETRIED, cumulative), base, manifest,
        memory_limit=limit, fit=True, say=said.append, facts=DeviceFacts("cpu", "cpu"), result=make_result(), most=50,
    )  # fmt: skip
    controls, (rate, same, larger, seed) = made.run()
    assert {control.config["micro_batch"] for control in controls} == {48}, "of 64, 56 and 48"
    assert controls[0].too_large == (64, 56)
    assert not controls[0].changes_numerics
    assert rate.config["micro_batch"] == 48
    assert rate.too_large == (), "what was learnt of the baseline is known of all that is based on it"
    assert (same.config["micro_batch"], same.too_large) == (48, ())
    assert larger.speed
    assert 48 < larger.config["micro_batch"] <= 100
    assert seed.config["micro_batch"] == (larger.config["micro_batch"] if cumulative else 48)
    assert "a batch of 64 does not fit as predicted; trying 56" in said[0]
    assert ("control-00-batch-48", 48) in [(name, config.micro_batch) for name, config in made.ran]
    assert len({name for name, _ in made.ran}) == len(made.ran), "each has a folder of its own"


def test_smaller_batches_are_tried_a_few_times_only(
    base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    """And the suite's own batches are never changed."""
    limit = predict_peak(replace(base, micro_batch=64, global_batch=192)).total
    suite = Suite("mine", "Mine", {}, (Rung("checkpointing", {"checkpointing": "full"}),))
    facts = DeviceFacts("cpu", "cpu")
    hopeless = Misjudged(
        in_folder(tmp_path), KEY, suite, base, manifest, memory_limit=limit, fit=True, say=lambda text: None,
        facts=facts, result=make_result(), most=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="3 smaller batches did not fit either: give a larg"):
        hopeless.run()
    assert [config.micro_batch for _, config in hopeless.ran] == [64, 56, 48, 40]
    plain = Misjudged(
        in_folder(tmp_path), KEY, replace(suite, base={"batch": 64}), base, manifest, memory_limit=limit,
        say=lambda text: None, facts=facts, result=make_result(), most=50,
    )  # fmt: skip
    with pytest.raises(UserError, match="Give --fit"):
        plain.run()
    assert len(plain.ran) == 1


@pytest.mark.parametrize("cumulative", [True, False])
def test_other_numerics_are_run_with_several_seeds(
    cumulative: bool, base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    """And so is the rung before, at the same batch; losses are paired by seed."""

    @dataclass(frozen=True)
    class Seeded(MadeUp):
        def _measure(self, name: str, rung: Rung, config: TrainConfig) -> Measured:
            loss = (
                3.0 + config.seed / 10 + 0.5 * (config.precision == "bf16") + 0.25 * (config.optimizer == "adafactor")
            )
            result = make_result(val_loss=loss)
            return replace(super()._measure(name, rung, config), result=result)

    rungs = (
        Rung("rate", {"checkpointing": "full"}),
        Rung("bf16", {"precision": "bf16", "batch": 8}, changes_numerics=True),
        Rung("Adafactor", {"optimizer": "adafactor"}, changes_numerics=True),
        streamed(["books"]),
    )
    suite = Suite("mine", "Mine", {"batch": 4}, rungs, cumulative, seeds=3)
    modern = DeviceFacts("cpu", "cpu", bf16=True)
    made = Seeded(
        in_folder(tmp_path),
        KEY,
        suite,
        base,
        manifest,
        facts=modern,
        result=make_result(),
        say=lambda text: None,
    )
    _, measured = made.run()
    pairs = {rung.name: rung.held_out for rung in measured}
    assert pairs["rate"] == pairs["bf16"] == (), "equal numerics, and another batch, whose loss may differ anyway"
    assert pairs[STREAMING] == (), "other windows"
    assert pairs["bf16, same batch"] == ((3.0, 3.5), (3.1, 3.6), (3.2, 3.7))
    before = 0.5 * cumulative
    expected = [(3.0 + before + seed / 10, 3.25 + before + seed / 10) for seed in range(3)]
    assert [value for pair in pairs["Adafactor"] for value in pair] == pytest.approx(
        [value for pair in expected for value in pair]
    )
    seeded = {name: config.seed for name, config in made.ran if "-seed-" in name}
    assert seeded["02-bf16-same-batch-seed-1"] == 1
    assert ("02-bf16-seed-2" if cumulative else "control-00-seed-2") in seeded, "the rung before"
    alone = replace(suite, seeds=1)
    once = Seeded(
        in_folder(tmp_path),
        KEY,
        alone,
        base,
        manifest,
        facts=modern,
        result=make_result(),
    )
    assert all(rung.held_out == () for rung in once.run()[1])
    assert not any("-seed-" in name for name, _ in once.ran)


def test_fitting_a_rung_changes_its_batch_alone(
    base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    """What it leaves open stays open, or its finished run would not count when the ladder is continued."""
    left_open = replace(base, device="auto", precision="auto", attention="auto")
    made = MadeUp(
        in_folder(tmp_path), KEY, Suite("mine", "Mine", {}, (Rung("seed", {"seed": 1}),)), left_open,
        manifest, memory_limit=10**9, fit=True, facts=DeviceFacts("cpu", "cpu"), result=make_result(),
    )  # fmt: skip
    controls, _ = made.run()
    found = config_from_json(controls[0].config, "test")
    assert found.micro_batch > left_open.micro_batch
    assert found == replace(left_open, micro_batch=found.micro_batch, global_batch=found.global_batch)


def test_a_ladder_ends_where_its_control_does(
    base: TrainConfig, make_result: Make, tmp_path: Path, manifest: Manifest
) -> None:
    @dataclass(frozen=True)
    class Failing(MadeUp):
        def _measure(self, name: str, rung: Rung, config: TrainConfig) -> Measured:
            measured = super()._measure(name, rung, config)
            return replace(measured, result=None, reason="oom") if rung.name == "control" else measured

    suite = Suite("mine", "Mine", {}, RUNGS)
    made = Failing(
        in_folder(tmp_path),
        KEY,
        suite,
        base,
        manifest,
        cpu_facts(),
        result=make_result(),
    )
    with pytest.raises(UserError, match="control could not be run again after 'chunks': oom"):
        made.run()


def test_a_rung_is_kept_with_its_very_config_and_a_speed(base: TrainConfig, make_result: Make, tmp_path: Path) -> None:
    path = tmp_path / "rung.json"
    assert runner._kept(path, base) is None
    measured = Measured("one", "01-one", base.to_json(), make_result())
    write_json(path, to_json(measured))
    kept = runner._kept(path, base)
    assert kept is not None
    assert kept.result == make_result()
    assert runner._kept(path, replace(base, seed=1)) is None
    write_json(path, to_json(replace(measured, result=make_result(throughput=None))))
    assert runner._kept(path, base) is None
    path.write_text("{")
    assert runner._kept(path, base) is None


def test_the_batch_that_fits_is_the_largest_that_does(base: TrainConfig) -> None:
    for size, next_size in ((1, 2), (7, 8), (8, 16), (24, 32)):
        limit = predict_peak(replace(base, micro_batch=size, global_batch=3 * size)).total
        fitted = largest_batch(base, limit)
        assert (fitted.micro_batch, fitted.global_batch) == (size, 3 * size), "with its accumulation"
        larger = predict_peak(replace(base, micro_batch=next_size, global_batch=3 * next_size)).total
        assert largest_batch(base, larger).micro_batch == next_size
    two = replace(base, workers=2, micro_batch=4, global_batch=24)
    assert largest_batch(two, predict_peak(two).total).global_batch == 24, "with its workers"


def test_a_baseline_too_short_says_how_long_it_needs(make_result: Make) -> None:
    refuse_short(make_result(steps=8), "")
    with pytest.raises(UserError, match=r"^7 steps in 3\.0s .* a rung needs 8 steps, here --time-budget 4s or more"):
        refuse_short(make_result(steps=7, seconds=3.0), "")
    with pytest.raises(UserError, match=r"--time-budget 12s or more"):
        refuse_short(make_result(steps=1, seconds=0.0, first_step_seconds=1.5, throughput=None), "")


def test_the_reason_is_the_last_line_of_what_failed() -> None:
    assert worker_reason(RuntimeError("Traceback\n  a line\nValueError: what it was.\n")) == "ValueError: what it was"
    assert worker_reason(RuntimeError()) == "RuntimeError"


def test_what_a_machine_cannot_show_is_refused(base: TrainConfig) -> None:
    modern, old = DeviceFacts("cpu", "cpu", bf16=True), DeviceFacts("cpu", "cpu", bf16=False)
    habits = replace(base, device="auto", ablate=("pages", "sync"))
    refuse_unsuited(habits, replace(habits, ablate=()), Rung("habits", {"ablate": ()}), A100)
    with pytest.raises(UserError, match="large pages are for CPU memory"):
        refuse_unsuited(habits, replace(habits, ablate=("sync",)), Rung("pages", {"ablate": ("sync",)}), A100)
    tf32 = replace(base, precision="tf32")
    refuse_unsuited(tf32, replace(tf32, seed=1), Rung("seed", {"seed": 1}), old)
    bf16, rung = replace(base, precision="bf16"), Rung("bf16", {"precision": "bf16"})
    refuse_unsuited(base, bf16, rung, modern)
    with pytest.raises(UserError, match="emulates bf16"):
        refuse_unsuited(base, bf16, rung, old)
