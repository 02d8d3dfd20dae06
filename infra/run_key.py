"""The key to a run in MLflow, which the driver hands to workers and keeps for a continued run.

Apart from ``infra.tracking`` because importing MLflow takes two seconds that ``--help`` and mistakes need
not wait for.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunKey:
    """All that a process needs to write into a run that the driver created."""

    store: str
    experiment_id: str
    run_id: str
    journal: str
    """Folder for entries that could not be delivered; absolute, because workers run elsewhere."""
