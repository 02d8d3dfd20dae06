"""The tokenizer of a run's data, which determines the size of the model's vocabulary."""

import json

from pipeline.encoding.tokenizer import Tokenizer
from train.model_config import AnyModel


def match_tokenizer(model: AnyModel, tokenizer: Tokenizer | None, source: str) -> AnyModel:
    """Return ``model`` with the vocabulary size of ``tokenizer``, or unchanged without a tokenizer.

    Raises ``UserError`` if the user set a vocabulary size that differs from the data's at ``source``. The default, the
    vocabulary of GPT-2, counts as not set.
    """
    if tokenizer is None:
        return model
    end = tokenizer.end_of_text
    last = -1 if end == len(tokenizer) - 1 else end
    return model.with_vocab_size(len(tokenizer), last, source)


def tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, str]:
    """Convert the tokenizer to the files that transformers loads, by file name.

    They contain the model's ``context_length``, at which transformers truncates texts or warns of longer ones.
    """
    end = tokenizer.decode([tokenizer.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
        "model_max_length": context_length,
    }  # fmt: skip
    return {"tokenizer.json": tokenizer.tokenizer_json(), "tokenizer_config.json": json.dumps(settings)}
