"""The vocabulary of a run: that of its data, which the model follows, and the tokenizer of an exported model."""

import json
from dataclasses import replace

from infra.errors import UserError
from infra.storage_dir import StorageDir
from pipeline.encoding import Vocabulary, tokenizer_json, vocabulary_at, vocabulary_of
from pipeline.shards import Manifest
from train.config import TrainConfig
from train.model_config import ModelConfig


def vocabulary_of_data(config: TrainConfig, manifest: Manifest) -> Vocabulary | None:
    """The vocabulary of the data of ``config``; None for shards of ids without one."""
    if config.stream:
        return vocabulary_of(manifest.vocabulary_sha256, config.reading.vocabulary)
    return vocabulary_at(StorageDir.of(config.data), manifest.vocabulary_sha256)


def with_vocabulary_of(config: TrainConfig, manifest: Manifest) -> TrainConfig:
    """``config`` with a model of the data's vocabulary, padded as it was. Raises ``UserError`` when it has another.

    A model follows the data unless its vocabulary is not the default, GPT-2's.
    """
    model, vocabulary = config.model, vocabulary_of_data(config, manifest)
    if vocabulary is None:
        return config
    ids = len(vocabulary)
    padded = -(-ids // 64) * 64
    if model.vocabulary == ModelConfig.vocabulary != ids:
        pads = model.padded_vocabulary > model.vocabulary
        model = replace(model, vocabulary=ids, padded_vocabulary=padded if pads else ids)
    if model.vocabulary != ids:
        raise UserError(
            f"{config.source} has {ids:,} token ids and --model has vocabulary={model.vocabulary:,}: give --model with "
            f"vocabulary={ids},padded_vocabulary={padded}, or data that were made with another --vocabulary."
        )
    end = vocabulary.end_of_text
    return replace(config, model=replace(model, end_of_text=-1 if end == ids - 1 else end))


def tokenizer_files(vocabulary: Vocabulary, context_length: int) -> dict[str, str]:
    """The vocabulary as files of a tokenizer that transformers reads.

    With ``truncation=True``, and in a warning without, it knows a model's ``context_length``.
    """
    end = vocabulary.decode([vocabulary.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
        "model_max_length": context_length,
    }  # fmt: skip
    return {"tokenizer.json": tokenizer_json(vocabulary), "tokenizer_config.json": json.dumps(settings)}
