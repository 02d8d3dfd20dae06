"""Sizes and durations keep their value through text, and a number without a unit is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from infra.cli.units import GB, BytesOrNone, SecondsOrNone, format_duration, format_size, parse_duration, parse_size


@given(st.integers(min_value=1, max_value=2**60))
def test_a_size_survives_being_written_and_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(min_value=1, max_value=10**7))
def test_a_duration_survives_being_written_and_read(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.floats(min_value=0.1, max_value=10**7))
def test_a_duration_is_written_as_the_nearest_second_and_a_short_one_as_the_nearest_tenth(seconds: float) -> None:
    nearest = 0.05 if seconds < 60 else 0.5
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=nearest * (1 + 1e-9), rel=0)


def test_what_rounds_to_a_minute_is_one() -> None:
    assert [format_duration(seconds) for seconds in (59.9, 59.96, 60.4)] == ["59.9s", "1m", "1m"]


def test_the_two_gigabytes_differ() -> None:
    assert parse_size("40GB") == 40 * 10**9
    assert parse_size("40GiB") == 40 * 2**30
    assert parse_size("1GB") == GB
    assert parse_size("2.3GB") == 2_300_000_000, "which floating point makes one byte less"
    assert parse_duration("1h30m") == 5400


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (parse_size, ("0GB",), "at least 1B"), (parse_duration, ("0s", "0h0m"), "longer than 0 s"),
        (parse_size, ("9000000TiB", f"{10**30}B"), "too large; use less than"),
        (parse_duration, ("36501d", "9" * 400 + "s"), "100 years"),
        (parse_size, ("40", "GB", "-1GB", "40 parsecs", ""), "not a size"),
        (parse_duration, ("90", "m", "5 minutes", "1m2", ""), "not a duration"),
    ],
)  # fmt: skip
def test_what_is_no_size_and_no_duration_is_refused(
    parse: Callable[[str], float], texts: tuple[str, ...], said: str
) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=said):
            parse(text)


@pytest.mark.parametrize(("kind", "text", "value"), [(BytesOrNone, "40GB", 40 * 10**9), (SecondsOrNone, "5m", 300)])
def test_a_flag_that_may_be_left_out_is_refused_like_any_other(
    capfd: pytest.CaptureFixture[str], kind: Any, text: str, value: float
) -> None:
    assert tyro.cli(kind, default=None, args=[text]) == value
    assert tyro.cli(kind, default=value, args=["None"]) is None
    with pytest.raises(SystemExit):
        tyro.cli(kind, default=None, args=["40"])
    said = capfd.readouterr().err
    assert "'40' is not a" in said
    assert "lambda" not in said
