"""Options that several commands have, described once."""

import os
from typing import Annotated

from typing_extensions import Doc

TrackingUri = Annotated[str | None, Doc("MLflow store. None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.")]

Address = Annotated[
    str | None,
    Doc("Ray cluster to run on; local starts a Ray here in any case. None: RAY_ADDRESS, else this machine."),
]

ConfigFile = Annotated[
    str | None, Doc("Read the training settings from this JSON file, also in object storage; flags override it.")
]

Checkpoint = Annotated[
    str,
    Doc("A run's name, its folder, or that of one of its checkpoints; also in object storage (s3://bucket/runs/NAME)."),
]

Runs = Annotated[str, Doc("Folder that holds runs, or one in object storage.")]


class JoinsRay:
    """Settings of a command with the flag ``--address``."""

    address: Address

    @property
    def cluster(self) -> str | None:
        """The address of the Ray cluster to join, the flag's or that of ``RAY_ADDRESS``; None for a Ray of our own."""
        return self.address or os.environ.get("RAY_ADDRESS")
