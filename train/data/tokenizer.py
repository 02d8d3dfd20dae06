"""The tokenizer of a run, which is that of its data; the size of the model's vocabulary follows it."""

import json

from pipeline.encoding.tokenizer import Tokenizer
from train.model_config import AnyModel


def match_tokenizer(model: AnyModel, tokenizer: Tokenizer | None, source: str) -> AnyModel:
    """``model`` with the vocabulary of the data of ``source``, padded as it was; unchanged if they have no tokenizer.

    A model follows the data unless its vocabulary is not the default, GPT-2's. Raises ``UserError`` if it has another.
    """
    if tokenizer is None:
        return model
    end = tokenizer.end_of_text
    last = -1 if end == len(tokenizer) - 1 else end
    return model.with_vocab_size(len(tokenizer), last, source)


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
