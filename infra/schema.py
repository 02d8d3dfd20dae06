"""Conversion of dataclasses to JSON and back with pydantic, strict, so that a damaged file is rejected."""

import json
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from infra.errors import UserError

T = TypeVar("T")

strict = with_config(ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants"))
"""Decorator of a dataclass that is stored in files; unknown fields and values of other types are rejected."""


def to_json(value: Any) -> Any:
    """Convert the dataclass instance ``value`` to JSON values, which :func:`from_json` reads."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[T], values: Any, source: object) -> T:
    """Create an instance of the dataclass ``kind`` from JSON ``values``.

    If a field is invalid, raises a ``UserError`` that names it and the ``source`` of the values, such as a file.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(values))
    except ValidationError as mistake:
        raise UserError(f"{source}{_fault(kind, mistake)}") from None
    except UserError as mistake:  # The dataclass itself raises it.
        raise UserError(f"{source}: {mistake}") from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def _fault(kind: type, mistake: ValidationError) -> str:
    """Describe the first invalid field, as the end of a message that begins with the file's name."""
    error = mistake.errors(include_url=False)[0]
    name, message = ".".join(map(str, error["loc"])), error["msg"]
    match error["type"]:
        case "unexpected_keyword_argument" if len(error["loc"]) == 1:
            settings = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
            return f" has an unknown setting {name!r}. Valid settings are {settings}."
        case "missing":
            return f" is missing the setting {name!r}."
        case "value_error":  # The dataclass itself raises it with a whole message.
            return f": {error.get('ctx', {})['error']}"
    return f": {name or 'the value'} is {error['input']!r}. {message}."
