"""Download a data set: ``python -m pipeline.fetch s3://bucket/tokens --out data/tokens``.

Makes a verified copy of what ``pipeline.tokenize --copy-to`` wrote to object storage. Running it again fetches
only what is missing or damaged.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import Progress

from infra import command
from infra.command import console
from infra.storage import is_remote
from pipeline.copies import download
from pipeline.shards import Manifest


@dataclass(frozen=True)
class FetchConfig:
    """What to fetch, and where to put it."""

    source: Annotated[str, tyro.conf.Positional]
    """The copy: s3://bucket/folder or gs://bucket/folder."""

    out: Path = Path("data/tokens")
    """Folder for the token shards."""

    def __post_init__(self) -> None:
        if not is_remote(self.source):
            raise ValueError(f"{self.source} is not object storage: write s3://bucket/folder or gs://bucket/folder")


def main(config: FetchConfig) -> None:
    """Run the command."""
    with Progress(console=console) as bar:
        task = bar.add_task("fetching", total=None)

        def on_shard(manifest: Manifest) -> None:
            bar.update(task, total=len(manifest.shards), advance=1)

        fetched = download(config.source, config.out, on_shard)
    console.print(f"{config.out} is complete: {fetched:,} shards fetched, the others were here.", markup=False)


if __name__ == "__main__":
    command.run(main, FetchConfig, module="pipeline.fetch", description=__doc__ or "")
