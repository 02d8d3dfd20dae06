"""A card is planned for by its datasheet, or by what infra.doctor measured on it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from infra.device.hardware import KNOWN_GPUS, DeviceInfo
from infra.errors import UserError
from train.estimate.gpu_rates import load_gpu_rates

MEASURED = {"matmul": {"bf16": 250e12, "tf32": 120e12, "fp32": 18e12}, "copy": {"device_to_device": 1.3e12}}
FACTS = asdict(replace(KNOWN_GPUS["A100"], name="NVIDIA A100-PCIE-40GB"))


def test_a_datasheets_card_reaches_a_part_of_its_rates() -> None:
    card = load_gpu_rates("A100")
    assert card.device_info == KNOWN_GPUS["A100"]
    assert card.matmul_rate("bf16-activations") == card.matmul_rate("fp16") == pytest.approx(271e12)
    assert math.isclose(card.bandwidth, 271 / 312 * 1.555e12)
    assert all(load_gpu_rates(name).bandwidth > card.bandwidth for name in ("H100", "H200"))


def test_a_doctors_record_is_a_card_with_the_rates_that_were_measured(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"device": FACTS["name"], "facts": FACTS} | MEASURED))
    card = load_gpu_rates(str(file))
    assert card.device_info == DeviceInfo(**FACTS)
    assert card.device_info.memory == FACTS["memory"]
    assert (card.matmul_rate("bf16"), card.matmul_rate("fp32"), card.bandwidth) == (250e12, 18e12, 1.3e12)
    assert str(file) in card.source


@pytest.mark.parametrize(
    "actual",
    [{}, [], {"facts": FACTS}, {"facts": FACTS | {"kind": "cpu"}} | MEASURED, {"facts": {"kind": "cuda"}}, MEASURED],
)
def test_a_file_without_the_rates_of_a_gpu_is_refused(tmp_path: Path, actual: Any) -> None:
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(actual))
    with pytest.raises(UserError, match=r"--gpu .*doctor.json"):
        load_gpu_rates(str(file))


def test_every_known_card_has_a_peak_and_a_bandwidth() -> None:
    cards = {name: load_gpu_rates(name) for name in KNOWN_GPUS}
    assert all(card.matmul_rate("bf16") and card.bandwidth for card in cards.values())
    assert cards["T4"].device_info.capability == (7, 5)
    assert not cards["T4"].device_info.bf16
    assert cards["T4"].matmul_rate("tf32") == cards["T4"].matmul_rate("fp32"), "it has no TF32"
    assert max(cards, key=lambda name: cards[name].matmul_rate("bf16") or 0) == "B200"


def test_what_is_neither_a_card_nor_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"A100, .*H200"):
        load_gpu_rates(str(tmp_path / "GTX-1080"))
