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
from pipeline.shards import MANIFEST_FILE, TOKENIZER_FILE
from pipeline.vocabulary import VocabularyConfig
from pipeline.vocabulary import main as train_tokenizer
from train.config import TrainConfig
from train.estimate.forecast import arithmetic_rows, epoch_tokens, limit_rows, memory_rows, parameter_rows, time_rows
from train.estimate.gpt2_memory import published_activations
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.roofline import expected_range, roofline_speed
from train.model_config import PRESETS, ModelConfig
from train.plan import PlanOptions, plan
from train.resolved import resolve_for_plan

PUBLISHED = replace(PRESETS["gpt2-124m"], padded_vocab_size=50257)


def test_gpt2_has_its_published_parameters() -> None:
    rows = dict(parameter_rows(TrainConfig.of(model=PUBLISHED).model))
    assert "124,439,808" in rows["total"]
    untied = dict(parameter_rows(TrainConfig.of(model=replace(PUBLISHED, tied=False)).model))
    assert "163,037,184" in untied["total"]


def test_time_and_cost_follow_from_speed_and_price(small_shards: Path, small_model: ModelConfig) -> None:
    rows = dict(time_rows(small_model, str(small_shards), 25600, [256.0], 36))
    tokens = epoch_tokens(str(small_shards))
    assert tokens is not None
    assert rows["epoch"].startswith(f"{tokens:,} tokens")
    assert "25,600 tokens" in rows["planned run"]
    assert "1m40s, cost 1.00" in rows["planned run"]
    assert f"{25600 / tokens:.3g} epochs" in rows["planned run"]
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=8, steps=100, workers=2
    )
    with console.capture() as printed:
        plan(PlanOptions(config, tokens_per_second=256, price_per_hour=36))
    assert "1m40s, cost 2.00" in printed.get(), "both workers are paid"


def test_the_time_and_the_cost_on_a_gpu_follow_from_its_predicted_speed() -> None:
    model = PRESETS["gpt2-124m"]
    config = resolve_for_plan(TrainConfig.of(model=model), KNOWN_GPUS["A100"])
    low, high = expected_range(roofline_speed(model, config.batch, config.execution, load_gpu_rates("A100")))
    tokens = 20 * model.parameters
    with console.capture() as printed:
        plan(PlanOptions(TrainConfig.of(model=model, data="nowhere"), gpu="A100", price_per_hour=1.2))
    expected = f"cost {tokens / high / 3600 * 1.2:,.2f} to {tokens / low / 3600 * 1.2:,.2f}"
    assert expected in " ".join(printed.get().split())
    rows = dict(time_rows(model, "nowhere", 36_000, [10.0, 20.0], 1.0))
    assert rows["planned run"].endswith("30m to 1h, cost 0.50 to 1.00")


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
def test_every_known_gpu_can_be_planned_for(gpu: str) -> None:
    with console.capture() as printed:
        plan(PlanOptions(TrainConfig.of(data="nowhere"), gpu=gpu))
    text = " ".join(printed.get().split())
    assert re.search(r"expected [\d,]+ to [\d,]+ tokens/s", text)
    assert "unknown for" not in text


def test_the_limit_names_a_batch_or_says_that_none_fits() -> None:
    config = TrainConfig.of(
        device="cuda", precision="bf16", micro_batch=1, compile="off", loss="plain", allocator="expandable"
    )

    def largest(config: TrainConfig, limit: int = 40 * 10**9) -> str:
        return dict(limit_rows(resolve_for_plan(config, cpu_info()).step, limit))["as configured"]

    def numbers(config: TrainConfig) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", largest(config))]

    assert numbers(config) == [32, 15, 480, 33], "the largest divisor of the global batch, and what would fit"
    assert "no micro-batch" in largest(config, 10**9)
    assert numbers(config.replace(workers=2))[:2] == [30, 8]
    assert numbers(config.replace(global_batch=28)) == [28, 1, 28, 34]
    assert numbers(config.replace(global_batch=34)) == [34, 1], "which memory limits"


@pytest.mark.parametrize(
    ("settings", "variants"),
    [
        ({}, ["with --checkpointing full", "with --loss-chunks 8"]),
        ({"checkpointing": "alternate", "loss": "fused"}, ["with --checkpointing full"]),
        ({"checkpointing": "full", "loss_chunks": 2}, []),
    ],
)
def test_what_would_save_more_memory_is_tried(settings: dict[str, Any], variants: list[str]) -> None:
    named = {"micro_batch": 1, "device": "cpu", "precision": "fp32", "compile": "off", "loss": "plain"}
    rows = limit_rows(resolve_for_plan(TrainConfig.of(**named | settings), cpu_info()).step, 40 * 10**9)
    assert [name for name, _ in rows] == ["limit", "as configured", *variants]


def test_the_arithmetic_of_the_run_is_that_of_its_tokens() -> None:
    """GPT-2 124M on 491,520,000 tokens: 4.2e17 FLOP, of which a petaflop-day has 8.64e19."""
    rows = dict(arithmetic_rows(PRESETS["gpt2-124m"], 480 * 1024, 1000))
    assert rows["1,000 steps"] == "4.201e+17 FLOP = 0.004862 PF-days (PaLM)"
    assert "steps" not in " ".join(dict(arithmetic_rows(PRESETS["gpt2-124m"], 480 * 1024, None)))


def test_the_whole_plan_is_printed() -> None:
    with console.capture() as printed:
        plan(PlanOptions(TrainConfig.of(model=PRESETS["tiny"], micro_batch=8, global_batch=16, steps=10)))
    assert "Predicted peak memory" in printed.get()


def test_the_published_formula_of_activations_stands_below_the_prediction() -> None:
    """GPT-3 175B takes 2.87 GB per layer and sequence in 16 bits, and fp32 twice that."""
    gpt3 = ModelConfig(layers=96, heads=96, width=12288, context_length=2048)
    config = TrainConfig.of(
        model=gpt3, micro_batch=1, global_batch=1, device="cuda", precision="bf16", compile="off", loss="plain"
    )
    assert published_activations(gpt3, 1, "bf16") == 96 * 2048 * 12288 * 114
    assert published_activations(gpt3, 1, "tf32") == 2 * 96 * 2048 * 12288 * 114
    assert "96 x sbh(34 + 5as/h)" in dict(memory_rows(resolve_for_plan(config, cpu_info()).step))["published formula"]
    assert (
        "96 x 2sbh(34 + 5as/h)"
        in dict(memory_rows(resolve_for_plan(config.replace(precision="fp32"), cpu_info()).step))["published formula"]
    )


def test_a_plan_is_of_the_model_that_its_data_make(small_shards: Path, tmp_path: Path) -> None:
    """``small`` follows the tokenizer of the data; where there are none, or of another model, it is as it is named."""
    data, tokenizer = shutil.copytree(small_shards, tmp_path / "data"), tmp_path / "data" / TOKENIZER_FILE
    train_tokenizer(VocabularyConfig(size=300, sample=100_000, out=str(tokenizer)))
    manifest = json.loads((data / MANIFEST_FILE).read_bytes())
    write_json(data / MANIFEST_FILE, manifest | {"tokenizer_sha256": read_tokenizer(str(tokenizer)).sha256})

    def embedded(model: str, data: str) -> str:
        with console.capture() as printed:
            plan(PlanOptions(TrainConfig.of(model=PRESETS[model], data=data, device="cpu")))
        match = re.search(r"token embedding +([\d,]+)", printed.get())
        assert match
        return match[1]

    assert embedded("small", str(data)) == f"{320 * 256:,}"
    assert embedded("small", "nowhere") == f"{50304 * 256:,}"
    assert embedded("edu-3m", str(data)) == f"{512 * 256:,}"


def test_a_price_without_a_speed_is_refused() -> None:
    with pytest.raises(UserError, match=r"--price-per-hour .*--tokens-per-second"):
        PlanOptions(price_per_hour=2.0)


def test_a_speed_or_price_that_is_none_is_refused() -> None:
    for value in (0.0, -1.0, 1e-320, float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"^--tokens-per-second .* must be between 1e-9"):
            PlanOptions(tokens_per_second=value)
        with pytest.raises(UserError, match=r"^--price-per-hour .* must be between 1e-9"):
            PlanOptions(tokens_per_second=100.0, price_per_hour=value)
    assert PlanOptions(tokens_per_second=100.0, price_per_hour=2.0).price_per_hour == 2.0


@pytest.mark.parametrize(
    ("gpu", "limit", "size", "named"),
    [
        ("A100", None, 80, "40GiB"),
        ("A100", 20 * 10**9, 32, "20GB"),
        ("H100", 40 * 10**9, 80, "40GB"),
        ("A100", 100 * 10**9, 80, "40GiB"),
        (None, 4 * 10**9, 1, "4GB"),
    ],
)
def test_a_plan_is_for_what_the_limit_leaves_of_the_gpu(
    gpu: str | None, limit: int | None, size: int, named: str
) -> None:
    """Which need not be here. The micro-batch of the run and that of the table are those of one limit."""
    training = TrainConfig.of(data="nowhere", device="auto" if gpu else "cpu")
    with console.capture() as printed:
        plan(PlanOptions(training, gpu=gpu, memory_limit=limit))
    assert f"micro-batch {size} (auto) x accumulation {480 // size}" in printed.get()
    assert re.search(rf"limit +{named},", printed.get())
    assert re.search(rf"as configured +micro-batch {size} x accumulation {480 // size}", printed.get())


def test_a_plan_for_a_gpu_that_stands_in_has_the_limit_too() -> None:
    """--device cuda on a machine without one is planned for an A100."""
    config = TrainConfig.of(device="cuda")
    actual = [
        resolve_for_plan(config, cpu_info(), limit).batch.micro_batch for limit in (None, 20 * 10**9, 100 * 10**9)
    ]
    assert actual == [80, 32, 80]
