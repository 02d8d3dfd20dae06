"""The machines that train, as the driver knows them: where they are, and whether they are still heard from."""

from typing import Any

from infra.cli.console import console
from infra.tracking.tracker import Tracker

SILENT_SECONDS = 8.0
"""How long a worker may be silent before that is said; it answers twice a second."""


class WorkerGroup:
    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._hosts: list[str] = []
        self._nodes: dict[str, str] = {}
        """The machines' names by Ray's ids for them."""
        self.is_silent = False
        """Whether the first worker, once begun, is not heard from."""
        self.is_lost = False
        """Whether the machine of a worker is gone from the cluster, and the workers have not begun anew."""

    def on_workers_started(self, about: dict[str, Any]) -> None:
        if self._hosts:
            console.print(f"continuing on {', '.join(about['hosts'])}", markup=False)
        self._hosts, self._nodes = about["hosts"], dict(zip(about["nodes"], about["hosts"], strict=True))
        self.is_silent = self.is_lost = False
        # Of the machine that trains; the driver's were recorded when the run was made.
        self._tracker.set_tags(
            {"worker": ", ".join(self._hosts)} | {k: v for k, v in about["machine"].items() if k != "host"}
        )

    def check_heartbeat(self, silence: float | None) -> None:
        """Say when the first worker has not been heard from for some time, or the machine of one is lost.

        Ray Train alone would say nothing while it looks for another machine. When one of several is lost, the first
        worker still answers, but waits for the lost one in a collective.
        """
        if silence is None or self.is_lost:
            return
        silent = silence >= SILENT_SECONDS
        if self.is_silent and not silent:
            self.is_silent = False
            console.print(f"{self._hosts[0]} answers again", markup=False)
        gone: list[str] = []
        if silent or len(self._nodes) > 1:
            import ray  # which a run in this process does without

            dead = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
            gone = [name for node, name in self._nodes.items() if node in dead]
        if gone:
            self.is_silent = self.is_lost = True
            left = "which trains, has left" if len(gone) == 1 else "which train, have left"
            console.print(
                f"{', '.join(gone)}, {left} the cluster: the run continues from its newest checkpoint on another "
                "machine, as soon as there is one with what it needs.",
                markup=False,
            )
        elif silent and not self.is_silent:
            self.is_silent = True
            console.print(
                f"The worker on {self._hosts[0]} has not answered for {silence:.0f} s: its process, its machine or the "
                "network has failed. Ray restarts it where it can; Ctrl-C exits.",
                markup=False,
            )
