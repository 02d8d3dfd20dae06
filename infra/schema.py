"""Dataclasses to JSON and back, by pydantic: strict, so that a damaged file is refused instead of half understood."""

import json
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from infra.errors import UserError

T = TypeVar("T")

strict = with_config(ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants"))
"""For a dataclass that is kept in files: refuse unknown fields, and values that are not of their field's type."""


def to_json(value: Any) -> Any:
    """The dataclass instance ``value`` as JSON values; :func:`from_json` reads them back."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[T], values: Any, source: object) -> T:
    """The dataclass ``kind`` that the JSON ``values`` describe.

    Raises ``UserError`` that names ``source``, where they come from, and the first field that is wrong.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(values))
    except ValidationError as mistake:
        raise UserError(f"{source}{_fault(kind, mistake)}") from None
    except UserError as mistake:  # of the dataclass itself
        raise UserError(f"{source}: {mistake}") from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def _fault(kind: type, mistake: ValidationError) -> str:
    """What is wrong, as the end of a sentence that begins with the file's name."""
    first = mistake.errors(include_url=False)[0]
    name, message = ".".join(map(str, first["loc"])), first["msg"]
    match first["type"]:
        case "unexpected_keyword_argument" if len(first["loc"]) == 1:
            known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
            return f" has the unknown setting {name!r}; the settings are {known}."
        case "missing":
            return f" lacks {name!r}."
        case "value_error":  # raised by the dataclass itself, as a whole sentence
            return f": {first.get('ctx', {})['error']}"
    return f": {name or 'it'} is {first['input']!r}; {message[0].lower()}{message[1:]}."
