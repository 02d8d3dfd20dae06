"""Token shards as a torch dataset, for other training loops: ``DataLoader(open_shards("data/tokens"))``."""

import numpy as np
import torch
from torch.utils.data import Dataset

from infra.storage.directory import StorageDir
from pipeline.cache import ensure_local
from pipeline.shards import Split, TokenShards
from train.data.windows import Windows


class TokenDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The windows of a split as (inputs, targets), in the order of its shards.

    Both are int64 of shape (context_length,); targets are inputs shifted by one token. The shards are mapped into
    memory, so that workers of a ``DataLoader`` share them. Data in object storage are downloaded first. Raises
    ``UserError`` if there are no shards, or if none of them is as long as a window.
    """

    def __init__(self, data: str, context_length: int, split: Split) -> None:
        streams = TokenShards(ensure_local(StorageDir.of(data))).streams(split)
        self.windows = Windows(streams, context_length, seed=0, split=split)

    def __len__(self) -> int:
        return self.windows.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        window = np.empty((1, self.windows.context_length + 1), dtype=np.int64)
        self.windows.read(np.array([index % len(self)]), window)
        tokens = torch.from_numpy(window[0])
        return tokens[:-1], tokens[1:]
