"""FLOPs per token by each formula, against figures worked out by others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainers import make_trainer

from infra.storage.directory import StorageDir
from train.config import ResolvedConfig
from train.estimate import flops
from train.model_config import PRESETS, ModelConfig
from train.models.gpt2 import GPT

GPT2 = replace(PRESETS["gpt2-124m"], padded_vocab_size=50304)


def test_hardware_flops_of_a_large_model_are_close_to_eight_thirds_of_a_forward() -> None:
    large = PRESETS["gpt2-1558m"]
    assert large.hardware_flops(recomputed=large.layers) / large.palm_flops == pytest.approx(8 / 6, rel=0.03)
    assert large.hardware_flops(recomputed=0) == large.palm_flops
    half = large.hardware_flops(recomputed=large.layers // 2)
    assert 2 * half == pytest.approx(large.palm_flops + large.hardware_flops(recomputed=large.layers))


def test_palm_is_what_torch_counts(small_model: ModelConfig) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from train.models.attention import manual

    model = GPT(small_model, attention=manual)
    tokens = torch.zeros(3, small_model.context_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(small_model.palm_flops, rel=1e-6)


def test_every_second_block_is_computed_again_from_the_first_on() -> None:
    assert [replace(GPT2, layers=5).recomputed_blocks("none"), GPT2.recomputed_blocks("selective")] == [
        0,
        0,
    ]
    assert replace(GPT2, layers=5).recomputed_blocks("alternate") == 3
    assert replace(GPT2, layers=5).recomputed_blocks("full") == 5


def test_utilisation_is_of_all_devices_and_none_of_unknown_ones(small_model: ModelConfig) -> None:
    assert flops.utilization(1e5, small_model.palm_flops, None, 1) is None
    assert flops.utilization(182_000, GPT2.palm_flops, 312e12, 1) == pytest.approx(0.50, abs=0.01)
    assert flops.utilization(182_000, GPT2.palm_flops, 312e12, 2) == pytest.approx(0.25, abs=0.005)


def test_every_formula_counts_what_its_name_says() -> None:
    """GPT-2 124M: 6 x 123.57M and attention at 1,024 tokens, all of it or half, or 6 x 124.44M parameters."""
    assert GPT2.matmul_parameters == pytest.approx(123.57e6, rel=1e-4)
    counted = {formula.name: formula.flops for formula in ResolvedConfig.of(model=GPT2).model.flops_formulas()}
    assert counted == pytest.approx(
        {"PaLM": 854.67e6, "causal": 798.04e6, "6N": 746.86e6, "hardware, checkpointed": 1062.29e6}, rel=1e-4
    )


def test_a_run_is_compared_with_the_measured_matmul_rate(
    small_shards: Path, small_model: ModelConfig, place: StorageDir
) -> None:
    config = ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=8, device="cpu",
        precision="fp32", compile="off", loss="plain",
    )  # fmt: skip
    result = make_trainer(config).run()
    alone = flops.with_matmul_efficiency(result, "fp32", 1, place)
    assert alone.matmul_utilization is None, "the doctor was not asked"
    doctor = {"machine": result.machine, "device": result.device, "matmul": {"fp32": 1e12}}
    place.write_json("doctor.json", doctor)
    beside = flops.with_matmul_efficiency(result, "fp32", 1, place)
    assert result.flops_per_second
    assert beside.matmul_utilization == pytest.approx(result.flops_per_second / 1e12)
    two = flops.with_matmul_efficiency(result, "fp32", 2, place)
    assert two.matmul_utilization == pytest.approx(result.flops_per_second / 2e12), "each worker has such a device"
    elsewhere = doctor | {"machine": "w2"}
    rates = {"machine": "w3", "device": result.device, "matmul": {"fp32": 2e12}}
    place.write_json("doctor.json", elsewhere | {"nodes": [{"rates": None}, {"rates": rates}]})
    for machine, rate in (("w1", None), ("w2", 1e12), ("w3", 2e12)):
        ran = flops.with_matmul_efficiency(
            replace(result, machine=machine), config.execution.precision, config.batch.workers, place
        )
        expected = pytest.approx(result.flops_per_second / rate) if rate else None
        assert ran.matmul_utilization == expected, "another machine's processor is no ceiling of this one"
