"""What Ray Train's controller is given to run one of our trainings by, and unpickles: no torch is imported for it.

torch's own backend would have the controller import it, two seconds before the worker is even started.
"""

from pathlib import Path
from typing import Any

from ray.train import UserCallback
from ray.train.backend import BackendConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy


class Alone(BackendConfig):
    """One worker, which needs no process group."""

    backend = "none"


class AsItIs(FixedScalingPolicy):
    """So many workers on the cluster as it is: the process that would ask it to grow is not started."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Register with nobody."""

    def _maybe_send_resource_request(self) -> None:
        pass


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
