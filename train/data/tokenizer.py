"""The tokenizer of a run, which is that of its data; the size of the model's vocabulary follows it."""

import json

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.encoding.tokenizer import Tokenizer, load_by_hash, load_from
from pipeline.shards import TOKENIZER_FILE, Manifest
from train.config import DatasetConfig
from train.model_config import AnyModel


def load_tokenizer(dataset: DatasetConfig, manifest: Manifest) -> Tokenizer | None:
    """The tokenizer of ``dataset``; None for shards of ids without one.

    Raises ``UserError`` if it is lost.
    """
    if dataset.stream:
        return load_by_hash(manifest.tokenizer_sha256, dataset.reading.tokenizer)
    tokenizer = load_from(StorageDir.of(dataset.data), manifest.tokenizer_sha256)
    if tokenizer is None and "tokenizer" in manifest.config:
        raise UserError(
            f"{dataset.source} lacks the {TOKENIZER_FILE} of its ids: put it back, or make the data again with "
            "'python -m pipeline.tokenize --overwrite'."
        )
    return tokenizer


def match_tokenizer(model: AnyModel, dataset: DatasetConfig, manifest: Manifest) -> AnyModel:
    """``model`` with the data's vocabulary, padded as it was. Raises ``UserError`` when it has another.

    A model follows the data unless its vocabulary is not the default, GPT-2's.
    """
    tokenizer = load_tokenizer(dataset, manifest)
    if tokenizer is None:
        return model
    end = tokenizer.end_of_text
    last = -1 if end == len(tokenizer) - 1 else end
    return model.with_vocab_size(len(tokenizer), last, dataset.source)


def tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, str]:
    """The tokenizer as files that transformers reads.

    With ``truncation=True``, and in a warning without, it knows a model's ``context_length``.
    """
    end = tokenizer.decode([tokenizer.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
        "model_max_length": context_length,
    }  # fmt: skip
    return {"tokenizer.json": tokenizer.tokenizer_json(), "tokenizer_config.json": json.dumps(settings)}
