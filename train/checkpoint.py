"""A run's state on disk, whole or not at all: weights, optimizer, random state, and position in the data.

Weights are safetensors, so that anything can read them; the rest is a torch file that is only ever
loaded with ``weights_only=True``. A checkpoint is a folder that appears by one rename.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from infra.command import UserError
from infra.storage import TEMPORARY, sync_folder, write_json

_WEIGHTS, _STATE, _PROGRESS = "model.safetensors", "state.pt", "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is not a tensor."""

    step: int
    position: int
    """Windows consumed, over all workers."""
    val_tokens: int
    elapsed: float
    data_fingerprint: str
    config: dict[str, Any]


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Write the checkpoint ``folder/step-00000123`` and return its path; older ones are removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{progress.step:08d}"
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    weights = model.state_dict()
    if progress.config["model"]["tied"]:
        del weights["head.weight"]  # the same tensor as the embedding; safetensors stores each once
    save_file(weights, temporary / _WEIGHTS)
    torch.save({"optimizer": optimizer.state_dict(), "rng": random_state()}, temporary / _STATE)
    write_json(temporary / _PROGRESS, asdict(progress))
    for file in temporary.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    shutil.rmtree(folder / name, ignore_errors=True)
    temporary.chmod(0o755)
    temporary.rename(folder / name)
    sync_folder(folder)
    for old in sorted(folder.glob("step-*"))[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    return folder / name


def newest(folder: Path) -> Path | None:
    """The newest checkpoint under ``folder``, if there is one."""
    return max(folder.glob("step-*"), default=None)


def read_progress(checkpoint: Path) -> Progress:
    """Where the run that wrote ``checkpoint`` stood. Raises ``UserError`` when it is no checkpoint."""
    try:
        return Progress(**json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError) as damage:
        raise UserError(f"{checkpoint} is no checkpoint that can be read ({damage}).") from damage


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Progress:
    """Put the state of ``checkpoint`` into ``model``, ``optimizer`` and the random generators."""
    progress = read_progress(checkpoint)
    weights = load_file(checkpoint / _WEIGHTS, device=str(device))
    if progress.config["model"]["tied"]:
        weights["head.weight"] = weights["token_embedding.weight"]
    model.load_state_dict(weights)
    state = torch.load(checkpoint / _STATE, map_location=device, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    restore_random_state(state["rng"])
    return progress


def random_state() -> dict[str, torch.Tensor]:
    """torch's generators, which decide dropout."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
