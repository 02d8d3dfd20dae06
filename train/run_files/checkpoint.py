"""Checkpoints: weights, optimizer, loss scaling, random state and position in the data, written atomically.

A thread writes a snapshot to a temporary name, reads it back and renames it while training continues. Weights are in
the safetensors format, which other programs can read. All other tensors are in a torch file that is only loaded with
``weights_only=True``. ``progress.json`` has the checksums of both files, and makes the folder a checkpoint.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from infra.device.pinned import pinned_like
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY_PREFIX, sync_folder, write_json
from pipeline.encoding.tokenizer import Tokenizer
from pipeline.shards import TOKENIZER_FILE, checksum
from train.models.blocks import shared_names
from train.models.parallel import full_tensor, shard_like
from train.run_files.host_copy import PendingCopies, copy_to_host
from train.run_files.progress import PROGRESS, Progress, checkpoints_in, find_damage
from train.run_files.uploads import CHECKPOINTS, CYCLES, upload

WEIGHTS, _STATE = "model.safetensors", "state.pt"
"""Files of a checkpoint with its weights, and with its other tensors."""
PART_BYTES = 2**23
"""Bytes of a tensor that are checked at a time."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of a run's tensors on the host, once :attr:`copies` are made."""

    weights: dict[str, Tensor]
    """Weights of the model, by name."""
    state: dict[str, Any]
    """State of the optimizer, the loss scaling and the random generators, and losses that are not reported yet."""
    copies: PendingCopies
    """The copies from a GPU, which :meth:`Checkpoints.save` makes. The optimizer must not run before."""


def take_snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, losses: Tensor
) -> Snapshot:
    """Copy the tensors that the next step changes. With sharded weights every worker must call it.

    On a GPU the weights and the optimizer's state are only listed, because nothing but the next run of the optimizer
    changes them. Other tensors of the model may change in its forward pass, so their copies are queued.
    """
    copies = PendingCopies()

    def copy_later(tensor: Tensor) -> Tensor:
        return _copy(tensor, copies.add)

    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights = {
        name: copy_later(value) if name in parameters else to_host(value)
        for name, value in _stored_weights(model).items()
    }
    state = {
        "optimizer": _map_tensors(optimizer.state_dict(), copy_later),
        "scaler": scaler.state_dict(),
        "rng": random_state(),
        "losses": to_host(losses),
    }
    copies.mark_ready()
    return Snapshot(weights, state, copies)


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take part in the snapshot of sharded weights that the first worker takes, without keeping a copy."""
    for value in _stored_weights(model).values():
        full_tensor(value.detach())
    _map_tensors(optimizer.state_dict(), lambda tensor: full_tensor(tensor.detach()))


def _stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of ``model`` by name without repeated ones, such as a tied output head: safetensors stores
    each tensor once."""
    shared = shared_names(model)
    return {name: value for name, value in model.state_dict().items() if name not in shared}


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a checkpoint's weights and optimizer state."""
    sizes: list[int] = []

    def add(tensor: Tensor) -> None:
        sizes.append(tensor.numel() * tensor.element_size())

    _map_tensors([model.state_dict(), optimizer.state_dict()], add)
    return sum(sizes)


def to_host(tensor: Tensor) -> Tensor:
    """Copy the small ``tensor`` to the host. Copying from a GPU is queued, and nothing waits for it."""
    return _copy(tensor, lambda on_gpu: pinned_like(on_gpu).copy_(on_gpu, True))


def _copy(tensor: Tensor, copy_from_gpu: Callable[[Tensor], Tensor]) -> Tensor:
    """Copy the full ``tensor``, a GPU's with ``copy_from_gpu``. A gathered tensor is copied before it is freed."""
    tensor = tensor.detach()
    full = full_tensor(tensor)
    if hasattr(full, "__tensor_flatten__"):  # torchao's quantized moments, which clone() breaks.
        wrapper: Any = full
        names, context = wrapper.__tensor_flatten__()
        parts = {name: _copy(getattr(wrapper, name), copy_from_gpu) for name in names}
        return type(wrapper).__tensor_unflatten__(parts, context, wrapper.shape, wrapper.stride())
    if not full.is_cuda:
        return full.clone()
    if full is tensor:
        return copy_from_gpu(full)
    target = torch.empty_like(full, device="cpu")
    torch.cuda.current_stream(full.device).synchronize()  # until it is gathered
    copy_to_host([(full, target)])
    return target


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply ``change`` to every tensor in nested dicts and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map_tensors(inner, change) for name, inner in value.items()}
    return [_map_tensors(inner, change) for inner in value] if isinstance(value, list) else value


EXPECTED_WRITE_SECONDS, EXPECTED_BYTES_PER_SECOND = 0.2, 200e6
"""Time for a checkpoint of any size, and speed of writing it, of a slow disk, before one has been written."""


class Checkpoints:
    """The checkpoints of one run, ``folder/step-00000123``. A thread writes them one by one; the newest are kept.

    Another thread uploads them, because the client of object storage retries for minutes if that does not respond.
    Neither training nor the next checkpoint waits for it. If several checkpoints are waiting, the newest are uploaded.
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
        self._write_seconds: float | None = None
        self._upload_seconds = 0.0
        self._uploads = ThreadPoolExecutor(1, "uploads")
        self._last_upload: Future[None] | None = None
        self._uploading: Path | None = None
        self._removal = threading.Lock()
        """Lock that is held while old checkpoints are removed, and while one is chosen to be uploaded."""

    def prepare_folder(self) -> None:
        """Create the folder, and remove what an earlier process that was killed has left there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, snapshot: Snapshot, progress: Progress, is_valid: Callable[[list[float]], bool]) -> None:
        """Make the copies of ``snapshot`` and write it in the background, after waiting for the one before.

        Call :meth:`wait_for_write` before the snapshot is taken, so that the host never has two of them.

        The snapshot is discarded if its weights are not finite or ``is_valid`` rejects its losses, so that the last
        good checkpoint is kept.
        """
        self.wait_for_write()
        self._thread = threading.Thread(target=self._write, args=(snapshot, progress, is_valid), name="checkpoint")
        self._thread.start()

    def seconds(self, size: int) -> float:
        """Return the time that the last checkpoint took until it was complete; before the first one, an estimate for
        ``size`` bytes without an upload."""
        if self._write_seconds is None:
            return EXPECTED_WRITE_SECONDS + size / EXPECTED_BYTES_PER_SECOND
        return self._write_seconds + self._upload_seconds

    def wait(self) -> Path | None:
        """Wait until all is written and uploaded, and return the newest checkpoint of this run."""
        self.wait_for_write()
        if self._last_upload:
            self._last_upload.result()
            self._raise_failure()
        return self.latest

    def wait_for_write(self) -> None:
        """Wait for a checkpoint that is still being written. Raises ``UserError`` if one could not be written or
        uploaded."""
        if self._thread:
            self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            location = f"{self.folder} or {self.upload_dir}" if self.upload_dir else str(self.folder)
            reason = str(self._failure).rstrip(".")
            raise UserError(
                f"Cannot write a checkpoint to {location}: {reason}. Free disk space or fix the storage, then resume "
                "with --resume. Earlier checkpoints are intact."
            ) from self._failure

    def address(self, checkpoint: Path) -> str:
        """Return the location of ``checkpoint`` for users, which is in object storage if it is uploaded."""
        return str(self.upload_dir / f"{CHECKPOINTS}/{checkpoint.name}") if self.upload_dir else str(checkpoint)

    def _write(self, snapshot: Snapshot, progress: Progress, is_valid: Callable[[list[float]], bool]) -> None:
        start = time.perf_counter()
        try:
            snapshot.copies.run()
            if all(map(_is_finite, snapshot.weights.values())) and is_valid(snapshot.state["losses"].tolist()):
                self.latest = write(self.folder, snapshot, progress, self.tokenizer)
                for checkpoint in checkpoints_in(self.folder):
                    if checkpoint.name > self.latest.name:  # An intact one would have been resumed, so it is damaged.
                        shutil.rmtree(checkpoint, ignore_errors=True)
                self._remove_old()
                self._write_seconds = time.perf_counter() - start
                if self.upload_dir:
                    self._last_upload = self._uploads.submit(self._upload, self.latest, self.upload_dir)
        except Exception as failure:  # noqa: BLE001 raised in the training thread
            self._failure = failure
            for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}*"):  # The disk may be full.
                shutil.rmtree(leftover, ignore_errors=True)

    def _remove_old(self) -> None:
        with self._removal:
            for old in checkpoints_in(self.folder)[: -self.keep]:
                if old != self._uploading:
                    shutil.rmtree(old, ignore_errors=True)

    def _upload(self, checkpoint: Path, directory: StorageDir) -> None:
        """Upload ``checkpoint``, unless it was removed as an old one in the meantime."""
        with self._removal:
            if self._failure or not checkpoint.exists():
                return
            self._uploading = checkpoint
        failure, start = None, time.perf_counter()
        try:
            upload(checkpoint, self.folder.parent / CYCLES, directory, self.keep)
        except Exception as error:  # noqa: BLE001 raised in the training thread
            failure = error
        self._upload_seconds = time.perf_counter() - start
        self._uploading = None
        self._remove_old()
        self._failure = self._failure or failure


def write(folder: Path, snapshot: Snapshot, progress: Progress, tokenizer: Tokenizer | None = None) -> Path:
    """Write one checkpoint with its ``tokenizer`` to a temporary name, fsync it, read it back, and rename it."""
    name = f"step-{progress.step:08d}"
    temporary = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{name}"
    temporary.mkdir()
    save_weights(snapshot.weights, temporary / WEIGHTS)
    torch.save(snapshot.state, temporary / _STATE)
    names = [WEIGHTS, _STATE]
    if tokenizer and not tokenizer.is_gpt2:
        names.append(TOKENIZER_FILE)
        (temporary / TOKENIZER_FILE).write_bytes(tokenizer.content)
    for file_name in names:
        with (temporary / file_name).open("rb") as file:
            os.fsync(file.fileno())
    if not _has_weights(temporary / WEIGHTS, snapshot.weights):
        raise OSError(f"{temporary / WEIGHTS} differs from the written weights when it is read back")
    files = {file_name: checksum(temporary / file_name) for file_name in names}
    write_json(temporary / PROGRESS, to_json(replace(progress, files=files)))
    if (folder / name).exists():
        aside = folder / f"{TEMPORARY_PREFIX}old-{name}"
        (folder / name).rename(aside)
        temporary.rename(folder / name)
        shutil.rmtree(aside)
    else:
        temporary.rename(folder / name)
    sync_folder(folder)
    return folder / name


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, with little memory for the result of each comparison."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(PART_BYTES // 8))


def _has_weights(file: Path, weights: dict[str, Tensor]) -> bool:
    """Return whether ``file`` has the bytes of ``weights``, by its documented format and without loading all of it."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        start = content.tell()
        for name in weights:
            content.seek(start + header[name]["data_offsets"][0])
            values = weights[name].contiguous().view(-1).view(torch.uint8)
            for part in values.split(PART_BYTES):
                if content.read(part.numel()) != part.numpy().tobytes():
                    return False
    return True


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write ``weights`` to a new ``file`` with the permissions of the umask; the library would make it private."""
    file.touch()
    mode = file.stat().st_mode
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(mode)


def load_weights(checkpoint: Path, model: nn.Module, device: torch.device) -> None:
    """Load the weights of ``checkpoint`` into ``model``."""
    weights = load_file(checkpoint / WEIGHTS, device=str(device))
    weights |= {name: weights[stored_name] for name, stored_name in shared_names(model).items()}
    model.load_state_dict({name: shard_like(weights[name], like) for name, like in model.state_dict().items()})


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> list[float]:
    """Load the state of ``checkpoint``, and return the losses of steps that have not been reported."""
    fault = find_damage(checkpoint)
    if fault:
        raise UserError(f"{checkpoint} is damaged: {fault}. Remove it to resume from the previous checkpoint.")
    load_weights(checkpoint, model, device)
    # AdamW without a fused kernel needs its step count on the host, or it would wait for a copy at every step. The
    # optimizer moves the other tensors to its parameters' device.
    state = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["optimizer"].get("state", {}).items():
        like = parameters[index]
        state["optimizer"]["state"][index] = {
            name: shard_like(value, like) if isinstance(value, Tensor) else value for name, value in values.items()
        }
    settings = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, configured in zip(optimizer.param_groups, settings, strict=True):
        group.update(configured)  # The config may have other weight decay and betas than the checkpoint.
    if state["scaler"]:  # It is empty unless the run was in fp16.
        scaler.load_state_dict(state["scaler"])
    restore_random_state(state["rng"])
    return state["losses"].tolist()


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's random generators, which determine dropout."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # Otherwise a run on the CPU would allocate memory on the GPU.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Restore a state that :func:`random_state` returned."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"].cpu())
