"""The source of data that a config names: the one place that knows all kinds of sources."""

from train.config import DatasetConfig
from train.data.shards import ShardSource
from train.data.source import DataSource
from train.data.stream import StreamSource


def source_of(dataset: DatasetConfig) -> DataSource:
    """The source of ``dataset``."""
    return StreamSource(dataset) if dataset.stream else ShardSource(dataset)
