"""Train a model on token shards or books, and measure the run.

The interface for Python is :func:`train`, with :class:`Callback`, and :func:`open_shards`, for example
``train(TrainConfig.of(steps=100), name="first")``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.callbacks import Callback, TrainStep

if TYPE_CHECKING:
    from pipeline.shards import Split
    from train.config import TrainConfig
    from train.data.torch_dataset import TokenDataset
    from train.result import RunResult


__all__ = ["Callback", "TrainStep", "open_shards", "train"]


def train(
    config: "TrainConfig",
    name: str | None = None,
    out: str = "runs",
    *,
    callbacks: Sequence[Callback] = (),
    verbose: bool = False,
) -> "RunResult":
    """Train and measure one configuration, as ``python -m train.run`` does, and return the result.

    The run is stored in ``out/name`` and in MLflow. The loop calls the methods of ``callbacks``, which must be empty
    for a run in processes of Ray: several workers, a book stream or a cluster. With ``verbose`` the run prints what
    the command prints. Raises ``infra.errors.UserError`` for errors that a user can correct.
    """
    import json

    from infra.cli.console import quiet
    from infra.cli.interrupts import interrupts
    from infra.schema import from_json
    from infra.storage.directory import StorageDir
    from train import run
    from train.result import RunResult

    name = name or run.default_name(config.model)
    with interrupts.handled(), quiet(not verbose):
        run.run(run.RunOptions(config, name, out), callbacks)
    run_dir = StorageDir.of(out) / name
    if not run_dir.exists("result.json"):
        raise KeyboardInterrupt
    return from_json(RunResult, json.loads(run_dir.read("result.json")), f"{run_dir}/result.json")


def open_shards(data: str, context_length: int = 1024, split: "Split" = "train") -> "TokenDataset":
    """Open token shards as torch's map-style dataset of (inputs, targets), each int64 of shape (context_length,)."""
    from train.data.torch_dataset import TokenDataset

    return TokenDataset(data, context_length, split)
