"""Refuse values of a file that their dataclass cannot hold."""

from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from infra.errors import UserError

if TYPE_CHECKING:
    pass


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def refuse_other_types(values: Mapping[str, Any], record: type) -> None:
    """Raise ``UserError`` for the first value of a file that its field in ``record`` cannot hold."""
    for field in fields(record):
        if field.name in values and not _is(values[field.name], field.type):
            words = [KINDS[kind] for kind in KINDS if _is(kind(), field.type)]
            listed = "a list of texts" if get_origin(field.type) is tuple else "as its flag takes it"
            raise UserError(f"{field.name} is {values[field.name]!r}, and must be {words[-1] if words else listed}.")


def _is(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            return any(_is(value, one) for one in arguments)
        case origin if origin is Annotated:
            return _is(value, arguments[0])
        case origin if origin is Literal:
            return isinstance(value, str)  # which one is asked by _choices
        case origin if origin is tuple:
            return isinstance(value, tuple) and all(_is(one, arguments[0]) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
