"""What Ray Train's controller unpickles to run a training; it does not import torch.

Ray's own backend for torch would make the controller import torch, which takes two seconds before a worker is started.
"""

from pathlib import Path
from typing import Any

from ray.train import UserCallback
from ray.train.backend import BackendConfig


class SingleWorker(BackendConfig):
    """A single worker, which needs no process group."""

    backend = "none"


class Presence(UserCallback):
    """Keeps a file at ``path``, on the driver's machine, while all workers have started and none has failed.

    Ray Train has no other way to tell the driver whether its workers are placed, at the beginning or after a failure.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, *_: Any, **__: Any) -> None:
        """Workers report once, when they start."""
        self.path.touch()

    def after_exception(self, *_: Any, **__: Any) -> None:
        """The group has failed; Ray Train starts another one."""
        self.path.unlink(missing_ok=True)
