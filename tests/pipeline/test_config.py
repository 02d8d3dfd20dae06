"""Invalid settings are refused, each with its own sentence."""

from typing import Any

import pytest

from infra.errors import UserError
from pipeline.config import TokenizeConfig


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("val_fraction", 1.0, "--val-fraction 1.0"), ("val_fraction", -0.1, "--val-fraction -0.1"),
        ("workers", 0, "--workers 0"), ("shard_size", 999_999, "--shard-size"), ("languages", ("eng",), "'eng'"),
        ("languages", ("en", "EN"), "'EN'"), ("doc_separator", "", "--doc-separator is empty"),
        ("sources", (), "no sources"), ("sources", ("books", ""), "source is empty"), ("out", "", "--out is empty"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        TokenizeConfig(**{name: value})


def test_the_limits_themselves_are_accepted() -> None:
    TokenizeConfig(val_fraction=0.0, workers=1, shard_size=1_000_000)
    TokenizeConfig(val_fraction=0.99)
