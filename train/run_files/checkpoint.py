"""A run's state on disk, whole or not at all: weights, optimizer, loss scaling, random state, position in the data.

A thread writes a snapshot under a temporary name, reads it back and renames it while training continues. Weights are
safetensors, so that other programs can read them; the rest is a torch file that is only ever loaded with
``weights_only=True``. ``progress.json`` holds the checksums of both, and makes a folder a checkpoint.
"""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from infra.errors import UserError
from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY, sync_folder, write_json
from pipeline.encoding.tokenizer import Tokenizer
from pipeline.shards import TOKENIZER_FILE, checksum
from train.models.parallel import full_tensor, shard_like
from train.run_files.progress import PROGRESS, Progress, checkpoints_in, find_damage
from train.run_files.uploads import CYCLES, upload

WEIGHTS, _STATE = "model.safetensors", "state.pt"


@dataclass(frozen=True)
class Snapshot:
    """Tensors on the host; those from a GPU are complete once ``copy_done`` has happened."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    copy_done: torch.cuda.Event | None


def shared_names(model: nn.Module) -> dict[str, str]:
    """Names in the model's state of tensors that it has under an earlier name, too, with that name."""
    first: dict[int, str] = {}
    every = model.state_dict(keep_vars=True)
    return {name: first[id(value)] for name, value in every.items() if first.setdefault(id(value), name) != name}


def take_snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, losses: Tensor
) -> Snapshot:
    """Copy what the next step changes. On a GPU the copies are queued before that step and nothing waits for them.

    With sharded weights every worker must call it.
    """
    weights = {name: to_host(value) for name, value in model.state_dict().items()}
    for name in shared_names(model):  # such as a tied head's; safetensors stores each tensor once
        del weights[name]
    state = {
        "optimizer": _map_tensors(optimizer.state_dict(), to_host),
        "scaler": scaler.state_dict(),
        "rng": random_state(),
        "losses": to_host(losses),
    }
    copy_done = None
    if losses.is_cuda:
        copy_done = torch.cuda.Event()
        copy_done.record()
    return Snapshot(weights, state, copy_done)


def to_host(tensor: Tensor) -> Tensor:
    """A whole copy of ``tensor``; of one on a GPU it is queued, and nothing waits for it."""
    tensor = full_tensor(tensor.detach())
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper of tensors: torchao's quantised moments, which clone() breaks
        wrapper: Any = tensor
        names, context = wrapper.__tensor_flatten__()
        parts = {name: to_host(getattr(wrapper, name)) for name in names}
        return type(wrapper).__tensor_unflatten__(parts, context, wrapper.shape, wrapper.stride())
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in its dicts and lists changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map_tensors(inner, change) for name, inner in value.items()}
    return [_map_tensors(inner, change) for inner in value] if isinstance(value, list) else value


class Checkpoints:
    """The checkpoints of one run, ``folder/step-00000123``: written one by one in a thread; the newest are kept.

    Another thread copies them to object storage, whose client repeats requests for minutes where it does not respond.
    Neither training nor the next checkpoint waits for it; of those that have piled up, the newest are copied.
    """

    def __init__(
        self, folder: Path, keep: int, upload_dir: StorageDir | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.upload_dir = upload_dir
        self.tokenizer = tokenizer
        self.latest: Path | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copies = ThreadPoolExecutor(1, "copies")
        self._last_copy: Future[None] | None = None
        self._in_copy: Path | None = None
        self._removal = threading.Lock()
        """Held while old checkpoints are removed, and while one of those that are there is chosen to be copied."""
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, snapshot: Snapshot, progress: Progress, is_valid: Callable[[list[float]], bool]) -> None:
        """Write ``snapshot`` in the background, after a checkpoint that is still being written.

        A state is discarded when its weights are not finite or ``is_valid`` rejects its losses, so that the last good
        checkpoint is kept. Raises ``UserError`` when an earlier one could not be written, or not be copied.
        """
        self._wait_for_write()
        self._thread = threading.Thread(target=self._write, args=(snapshot, progress, is_valid), name="checkpoint")
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait until all is written and copied; returns the newest checkpoint that this run wrote."""
        self._wait_for_write()
        if self._last_copy:
            self._last_copy.result()
            self._raise_failure()
        return self.latest

    def _wait_for_write(self) -> None:
        if self._thread:
            self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise UserError(
                f"Cannot write the checkpoint to {self.folder}{f' or {self.upload_dir}' if self.upload_dir else ''}: "
                f"{self._failure}. Free disk space or fix the storage, then resume the run with --resume. The earlier "
                "checkpoints are intact."
            ) from self._failure

    def address(self, checkpoint: Path) -> str:
        """Where a user finds ``checkpoint``: in object storage if it is copied there."""
        return str(self.upload_dir / f"checkpoints/{checkpoint.name}") if self.upload_dir else str(checkpoint)

    def _write(self, snapshot: Snapshot, progress: Progress, is_valid: Callable[[list[float]], bool]) -> None:
        try:
            if snapshot.copy_done is not None:
                snapshot.copy_done.synchronize()
            finite = all(bool(torch.isfinite(value).all()) for value in snapshot.weights.values())
            if finite and is_valid(snapshot.state["losses"].tolist()):
                self.latest = write(self.folder, snapshot, progress, self.tokenizer)
                for later in checkpoints_in(self.folder):
                    if later.name > self.latest.name:  # damaged, or the run would have continued from there
                        shutil.rmtree(later, ignore_errors=True)
                self._remove_old()
                if self.upload_dir:
                    self._last_copy = self._copies.submit(self._copy, self.latest, self.upload_dir)
        except Exception as failure:  # noqa: BLE001 raised in the thread that trains
            self._failure = failure
            for leftover in self.folder.glob(f"{TEMPORARY}*"):  # on a disk that may be full
                shutil.rmtree(leftover, ignore_errors=True)

    def _remove_old(self) -> None:
        with self._removal:
            for old in checkpoints_in(self.folder)[: -self.keep]:
                if old != self._in_copy:
                    shutil.rmtree(old, ignore_errors=True)

    def _copy(self, checkpoint: Path, directory: StorageDir) -> None:
        """Copy ``checkpoint`` to object storage, unless it has become one of the old ones meanwhile."""
        with self._removal:
            if self._failure or not checkpoint.exists():
                return
            self._in_copy = checkpoint
        failure = None
        try:
            upload(checkpoint, self.folder.parent / CYCLES, directory, self.keep)
        except Exception as refused:  # noqa: BLE001 raised in the thread that trains
            failure = refused
        self._in_copy = None
        self._remove_old()
        self._failure = self._failure or failure


def write(folder: Path, snapshot: Snapshot, progress: Progress, tokenizer: Tokenizer | None = None) -> Path:
    """Write one checkpoint, with its ``tokenizer``: to a temporary name, fsynced, read back, renamed."""
    name = f"step-{progress.step:08d}"
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{name}"
    temporary.mkdir()
    save_weights(snapshot.weights, temporary / WEIGHTS)
    torch.save(snapshot.state, temporary / _STATE)
    names = [WEIGHTS, _STATE]
    if tokenizer and not tokenizer.is_gpt2:
        names.append(TOKENIZER_FILE)
        (temporary / TOKENIZER_FILE).write_bytes(tokenizer.content)
    for file in names:
        with (temporary / file).open("rb") as opened:
            os.fsync(opened.fileno())
    if any(not torch.equal(value, snapshot.weights[key]) for key, value in load_file(temporary / WEIGHTS).items()):
        raise OSError(f"{temporary / WEIGHTS} differs from what was written when it is read back")
    files = {file: checksum(temporary / file) for file in names}
    write_json(temporary / PROGRESS, to_json(replace(progress, files=files)))
    if (folder / name).exists():
        aside = folder / f"{TEMPORARY}old-{name}"
        (folder / name).rename(aside)
        temporary.rename(folder / name)
        shutil.rmtree(aside)
    else:
        temporary.rename(folder / name)
    sync_folder(folder)
    return folder / name


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write ``weights`` to a new ``file``, which the umask protects as any other: the library makes it private."""
    file.touch()
    mode = file.stat().st_mode
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(mode)


def load_weights(checkpoint: Path, model: nn.Module, device: torch.device) -> None:
    weights = load_file(checkpoint / WEIGHTS, device=str(device))
    weights |= {name: weights[other] for name, other in shared_names(model).items()}
    model.load_state_dict({name: shard_like(weights[name], like) for name, like in model.state_dict().items()})


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> list[float]:
    """Load the state of ``checkpoint``; returns the losses of steps that have not been reported."""
    fault = find_damage(checkpoint)
    if fault:
        raise UserError(f"{checkpoint} is damaged: {fault}; remove it to continue from the checkpoint before it.")
    load_weights(checkpoint, model, device)
    # To the host first: AdamW without a fused kernel keeps its step count there, and would wait for a copy on the GPU
    # at every step. The optimizer moves the rest to its parameters.
    state = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["optimizer"].get("state", {}).items():
        like = parameters[index]
        state["optimizer"]["state"][index] = {
            name: shard_like(value, like) if isinstance(value, Tensor) else value for name, value in values.items()
        }
    settings = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, ours in zip(optimizer.param_groups, settings, strict=True):
        group.update(ours)  # decay and betas come from the config, which may have changed them
    if state["scaler"]:  # empty unless the run was in fp16 before
        scaler.load_state_dict(state["scaler"])
    restore_random_state(state["rng"])
    return state["losses"].tolist()


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators, which decide dropout."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # otherwise asking would take memory of a GPU that a run on the CPU does not use
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"].cpu())
