"""Registry of all kinds of data sources."""

from train.config import DatasetConfig
from train.data.shards import ShardSource
from train.data.source import DataSource
from train.data.stream import StreamSource


def source_of(dataset: DatasetConfig) -> DataSource:
    """Create the source of the data that ``dataset`` specifies."""
    return StreamSource(dataset) if dataset.stream else ShardSource(dataset)
