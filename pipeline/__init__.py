"""Conversion of books to token shards, in Python ``make_shards(TokenizeConfig(("books",), out="data/books"))``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config import TokenizeConfig
    from pipeline.shards import Manifest


def make_shards(config: "TokenizeConfig", *, verbose: bool = False) -> "Manifest":
    """Turn books into token shards, as ``python -m pipeline.tokenize`` does, and return their manifest.

    With ``verbose`` it prints what the command prints. After an interruption, the same call finishes the data set.
    Raises ``infra.errors.UserError`` for invalid input.
    """
    from infra.cli.console import quiet
    from infra.cli.interrupts import interrupts
    from pipeline.shards import read_manifest
    from pipeline.tokenize import main

    with interrupts.handled(), quiet(not verbose):
        main(config)
    return read_manifest(config.out)
