"""What a GPU will run computes what eager code computes: Inductor's kernels for an A100, in Triton's interpreter.

``tests/cuda/interpreted.py`` compares more steps, and records them.
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROUNDING = 0.02
"""The most that 16 bits were seen to change a gradient, twice; a wrong sign changes it by 2."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import interpreted  # type: ignore[import-not-found]

    return interpreted


def test_a_compiled_step_computes_what_an_eager_one_does(interpreted: Any) -> None:
    row = interpreted.step(interpreted.STEPS["bf16-activations, fused loss"])
    assert row["loss"] == pytest.approx(row["reference"], abs=1e-3)
    assert max(row["errors"].values()) < ROUNDING
    assert sum(row["kernels"].values()) > 30
    assert row["misuses"] == ""


@pytest.mark.parametrize("planted", ["linear", "loss", "embedding"])
def test_a_wrong_sign_is_seen(planted: str, interpreted: Any) -> None:
    settings = interpreted.STEPS["bf16-activations, fused loss"] | {"vocab_size": 1000}
    assert max(interpreted.step(settings)["errors"].values()) < ROUNDING
    assert max(interpreted.step(settings | {"planted": planted})["errors"].values()) > 10 * ROUNDING
