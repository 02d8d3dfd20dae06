"""Removed: ``pipeline.tokenize`` writes to object storage itself, and training reads from there."""

from infra.command import refuse
from infra.errors import UserError

if __name__ == "__main__":
    refuse(
        UserError("pipeline.fetch was removed: train.run --data s3://bucket/tokens fetches and checks it by itself.")
    )
