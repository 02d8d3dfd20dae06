"""Convert weights and shape of a GPT-2 to the Hugging Face format, and load weights in that format."""

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
"""Published names of parameters outside the blocks, by their name in :class:`GPT`."""
_BLOCK_NAMES = {
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.projection": "mlp.c_proj",
}
"""Published names of layers inside a block, by their name in :class:`train.models.gpt2.Block`."""
_PADDED = ("token_embedding.weight", "head.weight")
"""Parameters with a row for each token id, which are padded."""


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """Convert the weights to fp32 under GPT-2's published names, with linear weights transposed to (in, out)."""
    config = model.config
    weights = {}
    for name, value in model.state_dict().items():
        value = value.detach().float().cpu()
        if name in _PADDED:
            value = value[: config.vocab_size]
        if name != "head.weight" or not config.tied:
            weights[_hf_name(name)] = (value.T if _is_transposed(name) else value).contiguous()
    if not config.bias:  # The format requires biases.
        for name in [name for name in weights if name.endswith("weight") and (".h." in name or "ln_f" in name)]:
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(weights[name].shape[-1])
    return weights


def load_hf_weights(model: GPT, folder: Path) -> None:
    """Load the weights in a ``folder`` in the Hugging Face format into ``model``.

    The padding rows of its vocabulary keep their values. Raises ``UserError`` if the weights have another shape.
    """
    flag = f"--model hf:{folder}"
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as damage:
        raise UserError(f"{flag}: cannot read model.safetensors: {damage}. Use the folder of a GPT-2.") from damage
    prefix = "" if any(name.startswith("transformer.") for name in weights) else "transformer."
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            hf_name = _hf_name(name)
            value = weights.get(hf_name.removeprefix(prefix))
            rows = parameter[: model.config.vocab_size] if name in _PADDED else parameter
            shape = rows.T.shape if _is_transposed(name) else rows.shape
            if value is None or value.shape != shape:
                fault = "is missing" if value is None else f"has shape {tuple(value.shape)}, not {tuple(shape)}"
                raise UserError(f"{flag}: {hf_name} {fault}. Use the folder of a GPT-2.")
            rows.copy_(value.T if _is_transposed(name) else value)


def _hf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, number, suffix = name.split(".", 2)
    layer, _, kind = suffix.rpartition(".")
    return f"transformer.h.{number}.{_BLOCK_NAMES[layer]}.{kind}"


def _is_transposed(name: str) -> bool:
    """Return whether the published GPT-2 stores the parameter ``name`` as (in, out), the transpose of :class:`GPT`."""
    return name.startswith("blocks.") and name.endswith(".weight") and ".norm_" not in name


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Convert the model's shape to the content of ``config.json`` that ``GPT2Config`` of transformers reads."""
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
