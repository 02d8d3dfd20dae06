"""The layout of ``--help``: first the flags that most runs use, then the others in groups with a heading.

tyro shows flags in the order of a dataclass's fields, with a box for each nested dataclass. A command's settings,
however, are nested by the package that owns them. This module therefore gives tyro a structure ordered for readers, by
the documented rules of ``tyro.constructors``, and builds the settings from its values.

A class of settings describes its layout with two optional class variables:

- ``main_flags``: names of the eight to twelve fields that most runs set, including those of nested dataclasses.
  Without it, tyro's own layout is used.
- ``flag_groups``: names of the other fields, by heading. A nested dataclass has its own groups.

A flag of the outer class hides a flag of the same name in a nested class, whose field keeps its default.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)


def grouping_registry(kinds: Iterable[type], default: Any = None) -> ConstructorRegistry:
    """Return rules by which tyro shows the flags of the ``kinds`` in groups; ``default`` has the default values."""
    specs: dict[type, StructConstructorSpec] = {}
    for kind in kinds:
        specs |= _make_group_specs(_Settings.of(kind, tyro.MISSING_NONPROP if default is None else default))
    registry = ConstructorRegistry()
    registry.struct_rule(lambda info: specs.get(info.type))
    return registry


@dataclass(frozen=True)
class _Settings:
    """A dataclass of flags: its constructor, its own flags, and the dataclasses nested in it."""

    kind: type
    build: Callable[..., Any]
    flags: dict[str, StructFieldSpec]
    hidden_values: dict[str, Any]
    """Values of the fields whose flags are hidden by an outer class."""
    nested: "dict[str, _Settings]"

    @classmethod
    def of(cls, kind: type, default: Any, outer_flags: Collection[str] = ()) -> "_Settings":
        spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(kind, default, in_union_context=False))
        assert isinstance(spec, StructConstructorSpec), f"{kind.__name__} is a dataclass"
        flat_fields = [field for field in spec.fields if not is_dataclass(field.type)]
        flags = {field.name: _with_layout(field) for field in flat_fields if field.name not in outer_flags}
        hidden_values = {field.name: field.default for field in flat_fields if field.name in outer_flags}
        used_names = {*outer_flags, *flags}
        nested = {f.name: cls.of(f.type, f.default, used_names) for f in spec.fields if is_dataclass(f.type)}
        return cls(kind, spec.instantiate, flags, hidden_values, nested)

    @property
    def all_flags(self) -> dict[str, StructFieldSpec]:
        """Flags of the dataclass and of the nested ones, by name."""
        return self.flags | {name: flag for inner in self.nested.values() for name, flag in inner.all_flags.items()}

    def groups(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield headings with the names of their flags: first the dataclass's own, then those of nested dataclasses."""
        yield from getattr(self.kind, "flag_groups", {}).items()
        for inner in self.nested.values():
            yield from inner.groups()

    def build_instance(self, values: Mapping[str, Any]) -> Any:
        """Build the dataclass from the ``values`` of all its flags."""
        flags = {name: values[name] for name in self.flags}
        nested = {name: inner.build_instance(values) for name, inner in self.nested.items()}
        return self.build(**flags, **self.hidden_values, **nested)


def _make_group_specs(settings: _Settings) -> dict[type, StructConstructorSpec]:
    """Return the structures that tyro shows instead of the ``settings``: the main flags, and one type per group."""
    flags = settings.all_flags
    main_flags = getattr(settings.kind, "main_flags", tuple(flags))
    fields = [flags[name] for name in main_flags]
    remaining = {name: flag for name, flag in flags.items() if name not in main_flags}
    specs: dict[type, StructConstructorSpec] = {}
    group_names: list[str] = []
    for heading, names in (*settings.groups(), ("other", tuple(remaining))):
        members = tuple(remaining.pop(name) for name in names if name in remaining)
        if members:
            group = type("FlagGroup", (), {"__doc__": ""})
            specs[group] = StructConstructorSpec(dict, members)
            group_names.append(f"{heading}_group")  # A heading may have the name of a flag.
            kind: Any = Annotated[group, tyro.conf.arg(name=heading)]
            fields.append(StructFieldSpec(group_names[-1], kind, tyro.MISSING_NONPROP))

    def build_from_groups(**values: Any) -> Any:
        for name in group_names:
            values |= values.pop(name)
        return settings.build_instance(values)

    return specs | {settings.kind: StructConstructorSpec(build_from_groups, tuple(fields))}


def _with_layout(flag: StructFieldSpec) -> StructFieldSpec:
    """Return the flag with a noun for its value, and without a default that means "no value"."""
    kind: Any = flag.type
    annotations = kind.__metadata__ if get_origin(kind) is Annotated else ()
    if annotations:
        kind = kind.__origin__
    layout = tyro.conf.arg(metavar=_metavar(flag.name, kind), help_behavior_hint=_format_default)
    if any(isinstance(annotation, PrimitiveConstructorSpec) for annotation in annotations):
        layout = tyro.conf.arg(help_behavior_hint=_format_default)
    # tyro uses the last of two layouts, so the flag's own layout overrides this one.
    with_layout: Any = Annotated[(kind, layout, *annotations)]
    helptext = flag.helptext() if callable(flag.helptext) else flag.helptext
    # Docstrings are wrapped at the width of the code, so lines are joined unless a sentence or a list item ends there.
    return replace(flag, type=with_layout, helptext=helptext and re.sub(r"(?<![.:])\n(?!- )", " ", helptext))


def _metavar(name: str, kind: Any) -> str | None:
    """Return a noun for the value of the flag ``name``; None for a switch, which has no value."""
    if kind is bool:
        return None
    arguments = [argument for argument in get_args(kind) if argument not in (NoneType, Ellipsis)]
    if get_origin(kind) in (Union, UnionType) and len(arguments) == 1:
        return _metavar(name, arguments[0])
    if get_origin(kind) is tuple and len(arguments) == 1:
        return f"[{_metavar(name, arguments[0])} ...]"
    if kind is str:
        return name.split("_")[-1].upper()
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    return spec.metavar if isinstance(spec, PrimitiveConstructorSpec) else None


def _format_default(default: str) -> str:
    return "" if default in ("None", "False", "") else f"(default: {default})"
