"""Parsing of flags: tyro turns the command line into a config, and invalid input into a short message."""

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

TYRO_MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalMetavarFromFieldName)
"""Settings of tyro: a flag has the name of its field, without the name of the dataclass that it is nested in."""


def parse_flags(config: type[Config], program: str, default: Config | None = None) -> Config:
    """Parse ``config`` from the command line; fields without a flag have the values of ``default``.

    Raises ``UserError`` for invalid input.
    """
    options: Any = {} if default is None else {"default": default}
    with tyro_errors_as_user_errors():
        return tyro.cli(
            config, prog=program, description=inspect.cleandoc(config.__doc__ or ""), args=_arguments(),
            config=TYRO_MARKERS, registry=grouping_registry([config], default), **options,
        )  # fmt: skip


def parse_only(config: type[Any], *names: str) -> Any:
    """Parse only the fields ``names`` of ``config``, such as ``--config``, whose file has defaults of the others."""
    selected = make_dataclass("Selected", [(f.name, f.type, f.default) for f in fields(config) if f.name in names])
    with tyro_errors_as_user_errors():
        values, _ = tyro.cli(selected, args=_arguments(), config=TYRO_MARKERS, add_help=False, return_unknown_args=True)
    # The value is empty if it was an unset variable of the shell.
    if empty_names := [name for name, value in vars(values).items() if value == ""]:
        raise UserError(f"--{empty_names[0]} is empty. Set a value, or remove the flag.")
    return values


def _arguments() -> list[str]:
    """Return the arguments of the command line. Raises ``UserError`` for one with a secret or invalid characters.

    A file whose name begins with a dash, which a shell may insert for ``*.txt``, gets the prefix ``./``.
    """
    for argument in sys.argv[1:]:
        if re.search("[\ud800-\udfff]", argument):  # Python's surrogates stand for bytes that are not UTF-8.
            advice = "Rename it, or name its folder."
            if sys.getfilesystemencoding() != "utf-8":
                advice = "The locale has another encoding, so set PYTHONUTF8=1."
            raise UserError(f"{argument!r} is not UTF-8, which Ray requires. {advice}")
        if has_secret(argument):
            raise UserError(
                "A URL on the command line contains a password, token or key. It would be visible in the process list "
                "and stored with the results. Remove it, and set environment variables instead, such as "
                "MLFLOW_TRACKING_PASSWORD, PGPASSWORD, AWS_SECRET_ACCESS_KEY or HF_TOKEN."
            )
    return [
        f"./{argument}" if re.match("-[^-]", argument) and os.path.lexists(argument) else argument
        for argument in sys.argv[1:]
    ]


@contextmanager
def tyro_errors_as_user_errors() -> Iterator[None]:
    """Raise ``UserError`` for invalid input that tyro reports in the block.

    If the reader of ``--help`` has exited, such as ``head``, the process exits with code 0.
    """
    stderr_buffer = io.StringIO()
    terminal_variables = {} if {"-h", "--help"} & set(sys.argv) else {"COLUMNS": "10000"}
    try:
        try:
            with redirect_stderr(stderr_buffer), environment_variables(terminal_variables):
                yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        console.on_broken_pipe()
        sys.exit(0)
    except SystemExit as tyro_exit:
        if tyro_exit.code:
            raise UserError(summarize_tyro_error(stderr_buffer.getvalue())) from None
        raise
    errors.print(stderr_buffer.getvalue(), markup=False, end="")  # Without an error, tyro has printed only warnings.


def summarize_tyro_error(message: str) -> str:
    """Return the error and the suggestions in a message of tyro, without its frame, title and repeated help."""
    lines = [line[2:].rstrip(" │╯") for line in message.splitlines()[1:]]
    text = "\n".join(line for line in lines if not line.startswith(" " * 8))  # Such lines repeat the help of flags.
    paragraphs = (" ".join(part.split()) for part in re.split("^[─-]*$", text, flags=re.MULTILINE))
    error, *hints = filter(None, paragraphs)
    error = re.sub(r"^Error parsing (\S+(?=: --)|(?!--)\S+): ", "", error)  # The text after it names the flag itself.
    hints = [hint for hint in hints if hint.split()[0] in ("Perhaps", "Arguments", "Available")]
    return " ".join(re.sub(r"(?<![.?])$", ".", sentence) for sentence in (error, *hints))
