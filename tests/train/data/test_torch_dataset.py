"""Token shards as a dataset of torch: the windows in the order of the shards, for loops other than ours."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.shards import SPLITS, Split, TokenShards
from train import open_shards

LENGTH = 32


@pytest.mark.parametrize("split", SPLITS)
def test_every_token_of_a_split_is_predicted_once_in_its_order(small_shards: Path, split: Split) -> None:
    windows = open_shards(str(small_shards), LENGTH, split)
    inputs, targets = zip(*DataLoader(windows, batch_size=None, num_workers=0), strict=True)
    whole = [stream[: (len(stream) - 1) // LENGTH * LENGTH + 1] for stream in TokenShards(small_shards).streams(split)]
    assert torch.cat(inputs).tolist() == [token for stream in whole for token in stream[:-1].tolist()]
    assert torch.cat(targets).tolist() == [token for stream in whole for token in stream[1:].tolist()]
    assert len(windows) == len(inputs) == sum((len(stream) - 1) // LENGTH for stream in whole)
    assert {(batch.dtype, batch.shape) for batch in (*inputs, *targets)} == {(torch.int64, (LENGTH,))}


def test_a_window_is_found_from_the_end_too_and_none_beyond(small_shards: Path) -> None:
    windows = open_shards(str(small_shards), LENGTH)
    count = len(windows)
    for index in (0, 1, count - 1):
        actual = windows[index - count]
        assert all(torch.equal(ours, reference) for ours, reference in zip(actual, windows[index], strict=True))
    assert not torch.equal(windows[0][0], windows[-1][0])
    for index in (count, -count - 1):
        with pytest.raises(IndexError):
            windows[index]
