"""Sizes that fill a GPU's tiles and waves, and sizes that do not."""

import re
from dataclasses import replace

import pytest

from train.config import Precision
from train.estimate.forecast import tile_rows
from train.estimate.tiles import TILE, products, warnings
from train.model_config import PRESETS

GPT2 = PRESETS["gpt2-124m"]


def test_a_product_that_fills_its_tiles_and_waves_wastes_nothing() -> None:
    model = replace(GPT2, width=2 * TILE[1], heads=8, padded_vocab_size=200 * TILE[1], context_length=TILE[0])
    whole = products(model, 54, 108)
    assert [product.tiles for product in whole] == [0, 0, 0, 0]
    assert [product.waves for product in whole] == [0, 0, 0, 0]


def test_a_row_too_many_costs_a_row_of_tiles_and_a_tile_too_many_a_wave() -> None:
    model = replace(GPT2, width=TILE[1], heads=8, padded_vocab_size=200 * TILE[1], context_length=1)
    *_, head = products(model, TILE[0] + 1, 100)
    assert head.tiles == pytest.approx(1 - 129 / 256)
    assert head.waves == 0
    *_, head = products(model, TILE[0] + 1, 399)
    assert head.waves == pytest.approx(1 - 400 / (2 * 399))


def test_sizes_off_the_tensor_cores_multiples_are_warned_of() -> None:
    def warned(micro_batch: int = 32, precision: Precision = "bf16", **sizes: int) -> str:
        return " ".join(warnings(replace(GPT2, **sizes), micro_batch, precision, 108))

    assert warned() == ""
    assert {*re.findall("50,257|padded_vocab_size=50304", warned(padded_vocab_size=50257))} == {
        "50,257", "padded_vocab_size=50304"
    }  # fmt: skip
    assert re.findall(r"width (?:of a head )?(\d+)", warned(width=780)) == ["780", "65"], "and that of its heads"
    assert re.findall(r"width (?:of a head )?(\d+)", warned(width=780, precision="tf32")) == ["65"], (
        "a multiple of 4 is enough"
    )
    assert "tensor cores" not in warned(width=780, precision="fp32"), "which it does not use"
    assert "an incomplete wave" in warned(1, context_length=128)
    rows = tile_rows(GPT2, 1, "bf16")
    assert rows[0][0] == "tiles"
    assert "108 multiprocessors" in rows[0][1]
    assert len(rows) <= 4, "however many products waste much"
    assert "(192 x 768) wastes 96%: 25% " in warned(1, context_length=192)


def test_the_products_are_those_of_the_forward_pass() -> None:
    assert [(product.rows, product.columns) for product in products(GPT2, 32, 108)] == [
        (32 * 1024, 3 * 768), (32 * 1024, 768), (32 * 1024, 4 * 768), (32 * 1024, 50304),
    ]  # fmt: skip
