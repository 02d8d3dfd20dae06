"""Sizes that fill a GPU's tiles and waves, and sizes that do not."""

from dataclasses import replace

import pytest

from train.config import TrainConfig
from train.estimate.forecast import tile_rows
from train.estimate.tiles import TILE, products, warnings
from train.model_config import PRESETS

GPT2 = TrainConfig(model=PRESETS["gpt2-124m"], device="cuda", precision="bf16", micro_batch=32, global_batch=32)


def test_a_product_that_fills_its_tiles_and_waves_wastes_nothing() -> None:
    model = replace(GPT2.model, width=2 * TILE[1], heads=8, padded_vocabulary=200 * TILE[1], context_length=TILE[0])
    whole = products(replace(GPT2, model=model, micro_batch=54, global_batch=54), 108)
    assert [product.tiles for product in whole] == [0, 0, 0, 0]
    assert [product.waves for product in whole] == [0, 0, 0, 0]


def test_a_row_too_many_costs_a_row_of_tiles_and_a_tile_too_many_a_wave() -> None:
    model = replace(GPT2.model, width=TILE[1], heads=8, padded_vocabulary=200 * TILE[1], context_length=1)
    config = replace(GPT2, model=model, micro_batch=TILE[0] + 1, global_batch=TILE[0] + 1)
    *_, head = products(config, 100)
    assert head.tiles == pytest.approx(1 - 129 / 256)
    assert head.waves == 0
    *_, head = products(config, 399)
    assert head.waves == pytest.approx(1 - 400 / (2 * 399))


def test_sizes_off_the_tensor_cores_multiples_are_warned_of() -> None:
    assert warnings(GPT2, 108) == []
    unpadded = warnings(replace(GPT2, model=replace(GPT2.model, padded_vocabulary=50257)), 108)
    assert any("50,257 is not a multiple of 8" in line for line in unpadded)
    assert any("padded_vocabulary=50304" in line for line in unpadded)
    odd = warnings(replace(GPT2, model=replace(GPT2.model, width=780)), 108)
    assert any("the width of 780 is not a multiple of 8" in line for line in odd)
    assert any("head's width of 65" in line for line in odd)
    in_tf32 = warnings(replace(GPT2, precision="tf32", model=replace(GPT2.model, width=780)), 108)
    assert not any("the width of" in line for line in in_tf32), "a multiple of 4 is enough"
    assert any("head's width of 65 is not a multiple of 4" in line for line in in_tf32)
    in_fp32 = warnings(replace(GPT2, precision="fp32", model=replace(GPT2.model, width=780)), 108)
    assert not any("tensor cores" in line for line in in_fp32), "which it does not use"
    few = replace(GPT2, model=replace(GPT2.model, context_length=128), micro_batch=1, global_batch=1)
    assert any("on an incomplete wave" in line for line in warnings(few, 108))
    assert ("multiprocessors", "108") in tile_rows(few)
    both = replace(GPT2, model=replace(GPT2.model, context_length=192), micro_batch=1, global_batch=1)
    assert (
        "projections to the width, 192 x 768, wastes 96%: 25% on incomplete tiles and 94% on an incomplete wave"
        in warnings(both, 108)
    )


def test_the_products_are_those_of_the_forward_pass() -> None:
    assert [(product.rows, product.columns) for product in products(GPT2, 108)] == [
        (32 * 1024, 3 * 768), (32 * 1024, 768), (32 * 1024, 4 * 768), (32 * 1024, 50304),
    ]  # fmt: skip
