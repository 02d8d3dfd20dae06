"""What is trained on and what it is trained for must agree before anything is computed."""

import shutil
from pathlib import Path

import pytest

from infra.errors import UserError
from pipeline.encoding.tokenizer import GPT2_SHA256
from pipeline.shards import read_manifest
from train.config import TrainConfig
from train.model_config import ModelConfig
from train.resolved import prepare


def test_data_of_one_vocabulary_and_a_model_of_another_are_refused(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path
) -> None:
    shutil.copytree(small_shards, tmp_path / "tokens")
    manifest = tmp_path / "tokens" / "manifest.json"
    gpt2 = f'"tokenizer_sha256": "{GPT2_SHA256}"'
    manifest.write_text(manifest.read_text().replace('"tokenizer_sha256": "small"', gpt2))
    config = TrainConfig.of(data=str(tmp_path / "tokens"), model=small_model, global_batch=4, micro_batch=4, steps=1)
    with pytest.raises(UserError, match=r"tokens has 50,257 token ids.*--model has vocab_size=257"):
        prepare(config, read_manifest(config.dataset.data))
