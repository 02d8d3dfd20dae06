"""A search from its config to its files: what is checked before, what is kept, and what is said.

The folder ``runs/NAME/`` holds ``search.json`` (what is searched, and the parent run), ``trials/`` (a
JSON file a finished trial: the search's only state) and, at the end, the files for people.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import ray

from infra import provenance
from infra.cluster import connected
from infra.command import INTERRUPTED, UserError, console
from infra.gpu import read_gpu
from infra.storage import write_json
from infra.tracking import RunKey, Tracker
from infra.units import format_size
from pipeline.shards import read_manifest
from train.config import format_model
from tune import report
from tune.config import SearchConfig
from tune.driver import Listener, Proposals, drive, trial_resources
from tune.evidence import Evidence, describe, open_parent
from tune.record import Proposal, Row, read_rows
from tune.space import Space, make_space, parse_knobs
from tune.strategies import Confirmed, Grid, Strategy
from tune.trial import Request


def search(config: SearchConfig) -> int:
    """Run the command; returns its exit code. Raises ``UserError``."""
    manifest = read_manifest(config.training.data)
    name = config.resume or config.name or f"search-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (config.out / name).resolve()
    if folder.exists() and not config.resume:
        raise UserError(f"{folder} exists already: continue it with --resume {name}, or give another --name.")
    with connected(config.address):
        device = pick_device(config)
        limit = memory_limit(config, device)
        space = make_space(config.training, parse_knobs(config.knobs), device=device)
        strategy = Confirmed(make_strategy(config, space), space, config.confirm)
        parent = open_folder(folder, config, name)
        evidence = Evidence(parent, manifest)
        trials = folder / "trials"
        data = config.training.data.resolve()
        console.print(
            f"[bold]{format_model(config.training.model)}[/bold]: {len(space.candidates())} candidates for "
            f"{config.training.global_batch} sequences a step, limit {format_size(limit)} a process, "
            f"on {device}; {folder}"
        )
        with Tracker(parent) as tracker:
            describe(tracker, config.identity(), manifest, data)
            evidence.catch_up(read_rows(trials), data)

            def ended(row: Row, rows: Sequence[Row]) -> None:
                evidence.end(row, data)
                console.print(report.row_text(row, limit), markup=False)
                console.print(report.progress_text(rows, strategy.remaining(rows)), markup=False)

            def request(proposal: Proposal, number: int) -> Request:
                trial = space.config(proposal.candidate).to_json() | {"data": str(data)}
                return Request(
                    proposal.key(folder.name), number, proposal, trial, limit, config.trial_steps, config.trial_time,
                    config.trial_precision, str(trials), time.time(),
                )  # fmt: skip

            proposals = Proposals(strategy, trials, Listener(evidence.start, ended), request)
            drive(proposals, folder, trial_resources(device == "cuda"))
            rows = read_rows(trials)
            if strategy.propose(rows) is not None:
                console.print(f"stopped; continue with: python -m tune.search --resume {name}")
                tracker.finish("KILLED")
                return INTERRUPTED
            for file in report.write_files(rows, space, config, limit, folder):
                tracker.file(file)
            tracker.note(report.summary(rows, space, config, limit, folder))
            tracker.finish()
    report.print_end(rows, space, limit, folder)
    return 0


def make_strategy(config: SearchConfig, space: Space) -> Strategy:
    """The strategy that ``--searcher`` names."""
    return Grid(space)


def open_folder(folder: Path, config: SearchConfig, name: str) -> RunKey:
    """Make the search's folder and parent run, or find those of the search that is resumed."""
    kept = folder / "search.json"
    if config.resume:
        try:
            return RunKey(**json.loads(kept.read_text(encoding="utf-8"))["parent"])
        except FileNotFoundError:
            raise UserError(f"--resume {name}: there is no {kept}; 'ls {folder.parent}' lists searches.") from None
    parent = open_parent(name, config.tracking_uri, provenance.collect())
    (folder / "trials").mkdir(parents=True)
    write_json(kept, {"identity": config.identity(), "parent": asdict(parent)})
    return parent


def pick_device(config: SearchConfig) -> str:
    """Where trials run: ``cuda`` or ``cpu``. Raises ``UserError`` when a GPU is asked for and absent, or in use."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if config.training.device == "cpu" or not gpus:
        if config.training.device == "cuda":
            raise UserError("--device cuda needs a GPU and Ray finds none here; use --device cpu or --address.")
        return "cpu"
    state = read_gpu()
    if state and state.other_processes:
        raise UserError(
            f"{state.name} is in use by process {', '.join(map(str, state.other_processes))}, which would share its "
            "memory and time with the trials: end it, or choose another GPU with CUDA_VISIBLE_DEVICES."
        )
    return "cuda"


def memory_limit(config: SearchConfig, device: str) -> int:
    """The limit in bytes: the flag, else the device's whole memory."""
    if config.memory_limit is not None:
        return config.memory_limit
    state = read_gpu() if device == "cuda" else None
    return state.memory_total if state else psutil.virtual_memory().total
