"""The console script ``throughline``: every command under one name, as ``throughline run`` for ``python -m train.run``.

``python -m`` looks in the current folder first: where that holds a ``train.py``, as nanoGPT's does, ``python -m
train.run`` runs that file. A console script does not look there.
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
"""The module that runs each command, and the class of its flags."""


def main() -> None:
    """Run the command that the first word names; without one, tyro prints the help or writes a completion script."""
    open_streams()
    name, *words = sys.argv[1:] or ["--help"]
    if name in COMMANDS:  # and no other is imported
        command.program = f"throughline {name}"
        sys.argv[1:] = words
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
        return
    options = {name: getattr(importlib.import_module(module), kind) for name, (module, kind) in COMMANDS.items()}
    registry = grouping_registry(options.values())
    try:
        with flags.tyro_errors_as_user_errors():
            tyro.extras.subcommand_cli_from_dict(
                options, prog="throughline", args=[name, *words], config=flags.MARKERS, registry=registry
            )
    except SystemExit:
        if name == "--tyro-write-completion" and (file := Path(words[1])).is_file():
            # The script would offer every further line of a flag's description as a word of its own.
            spec = re.compile("^COMPLETION_SPEC.*", re.MULTILINE)
            file.write_text(spec.sub(lambda line: line[0].replace("\\n", " "), file.read_text()))
        raise
    except (UserError, AssertionError) as mistake:  # the latter is about shells that tyro does not know
        command.exit_with_error(mistake)
    except OSError as refused:
        command.exit_with_error(
            UserError(f"{refused.filename} cannot be written ({refused.strerror}): name another file.")
        )
