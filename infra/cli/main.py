"""The console script ``throughline``, which runs every command: ``throughline run`` is ``python -m train.run``.

``python -m`` looks in the current folder first. If that folder has a ``train.py``, as nanoGPT's does, ``python -m
train.run`` imports that file instead. A console script does not look there.
"""

import importlib
import re
import runpy
import sys
from pathlib import Path

import tyro

from infra.cli import command, flags
from infra.cli.console import open_streams
from infra.cli.flag_groups import grouping_registry
from infra.errors import UserError

COMMANDS = {
    "tokenize": ("pipeline.tokenize", "TokenizeConfig"),
    "inspect": ("pipeline.inspect", "InspectConfig"),
    "vocabulary": ("pipeline.vocabulary", "VocabularyConfig"),
    "run": ("train.run", "RunOptions"),
    "ladder": ("tune.ladder", "LadderConfig"),
    "plan": ("train.plan", "PlanOptions"),
    "profile": ("train.profile.__main__", "ProfileOptions"),
    "generate": ("train.generate", "GenerateConfig"),
    "export": ("train.export", "ExportConfig"),
    "search": ("tune.search", "SearchConfig"),
    "doctor": ("infra.doctor.__main__", "DoctorOptions"),
}
"""Module and class of flags of each command, by its short name."""


def main() -> None:
    """Run the command named by the first argument; otherwise tyro prints help or writes a completion script."""
    open_streams()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:  # Only the module of this command is imported.
        command.program = f"throughline {name}"
        sys.argv[1:] = arguments
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
        return
    options = {name: getattr(importlib.import_module(module), kind) for name, (module, kind) in COMMANDS.items()}
    registry = grouping_registry(options.values())
    try:
        with flags.tyro_errors_as_user_errors():
            tyro.extras.subcommand_cli_from_dict(
                options, prog="throughline", args=[name, *arguments], config=flags.TYRO_MARKERS, registry=registry
            )
    except SystemExit:
        if name == "--tyro-write-completion" and (file := Path(arguments[1])).is_file():
            # The shell would offer each further line of a flag's description as a completion.
            spec = re.compile("^COMPLETION_SPEC.*", re.MULTILINE)
            file.write_text(spec.sub(lambda line: line[0].replace("\\n", " "), file.read_text()))
        raise
    except (UserError, AssertionError) as mistake:  # tyro raises AssertionError for a shell that it does not support.
        command.exit_with_error(mistake)
    except OSError as failure:
        command.exit_with_error(UserError(f"Cannot write {failure.filename}: {failure.strerror}. Choose another file."))
