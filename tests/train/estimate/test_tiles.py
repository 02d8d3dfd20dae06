"""Sizes that fill a GPU's tiles and waves, and sizes that do not."""

import re
from dataclasses import replace
from typing import Any

import pytest

from train.config import TrainConfig
from train.estimate.forecast import tile_rows
from train.estimate.tiles import TILE, products, warnings
from train.model_config import PRESETS

BATCH = ("micro_batch", "global_batch", "precision")
GPT2 = TrainConfig.of(model=PRESETS["gpt2-124m"], device="cuda", precision="bf16", micro_batch=32, global_batch=32)


def test_a_product_that_fills_its_tiles_and_waves_wastes_nothing() -> None:
    model = replace(GPT2.model, width=2 * TILE[1], heads=8, padded_vocab_size=200 * TILE[1], context_length=TILE[0])
    whole = products(GPT2.replace(model=model, micro_batch=54, global_batch=54), 108)
    assert [product.tiles for product in whole] == [0, 0, 0, 0]
    assert [product.waves for product in whole] == [0, 0, 0, 0]


def test_a_row_too_many_costs_a_row_of_tiles_and_a_tile_too_many_a_wave() -> None:
    model = replace(GPT2.model, width=TILE[1], heads=8, padded_vocab_size=200 * TILE[1], context_length=1)
    config = GPT2.replace(model=model, micro_batch=TILE[0] + 1, global_batch=TILE[0] + 1)
    *_, head = products(config, 100)
    assert head.tiles == pytest.approx(1 - 129 / 256)
    assert head.waves == 0
    *_, head = products(config, 399)
    assert head.waves == pytest.approx(1 - 400 / (2 * 399))


def test_sizes_off_the_tensor_cores_multiples_are_warned_of() -> None:
    def warned(**changes: Any) -> str:
        model = replace(GPT2.model, **{name: changes.pop(name) for name in [*changes] if name not in BATCH})
        return " ".join(warnings(GPT2.replace(**changes, model=model), 108))

    assert warned() == ""
    assert {*re.findall("50,257|padded_vocab_size=50304", warned(padded_vocab_size=50257))} == {
        "50,257", "padded_vocab_size=50304"
    }  # fmt: skip
    assert re.findall(r"width (?:of a head )?(\d+)", warned(width=780)) == ["780", "65"], "and that of its heads"
    assert re.findall(r"width (?:of a head )?(\d+)", warned(width=780, precision="tf32")) == ["65"], (
        "a multiple of 4 is enough"
    )
    assert "tensor cores" not in warned(width=780, precision="fp32"), "which it does not use"
    few = {"micro_batch": 1, "global_batch": 1}
    assert "an incomplete wave" in warned(context_length=128, **few)
    assert ("multiprocessors", "108") in tile_rows(GPT2.replace(**few))
    assert "(192 x 768) wastes 96%: 25% " in warned(context_length=192, **few)


def test_the_products_are_those_of_the_forward_pass() -> None:
    assert [(product.rows, product.columns) for product in products(GPT2, 108)] == [
        (32 * 1024, 3 * 768), (32 * 1024, 768), (32 * 1024, 4 * 768), (32 * 1024, 50304),
    ]  # fmt: skip
