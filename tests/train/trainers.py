"""A trainer on the shards of its config, for tests that need no session."""

from collections.abc import Callable
from pathlib import Path

from infra.storage.directory import StorageDir
from train.config import ResolvedConfig
from train.data.source import TrainingData
from train.data.sources import source_of
from train.loop.memory_limit import MemoryLimit
from train.loop.trainer import Callbacks, Trainer
from train.result import CycleReport
from train.run_files.checkpoint import Checkpoints


def make_trainer(
    config: ResolvedConfig,
    data: TrainingData | None = None,
    *,
    on_cycle: Callable[[CycleReport], object] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
    callbacks: Callbacks | None = None,
    checkpoints: Path | None = None,
    upload_dir: StorageDir | None = None,
    resume: Path | None = None,
    limit: MemoryLimit | None = None,
) -> Trainer:
    """A trainer as a session makes it: ``checkpoints`` is the folder to save to, unless the config keeps none.

    ``callbacks`` replace ``on_cycle`` and ``should_stop``.
    """
    data = data or source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
    saved, keep = None, config.checkpoints.keep_checkpoints
    if checkpoints and keep:
        saved = Checkpoints(checkpoints, keep, upload_dir, data.tokenizer)
    callbacks = callbacks or Callbacks(on_cycle, should_stop)
    return Trainer(config, data, callbacks, checkpoints=saved, resume=resume, limit=limit)
