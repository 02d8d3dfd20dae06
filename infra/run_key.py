"""The key to a run in MLflow, which a command keeps for the one that continues its work.

Apart from ``infra.tracking`` because importing MLflow takes two seconds that ``--help`` and mistakes need
not wait for.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunKey:
    """All that is needed to write into a run that exists."""

    store: str
    experiment_id: str
    run_id: str
    journal: str
    """Folder for entries that could not be delivered; absolute, because work is continued from anywhere."""
