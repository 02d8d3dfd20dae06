"""The machines that train, as the driver knows them: where they are, and whether they are still heard from.

In: what the channel says. Out: lines on the terminal, and the run's tags in MLflow.
"""

from typing import Any

import ray

from infra.command import console
from infra.tracking.tracker import Tracker

SILENT_SECONDS = 8.0
"""How long a worker may be silent before that is said; it answers twice a second."""


class WorkerGroup:
    """What the driver knows of the machines that train: which they are, and whether they are still heard from."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._hosts: list[str] = []
        self._node = ""
        self.is_silent = False
        """Whether the first worker, once begun, is not heard from."""
        self.is_lost = False
        """Whether the machine of the first worker is gone from the cluster, and no other has begun."""

    def begun(self, about: dict[str, Any]) -> None:
        """Workers have started."""
        if self._hosts:
            console.print(f"continuing on {', '.join(about['hosts'])}", markup=False)
        self._hosts, self._node = about["hosts"], about["node"]
        self.is_silent = self.is_lost = False
        # Of the machine that trains; the driver's were recorded when the run was made.
        self._tracker.tags(
            {"worker": ", ".join(self._hosts)} | {k: v for k, v in about["machine"].items() if k != "host"}
        )

    def is_heard(self) -> bool:
        """Whether workers have begun and are heard from."""
        return bool(self._hosts) and not self.is_silent

    def look(self, silence: float | None) -> None:
        """Say when the first worker has not been heard from for some time, or its machine is lost.

        Ray Train alone would say nothing while it looks for another machine.
        """
        if silence is None or silence < SILENT_SECONDS or self.is_lost:
            if self.is_silent and silence is not None and silence < SILENT_SECONDS:
                self.is_silent = False
                console.print(f"{self._hosts[0]} answers again", markup=False)
            return
        if any(node["NodeID"] == self._node and not node["Alive"] for node in ray.nodes()):
            self.is_silent = self.is_lost = True
            console.print(
                f"{self._hosts[0]}, which trains, has left the cluster: the run continues from its newest checkpoint "
                "on another machine, as soon as there is one with what it needs.",
                markup=False,
            )
        elif not self.is_silent:
            self.is_silent = True
            console.print(
                f"The worker on {self._hosts[0]} has not answered for {silence:.0f} s: its process, its machine or the "
                "network has failed. Ray restarts it where it can; Ctrl-C exits.",
                markup=False,
            )
