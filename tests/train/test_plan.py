"""What the plan says of GPT-2 is what is published, and bad input is refused by a sentence."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.cli.console import console
from infra.device.hardware import KNOWN_GPUS, cpu_info
from infra.errors import UserError
from infra.storage.files import write_json
from pipeline.encoding.tokenizer import read_tokenizer
from pipeline.shards import MANIFEST_FILE, TOKENIZER_FILE, read_manifest
from pipeline.vocabulary import VocabularyConfig
from pipeline.vocabulary import main as train_tokenizer
from train.config import TrainConfig
from train.data.assumed import assume_manifest
from train.estimate.forecast import memory_rows, run_text, state_text, time_text
from train.estimate.gpt2_memory import published_activations
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.memory import predict_peak
from train.estimate.prediction import Range
from train.estimate.roofline import LLM_C_SPEED, expected_range, roofline_speed
from train.model_config import PRESETS, ModelConfig
from train.plan import PlanOptions, memory_saving_variants, plan
from train.resolved import resolve, resolve_for_plan

PUBLISHED = replace(PRESETS["gpt2-124m"], padded_vocab_size=50257)


def printed_plan(options: PlanOptions) -> str:
    with console.capture() as printed:
        plan(options)
    return printed.get()


def words(text: str) -> str:
    """The text without line breaks and alignment."""
    return " ".join(text.split())


def test_gpt2_has_its_published_parameters() -> None:
    assert TrainConfig.of(model=PUBLISHED).model.parameters == 124_439_808
    assert TrainConfig.of(model=replace(PUBLISHED, tied=False)).model.parameters == 163_037_184


def test_time_and_cost_follow_from_speed_and_price(small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=8, steps=100, workers=2
    )
    text = words(printed_plan(PlanOptions(config, tokens_per_second=256, price_per_hour=("36",))))
    assert f"{100 * config.step_tokens:,} tokens" in text
    tokens = read_manifest(small_shards).splits["train"]["tokens"]
    assert f"{100 * config.step_tokens / tokens:.3g} epochs" in text
    assert "1m40s, cost 2.00" in text, "both workers are paid"
    assert time_text(Range(1800, 3600), 1.0) == "30m to 1h, cost 0.50 to 1.00"


def test_the_time_and_the_cost_on_a_gpu_follow_from_its_predicted_speed() -> None:
    model = PRESETS["gpt2-124m"]
    config = resolve_for_plan(TrainConfig.of(model=model), KNOWN_GPUS["A100"])
    low, high = expected_range(roofline_speed(model, config.batch, config.execution, load_gpu_rates("A100")))
    tokens = 20 * model.parameters
    options = PlanOptions(TrainConfig.of(model=model, data="nowhere"), gpu="A100", price_per_hour=("1.2",))
    expected = f"cost {tokens / high / 3600 * 1.2:,.2f} to {tokens / low / 3600 * 1.2:,.2f}"
    assert expected in words(printed_plan(options))


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
def test_every_known_gpu_can_be_planned_for(gpu: str) -> None:
    text = printed_plan(PlanOptions(TrainConfig.of(data="nowhere"), gpu=gpu))
    assert re.search(r"this run .* [\d,.]+ to [\d,.]+\n", text), "a range of speeds"
    assert "unknown" not in text
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize(("gpu", "is_known", "is_above"), [("A100", 1, 0), ("A100-80GB", 1, 1), ("H100", 0, 0)])
def test_speeds_of_other_projects_are_shown_where_they_are_known(gpu: str, is_known: bool, is_above: bool) -> None:
    """A published speed above the predicted range is not hidden."""
    text = words(printed_plan(PlanOptions(TrainConfig.of(data="nowhere"), gpu=gpu)))
    assert (f"{LLM_C_SPEED:,} tokens/s" in text and "nanoGPT" in text) == is_known
    assert ("above this range" in text) == is_above
    other = printed_plan(PlanOptions(TrainConfig.of(data="nowhere", model=PRESETS["gpt2-355m"]), gpu=gpu))
    assert "nanoGPT" not in other


def test_all_gpus_are_a_table_by_time_and_cost() -> None:
    training = TrainConfig.of(data="nowhere")
    text = printed_plan(PlanOptions(training, gpu="all"))
    names = [line.split()[0] for line in text.splitlines() if line.split()[0] in KNOWN_GPUS]
    assert {*names} == {*KNOWN_GPUS}
    assert names[0] == "B200", "the fastest first"
    assert len(text.splitlines()) <= len(KNOWN_GPUS) + 10
    priced = printed_plan(PlanOptions(training, gpu="all", price_per_hour=("A100=1.2", "H100=9", "T4=0.1")))
    names = [line.split()[0] for line in priced.splitlines() if line.split()[0] in KNOWN_GPUS]
    assert names[:3] == ["T4", "A100", "H100"], "the cheapest first"
    assert len(names) == len(KNOWN_GPUS)


def test_a_gpu_that_is_too_small_has_no_time() -> None:
    text = printed_plan(PlanOptions(TrainConfig.of(data="nowhere", model=PRESETS["gpt2-1558m"]), gpu="all"))
    line = next(line for line in text.splitlines() if line.startswith("T4 "))
    assert "> limit" in line
    assert line.split()[-2:] == ["-", "-"], "neither speed nor time"


@pytest.mark.parametrize(
    ("settings", "size", "fits"),
    [
        ({}, (32, 15), 33),
        ({"workers": 2}, (30, 8), None),
        ({"global_batch": 28}, (28, 1), 34),
        ({"global_batch": 34}, (34, 1), None),
    ],
)
def test_what_limits_the_micro_batch_is_said(settings: dict[str, Any], size: tuple[int, int], fits: int | None) -> None:
    """The largest divisor of the global batch is used, and what would fit is named."""
    training = TrainConfig.of(device="cuda", precision="bf16", compile="off", loss="plain", data="nowhere", **settings)
    text = printed_plan(PlanOptions(training, gpu="A100", memory_limit=40 * 10**9))
    assert re.search(rf"this run +{size[0]} x {size[1]} ", text)
    if fits:
        assert f"{fits} would fit" in words(text)


def test_a_run_that_does_not_fit_is_marked() -> None:
    text = printed_plan(PlanOptions(TrainConfig.of(data="nowhere"), gpu="A100", memory_limit=10**9))
    assert re.search(r"this run .*> limit", text)
    assert "does not fit" in text


@pytest.mark.parametrize(
    ("settings", "variants"),
    [
        ({"loss": "plain"}, ["--checkpointing full", "--loss fused"]),
        ({"checkpointing": "alternate", "loss": "fused"}, ["--checkpointing full"]),
        ({"checkpointing": "full", "loss_chunks": 2}, []),
    ],
)
def test_what_would_save_more_memory_is_tried(settings: dict[str, Any], variants: list[str]) -> None:
    training = TrainConfig.of(device="cpu", precision="fp32", compile="off", **settings)
    config = resolve_for_plan(training, cpu_info())
    assert [flag for flag, _ in memory_saving_variants(training, config, cpu_info())] == variants


def test_the_state_is_given_in_bytes_per_parameter() -> None:
    """16 in mixed precision, as in ZeRO (arXiv 1910.02054): weights 4, gradients 4, moments 8; and autocast's copy."""
    step = resolve_for_plan(TrainConfig.of(loss="plain"), KNOWN_GPUS["A100"]).step
    assert dict(memory_rows(step, predict_peak(step)))["state"].startswith("18 bytes/parameter: weights 4, ")
    assert "optimizer 2" in state_text(step.model, predict_peak(step.replace(optimizer="adamw-8bit")))


def test_the_arithmetic_of_the_run_is_that_of_its_tokens() -> None:
    """GPT-2 124M on 491,520,000 tokens: 4.2e17 FLOP, of which a petaflop-day has 8.64e19."""
    config = resolve_for_plan(TrainConfig.of(steps=1000), KNOWN_GPUS["A100"])
    assert "491,520,000 tokens" in run_text(config, assume_manifest(1))
    assert "0.00486 PF-days" in run_text(config, assume_manifest(1))


def test_the_published_formula_of_activations_stands_beside_the_prediction() -> None:
    """GPT-3 175B takes 2.87 GB per layer and sequence in 16 bits, and fp32 twice that."""
    gpt3 = ModelConfig(layers=96, heads=96, width=12288, context_length=2048)
    config = TrainConfig.of(
        model=gpt3, micro_batch=1, global_batch=1, device="cuda", precision="bf16", compile="off", loss="plain"
    )

    def published(config: TrainConfig) -> str:
        step = resolve_for_plan(config, cpu_info()).step
        return dict(memory_rows(step, predict_peak(step)))["published"]

    assert published_activations(gpt3, 1, "bf16") == 96 * 2048 * 12288 * 114
    assert published_activations(gpt3, 1, "tf32") == 2 * 96 * 2048 * 12288 * 114
    assert "96 x sbh(34 + 5as/h)" in published(config)
    assert "96 x 2sbh(34 + 5as/h)" in published(config.replace(precision="fp32"))


def test_a_plan_is_of_the_model_that_its_data_make(small_shards: Path, tmp_path: Path) -> None:
    """``small`` follows the tokenizer of the data; where there are none, or of another model, it is as it is named."""
    data, tokenizer = shutil.copytree(small_shards, tmp_path / "data"), tmp_path / "data" / TOKENIZER_FILE
    train_tokenizer(VocabularyConfig(size=300, sample=100_000, out=str(tokenizer)))
    manifest = json.loads((data / MANIFEST_FILE).read_bytes())
    write_json(data / MANIFEST_FILE, manifest | {"tokenizer_sha256": read_tokenizer(str(tokenizer)).sha256})

    def planned(model: str, data: str) -> str:
        return printed_plan(PlanOptions(TrainConfig.of(model=PRESETS[model], data=data, device="cpu")))

    smaller = PRESETS["small"].parameters - (50304 - 320) * 256
    assert f"{smaller:,} parameters" in planned("small", str(data))
    assert "300 token ids" in planned("small", str(data))
    named = planned("small", "nowhere")
    assert f"{PRESETS['small'].parameters:,} parameters" in named
    assert "none in nowhere" in named
    assert "50,257 token ids" in named
    assert "512 token ids" in planned("edu-3m", "nowhere")


def test_a_price_without_a_speed_is_refused() -> None:
    with pytest.raises(UserError, match=r"--price-per-hour .*--tokens-per-second"):
        PlanOptions(price_per_hour=("2",))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gpu": "A100", "price_per_hour": ("H100=2",)}, r"H100=2 .*--gpu H100"),
        ({"gpu": "all", "price_per_hour": ("2",)}, r"--price-per-hour 2 .*A100=1.2"),
        ({"gpu": "all", "price_per_hour": ("GTX=2",)}, r"GTX .*A100, "),
        ({"gpu": "A100", "price_per_hour": ("cheap",)}, r"--price-per-hour cheap"),
        ({"gpu": "all", "tokens_per_second": 5.0}, r"Remove --tokens-per-second"),
        ({"gpu": "all", "training": TrainConfig.of(workers=2)}, r"Remove --workers"),
    ],
)
def test_flags_of_several_gpus_that_contradict_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        PlanOptions(**options)


def test_a_memory_limit_above_the_gpus_is_refused() -> None:
    with pytest.raises(UserError, match=r"--memory-limit 100GB .*42.9 GB"):
        plan(PlanOptions(TrainConfig.of(data="nowhere"), gpu="A100", memory_limit=100 * 10**9))


def test_a_speed_or_price_that_is_none_is_refused() -> None:
    for value in (0.0, -1.0, 1e-320, float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"^--tokens-per-second .* must be between 1e-9"):
            PlanOptions(tokens_per_second=value)
        with pytest.raises(UserError, match=r"^--price-per-hour .* between 1e-9"):
            PlanOptions(tokens_per_second=100.0, price_per_hour=(str(value),))
    assert PlanOptions(tokens_per_second=100.0, price_per_hour=("2.0",)).prices == {"": 2.0}


@pytest.mark.parametrize(
    ("gpu", "limit"), [("A100", None), ("A100", 20 * 10**9), ("H100", 40 * 10**9), (None, 4 * 10**9)]
)
def test_the_automatic_micro_batch_and_the_limit_agree(gpu: str | None, limit: int | None) -> None:
    """The plan is for what the limit leaves of the GPU, which need not be here, and for what the run then chooses."""
    training = TrainConfig.of(data="nowhere", device="auto" if gpu else "cpu")
    text = printed_plan(PlanOptions(training, gpu=gpu, memory_limit=limit))
    info = KNOWN_GPUS[gpu] if gpu else replace(cpu_info(), compile_blocker="")
    batch = resolve(training, info.with_memory_limit(limit)).batch
    assert re.search(rf"this run +{batch.micro_batch} x {batch.accumulation} ", text)
    assert f"limit {(limit or info.memory) / 1e9:.1f} GB" in words(text)


def test_a_plan_for_a_gpu_that_stands_in_has_the_limit_too() -> None:
    """--device cuda on a machine without one is planned for an A100."""
    config = TrainConfig.of(device="cuda")
    actual = [
        resolve_for_plan(config, cpu_info(), limit).batch.micro_batch for limit in (None, 20 * 10**9, 100 * 10**9)
    ]
    assert actual[0] == actual[2] > actual[1], "an A100 has 40 GiB"


def test_a_budget_is_a_model_with_its_tokens_and_the_next_command() -> None:
    training = TrainConfig.of(data="nowhere")
    text = printed_plan(PlanOptions(training, gpu="A100", price_per_hour=("1.2",), budget=50))
    match = re.search(r"A100 +(\d+) x (\d+) +([\d,]+) +([\d.]+) ", text)
    assert match
    layers, width, millions, billions = (float(value.replace(",", "")) for value in match.groups())
    assert width == 64 * layers
    assert 14 < billions * 1000 / millions < 28, "about 20 tokens per parameter"
    assert f"--model gpt2-124m,layers={layers:.0f},heads={layers:.0f},width={width:.0f} --tokens" in words(text)
    assert "--from-runs" in text
    assert len(text.splitlines()) <= 25
    assert match[0] in printed_plan(PlanOptions(training, gpu="A100", hours=50 / 1.2)), "money is time"


def test_a_budget_on_all_gpus_begins_with_the_most_compute() -> None:
    training = TrainConfig.of(data="nowhere")
    text = printed_plan(PlanOptions(training, gpu="all", hours=5))
    names = [line.split()[0] for line in text.splitlines() if line.split()[0] in KNOWN_GPUS]
    assert {*names} == {*KNOWN_GPUS}
    assert (names[0], names[-1]) == ("B200", "RTX-3060")
    assert len(text.splitlines()) <= len(KNOWN_GPUS) + 10
    priced = printed_plan(PlanOptions(training, gpu="all", budget=5, price_per_hour=("A100=1", "T4=0.01")))
    assert [line.split()[0] for line in priced.splitlines() if line.split()[0] in KNOWN_GPUS] == ["T4", "A100"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": 5.0}, r"--budget .*--gpu"),
        ({"budget": 5.0, "gpu": "A100"}, r"--budget 5 .*--price-per-hour"),
        ({"budget": 5.0, "hours": 2.0, "gpu": "A100"}, r"--budget and --hours"),
        ({"hours": -1.0, "gpu": "A100"}, r"--hours -1"),
        ({"hours": float("nan"), "gpu": "A100"}, r"--hours nan"),
        ({"hours": 5.0, "gpu": "A100", "training": TrainConfig.of(steps=3)}, r"Remove --steps"),
        ({"hours": 5.0, "gpu": "A100", "training": TrainConfig.of(workers=2)}, r"Remove --workers"),
        ({"hours": 5.0, "gpu": "A100", "tokens_per_second": 3.0}, r"Remove --tokens-per-second"),
    ],
)
def test_a_budget_that_cannot_be_planned_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        PlanOptions(**options)


def test_a_budget_for_no_step_is_refused() -> None:
    with pytest.raises(UserError, match="Increase the budget"):
        plan(PlanOptions(TrainConfig.of(data="nowhere"), gpu="T4", hours=1e-5))
