"""Flags of the command line: tyro parses them into a config, and invalid input becomes one sentence."""

import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields, make_dataclass
from typing import Any, TypeVar

import tyro

from infra.cli.console import console, errors
from infra.cli.flag_groups import grouping_registry
from infra.errors import UserError
from infra.ray.local_ray import environment_variables
from infra.storage.credentials import has_secret

Config = TypeVar("Config")

MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalMetavarFromFieldName)
"""Flags have the names of their fields alone, and the help text groups those of a nested dataclass."""


def parse_flags(config: type[Config], program: str, default: Config | None = None) -> Config:
    """``config`` from the command line, the rest from ``default``. Raises ``UserError``, a sentence, for a mistake."""
    start: Any = {} if default is None else {"default": default}
    with tyro_errors_as_user_errors():
        return tyro.cli(
            config, prog=program, description=inspect.cleandoc(config.__doc__ or ""), args=_words(), config=MARKERS,
            registry=grouping_registry([config], default), **start,
        )  # fmt: skip


def parse_only(config: type[Any], *names: str) -> Any:
    """Only these fields of ``config``, from which the defaults of the others follow: ``--config`` names a file."""
    some = make_dataclass("Some", [(f.name, f.type, f.default) for f in fields(config) if f.name in names])
    with tyro_errors_as_user_errors():
        made, _ = tyro.cli(some, args=_words(), config=MARKERS, add_help=False, return_unknown_args=True)
    if empty := [name for name, value in vars(made).items() if value == ""]:  # as of a shell's variable that is not set
        raise UserError(f"--{empty[0]} is empty: give it a value, or leave it out.")
    return made


def _words() -> list[str]:
    """The command line. Raises ``UserError`` for a word that must not be used further.

    A file whose name begins with a dash, as a shell writes it for ``*.txt``, is marked as a file.
    """
    for word in sys.argv[1:]:
        if re.search("[\ud800-\udfff]", word):  # bytes that are not UTF-8
            step = "rename it, or name the folder it is in"
            if sys.getfilesystemencoding() != "utf-8":
                step = "the locale has another encoding, so set PYTHONUTF8=1"
            raise UserError(f"{word!r} is not UTF-8, which Ray requires: {step}.")
        if has_secret(word):
            raise UserError(
                "An address on the command line contains a password, token or key. The list of processes would show it "
                "and results would store it. Remove it, and set environment variables instead, such as "
                "MLFLOW_TRACKING_PASSWORD, PGPASSWORD, AWS_SECRET_ACCESS_KEY or HF_TOKEN."
            )
    return [f"./{word}" if re.match("-[^-]", word) and os.path.lexists(word) else word for word in sys.argv[1:]]


@contextmanager
def tyro_errors_as_user_errors() -> Iterator[None]:
    """Raise ``UserError`` for a mistake that tyro reports in the block, and end after help even if its reader left."""
    stderr_buffer = io.StringIO()
    wide = {} if {"-h", "--help"} & set(sys.argv) else {"COLUMNS": "10000"}
    try:
        try:
            with redirect_stderr(stderr_buffer), environment_variables(wide):
                yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        console.on_broken_pipe()
        sys.exit(0)
    except SystemExit as leaving:
        if leaving.code:
            raise UserError(summarize_tyro_error(stderr_buffer.getvalue())) from None
        raise
    errors.print(stderr_buffer.getvalue(), markup=False, end="")  # warnings


def summarize_tyro_error(message: str) -> str:
    """What a message of tyro's says and suggests, without its frame, its title, and the help that it repeats."""
    lines = [line[2:].rstrip(" │╯") for line in message.splitlines()[1:]]
    text = "\n".join(line for line in lines if not line.startswith(" " * 8))  # where flags are described
    first, *others = filter(None, (" ".join(part.split()) for part in re.split("^[─-]*$", text, flags=re.MULTILINE)))
    first = re.sub(r"^Error parsing (\S+(?=: --)|(?!--)\S+): ", "", first)  # what names a flag itself
    hints = [part[0].lower() + part[1:] for part in others if part.split()[0] in ("Perhaps", "Arguments", "Available")]
    return re.sub(r"(?<![.?])$", ".", "; ".join([first, *hints]))
