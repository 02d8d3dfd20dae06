"""Entry: ``python -m train.run`` trains one configuration on token shards and records what it measured.

In: flags, or ``--config`` with a file that flags override. Out: ``runs/NAME/`` with config.json,
cycles.jsonl, result.json and a checkpoint, and an MLflow run. Wiring only.
"""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from infra import command
from infra.command import INTERRUPTED, UserError, console
from infra.storage import write_json
from train.config import TrainConfig, format_model, load_config


@dataclass(frozen=True)
class RunOptions:
    """What the command needs beside the training config."""

    training: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    name: str | None = None
    """Name of the run and of its folder; made from the model and the time when left out."""
    out: Path = Path("runs")
    """Folder that holds runs."""
    config: Path | None = None
    """Read the training settings from this JSON file; flags given beside it win."""
    resume: str | None = None
    """Continue an earlier run, by its name or the path of its folder or checkpoint."""
    tracking_uri: str | None = None
    """MLflow store; default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db."""
    address: str | None = None
    """Ray cluster to run on; default a Ray of its own on this machine."""


def main() -> None:
    """Parse, train, report, exit."""
    defaults = RunOptions()
    try:
        path = command.flag_value("--config")
        if path:
            defaults = dataclasses.replace(defaults, training=load_config(Path(path)))
    except UserError as mistake:
        command.refuse(mistake)
    command.run(
        train,
        RunOptions,
        module="train.run",
        description="Train a GPT-2 on token shards, measure it, and record everything in MLflow.",
        default=defaults,
    )


def train(options: RunOptions) -> int:
    """Run one training from its options; returns the exit code."""
    from infra import provenance
    from infra.tracking import Tracker, create_run
    from pipeline.shards import read_manifest
    from train import report, worker

    config = options.training
    resume = find_checkpoint(options.resume, options.out) if options.resume else None
    manifest = read_manifest(config.data)
    if resume:
        folder = resume.parent.parent
    else:
        preset = format_model(config.model).partition(",")[0]
        name = options.name or f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = (options.out / name).resolve()
        if folder.exists():
            raise UserError(f"{folder} exists already: continue it with --resume {name}, or give another --name.")
    key = create_run(
        "train", folder.name, tracking_uri=options.tracking_uri, tags=provenance.collect() | {"kind": "run"}
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config.to_json())
    report.print_header(config, manifest, folder)
    with Tracker(key) as tracker:
        report.record_start(tracker, config, manifest)
        status = "FAILED"
        try:
            result = worker.run(
                config, folder, key=key, resume=resume, address=options.address,
                on_cycle=lambda cycle: console.print(cycle["line"]),
            )  # fmt: skip
            write_json(folder / "result.json", result.to_json())
            report.record_end(tracker, config, result)
            status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(result.outcome, "FAILED")
        finally:
            tracker.finish(status)
    report.print_result(result, folder)
    if result.outcome == "interrupted":
        return INTERRUPTED
    return 0 if result.outcome == "finished" else 1


def find_checkpoint(text: str, out: Path) -> Path:
    """The checkpoint that ``--resume`` names: a run's name, its folder, or a checkpoint's folder."""
    from train.checkpoint import newest

    for folder in (out / text, Path(text)):
        if (folder / "progress.json").is_file():
            return folder.resolve()
        found = newest(folder / "checkpoints")
        if found:
            return found.resolve()
    raise UserError(f"--resume {text}: there is no checkpoint under {out / text} or {text}; 'ls {out}' lists runs.")


if __name__ == "__main__":
    main()
