"""What dataclasses keep in files comes back the same, and what is wrong in a file is named."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import UserError
from infra.schema import from_json, strict, to_json


@strict
@dataclass(frozen=True)
class Part:
    size: int
    share: float = 0.5


@strict
@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...] = ()
    place: Path = Path("here")
    losses: list[float] = field(default_factory=list)
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name == "":
            raise UserError("--name is empty.")


@given(
    st.lists(st.builds(Part, st.integers(-(2**63), 2**63), st.floats(allow_nan=False))),
    st.lists(st.floats(allow_nan=False)),
    st.none() | st.text(st.characters(codec="utf-8"), min_size=1),
)
def test_saved_values_are_read_back(parts: list[Part], losses: list[float], name: str | None) -> None:
    whole = Whole(tuple(parts), Path("a/b"), losses, name)
    assert from_json(Whole, to_json(whole), "test") == whole


def test_a_loss_that_is_nan_is_read_back() -> None:
    assert math.isnan(from_json(Whole, to_json(Whole(losses=[math.nan])), "test").losses[0])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"color": 1}, "^a.json has an unknown setting 'color'"),
        ({"parts": [{"size": "3"}]}, "^a.json: parts.0.size is '3'"),
        ({"parts": [{}]}, "^a.json is missing the setting 'parts.0.size'.$"),
        ({"parts": [{"size": 1, "weight": 2}]}, "^a.json: parts.0.weight is 2. Unexpected"),
        ({"parts": [{"size": True}]}, "size is True"),
        ({"losses": ["nan"]}, "losses.0 is 'nan'"),
        ({"place": 3}, "place is 3"),
        ({"name": ""}, "^a.json: --name is empty.$"),
        ([], "an object"),
        (None, "an object"),
    ],
)
def test_the_wrong_field_is_named(values: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        from_json(Whole, values, "a.json")
