"""The vocabulary of a run: that of its data, which the model follows, and the tokenizer of an exported model."""

import json
from dataclasses import replace

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.encoding.tokenizer import Vocabulary, vocabulary_at, vocabulary_of
from pipeline.shards import VOCABULARY_FILE, Manifest
from train.config import TrainConfig


def vocabulary_of_data(config: TrainConfig, manifest: Manifest) -> Vocabulary | None:
    """The vocabulary of the data of ``config``; None for shards of ids without one.

    Raises ``UserError`` if it is lost.
    """
    if config.stream:
        return vocabulary_of(manifest.vocabulary_sha256, config.reading.vocabulary)
    found = vocabulary_at(StorageDir.of(config.data), manifest.vocabulary_sha256)
    if found is None and "vocabulary" in manifest.config:
        raise UserError(
            f"{config.source} lacks the {VOCABULARY_FILE} of its ids: put it back, or make the data again with 'python "
            "-m pipeline.tokenize --overwrite'."
        )
    return found


def with_vocabulary_of(config: TrainConfig, manifest: Manifest) -> TrainConfig:
    """``config`` with a model of the data's vocabulary, padded as it was. Raises ``UserError`` when it has another.

    A model follows the data unless its vocabulary is not the default, GPT-2's.
    """
    vocabulary = vocabulary_of_data(config, manifest)
    if vocabulary is None:
        return config
    end = vocabulary.end_of_text
    last = -1 if end == len(vocabulary) - 1 else end
    return replace(config, model=config.model.with_vocabulary(len(vocabulary), last, config.source))


def tokenizer_files(vocabulary: Vocabulary, context_length: int) -> dict[str, str]:
    """The vocabulary as files of a tokenizer that transformers reads.

    With ``truncation=True``, and in a warning without, it knows a model's ``context_length``.
    """
    end = vocabulary.decode([vocabulary.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
        "model_max_length": context_length,
    }  # fmt: skip
    return {"tokenizer.json": vocabulary.tokenizer_json(), "tokenizer_config.json": json.dumps(settings)}
