"""The console script ``throughline``: every command under one name, as ``throughline run`` for ``python -m train.run``.

``python -m`` looks in the current folder first: where that holds a ``train.py``, as nanoGPT's does, ``python -m
train.run`` runs that file. A console script does not look there. Nothing is imported before the command is known, so
that ``throughline --help`` answers at once.
"""

import importlib
import io
import runpy
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

PROGRAM = "throughline"

COMPLETION = "--tyro-write-completion"
"""tyro's flag, here for all commands at once: ``throughline --tyro-write-completion bash FILE``."""


SHELLS = ("bash", "zsh", "fish", "tcsh")


class Command(NamedTuple):
    """A command: the module after ``python -m``, where its options are defined, and what it does."""

    module: str
    options: str
    does: str


COMMANDS = {
    "tokenize": Command("pipeline.tokenize", "pipeline.config:TokenizeConfig", "turn books into token shards"),
    "inspect": Command("pipeline.inspect", "pipeline.inspect:InspectConfig", "show and verify a folder of shards"),
    "run": Command("train.run", "train.run:RunOptions", "train one configuration and measure it"),
    "ladder": Command("tune.ladder", "tune.config:LadderConfig", "measure what each optimisation gains"),
    "plan": Command("train.plan", "train.plan:PlanOptions", "predict memory, arithmetic, time and cost of a run"),
    "profile": Command("train.profile", "train.profile.__main__:ProfileOptions", "show where time and memory go"),
    "generate": Command("train.generate", "train.generate:GenerateConfig", "continue a prompt with a trained model"),
    "export": Command("train.export", "train.export:ExportConfig", "write a model in the Hugging Face format"),
    "search": Command("tune.search", "tune.config:SearchConfig", "find the fastest configuration under a limit"),
    "doctor": Command("infra.doctor", "infra.doctor.__main__:DoctorOptions", "check and measure this machine"),
}


def main() -> int:
    """Run the command that the first word names, which exits; returns the exit code of ``throughline`` without one."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        from infra import command

        command.program = f"{PROGRAM} {name}"
        sys.argv = [sys.argv[0], *words]
        runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)
        return 0
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == COMPLETION:
        return write_completion(sys.argv[1:])
    print(f"error: {PROGRAM} has no command {name}: '{PROGRAM} --help' lists them.", file=sys.stderr)
    return 2


def usage() -> str:
    """The text of ``throughline --help``."""
    lines = [f"  {name:10}{command.does}" for name, command in COMMANDS.items()]
    return "\n".join(
        [f"usage: {PROGRAM} COMMAND [FLAGS]", "", *lines, "", f"{PROGRAM} COMMAND --help shows its flags."]
    )


def write_completion(words: list[str]) -> int:
    """Write a completion script for all commands by tyro's own flag: ``words`` are the flag, a shell and a file.

    Returns the exit code.
    """
    if len(words) != 3 or words[1] not in SHELLS:
        print(f"error: {COMPLETION} takes a shell ({', '.join(SHELLS)}) and a file.", file=sys.stderr)
        return 2
    import tyro

    defined = {name: command.options.split(":") for name, command in COMMANDS.items()}
    options = {name: getattr(importlib.import_module(module), kind) for name, (module, kind) in defined.items()}
    with redirect_stdout(io.StringIO()) as script, suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(options, prog=PROGRAM, args=[*words[:2], "-"])
    # The script offers every further line of a flag's description as a word of its own.
    lines = [
        line.replace("\\n", " ") if line.startswith("COMPLETION_SPEC") else line
        for line in script.getvalue().splitlines()
    ]
    file = Path(words[2]).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as refused:
        print(f"error: {file} cannot be written ({refused.strerror}): name another file.", file=sys.stderr)
        return 2
    return 0
