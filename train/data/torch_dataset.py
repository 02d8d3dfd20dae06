"""Token shards as a dataset of torch, for loops other than ours: ``DataLoader(open_shards("data/tokens"))``."""

import numpy as np
import torch
from torch.utils.data import Dataset

from infra.storage.directory import StorageDir
from pipeline.cache import ensure_local
from pipeline.shards import Split, TokenShards
from train.data.windows import Windows


class TokenDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The windows of a split, in the order of its shards: pairs of inputs and targets.

    Both are int64 of shape (context_length,), the targets one token further. The shards are mapped into memory, so that
    workers of a ``DataLoader`` share them. ``data`` is a folder, or one in object storage, which is then fetched.
    Raises ``UserError`` when it holds no shards, or none as long as a window.
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
