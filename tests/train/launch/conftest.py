"""A run folder, and the settings of a short run on a CPU, for the tests of sessions and workers."""

from pathlib import Path

import pytest

from train.config import Cycle, ResolvedConfig
from train.model_config import ModelConfig
from train.run_files.run_folder import RunFolder


@pytest.fixture
def home(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=12, cycle=Cycle(5, 1),
        precision="fp32", device="cpu", checkpoint_every=7,
    )  # fmt: skip
