"""What Ray Train's controller is given to run one of our trainings by, and unpickles: no torch is imported for it.

torch's own backend would have the controller import it, two seconds before the worker is even started.
"""

from pathlib import Path
from typing import Any

from ray.train import UserCallback
from ray.train.backend import BackendConfig


class Alone(BackendConfig):
    """One worker, which needs no process group."""

    backend = "none"


class Presence(UserCallback):
    """Keeps the file at ``path``, on the driver's machine, for as long as all workers have begun and none has failed.

    The driver cannot tell from Ray Train otherwise whether its workers have been placed, at first or after a failure.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, *_: Any, **__: Any) -> None:
        """Workers report once, when they begin."""
        self.path.touch()

    def after_exception(self, *_: Any, **__: Any) -> None:
        """The group is gone; Ray Train starts another one."""
        self.path.unlink(missing_ok=True)
