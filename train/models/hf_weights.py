"""GPT-2's weights and shape in Hugging Face's format: out of a model, and the weights into one."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infra.errors import UserError
from train.model_config import ModelConfig
from train.models.gpt2 import GPT

_NAMES = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.projection": "mlp.c_proj",
}
_BY_ID = ("token_embedding.weight", "head.weight")
"""Those with a row for each id, which are padded."""


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """The weights in fp32 under GPT-2's published names; linear weights as (in, out), like GPT-2's."""
    config = model.config
    weights = {}
    for name, value in model.state_dict().items():
        value = value.detach().float().cpu()
        if name in _BY_ID:
            value = value[: config.vocab_size]
        if name != "head.weight" or not config.tied:
            weights[_published(name)] = (value.T if _is_transposed(name) else value).contiguous()
    if not config.bias:  # the format always has biases
        for name in [name for name in weights if name.endswith("weight") and (".h." in name or "ln_f" in name)]:
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(weights[name].shape[-1])
    return weights


def load_hf_weights(model: GPT, folder: Path) -> None:
    """Load the weights that :func:`to_hf_state_dict` gives from a ``folder`` in Hugging Face's format into ``model``.

    Ids that only pad its vocabulary stay as they are. Raises ``UserError`` for weights of another shape.
    """
    named = f"--model hf:{folder}"
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as damage:
        raise UserError(f"{named}: model.safetensors cannot be read: {damage}.") from damage
    prefix = "" if any(name.startswith("transformer.") for name in weights) else "transformer."
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            published = _published(name)
            value = weights.get(published.removeprefix(prefix))
            rows = parameter[: model.config.vocab_size] if name in _BY_ID else parameter
            shape = rows.T.shape if _is_transposed(name) else rows.shape
            if value is None or value.shape != shape:
                problem = "missing" if value is None else f"of shape {tuple(value.shape)}, not {tuple(shape)}"
                raise UserError(f"{named}: {published} is {problem}: give a folder of a GPT-2.")
            rows.copy_(value.T if _is_transposed(name) else value)


def _published(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, suffix = name.split(".", 2)
    part, _, kind = suffix.rpartition(".")
    return f"transformer.h.{layer}.{_BLOCK[part]}.{kind}"


def _is_transposed(name: str) -> bool:
    """Whether GPT-2 has our parameter ``name`` as (in, out)."""
    return name.startswith("blocks.") and name.endswith(".weight") and ".norm_" not in name


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The model's shape as transformers' ``GPT2Config`` reads it."""
    end_of_text = config.end_of_text % config.vocab_size
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_positions": config.context_length,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }
