"""Types and help texts of flags that several commands share."""

import os
from typing import Annotated

import tyro
from typing_extensions import Doc

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag without a value and without ``--no-...``; a setting that ``--config`` may turn on must be a plain ``bool``."""

TrackingUri = Annotated[
    str | None,
    Doc("URI of the MLflow store. By default the value of MLFLOW_TRACKING_URI, or else sqlite:///mlflow.db."),
]

Address = Annotated[
    str | None,
    Doc(
        "Address of the Ray cluster to join; local always starts Ray on this machine.\n"
        "By default the address in RAY_ADDRESS, or else this machine."
    ),
]

ConfigFile = Annotated[
    str | None,
    tyro.conf.arg(metavar="FILE"),
    Doc("JSON file with training settings, local or in object storage; flags override its values."),
]

Checkpoint = Annotated[
    str,
    tyro.conf.arg(metavar="NAME|DIR"),
    Doc("Name of a run, its folder, or the folder of one of its checkpoints; s3://bucket/runs/NAME works, too."),
]

Runs = Annotated[
    str, tyro.conf.arg(metavar="DIR"), Doc("Folder that contains runs, local or in object storage (s3://bucket/runs).")
]


class JoinsRay:
    """Settings of a command with the flag ``--address``."""

    address: Address

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster to join, from the flag or ``RAY_ADDRESS``; None to start Ray on this machine."""
        return self.address or os.environ.get("RAY_ADDRESS")
