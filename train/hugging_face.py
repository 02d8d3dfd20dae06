"""A trained model in the Hugging Face format, with its model card.

In: a checkpoint. Out: a folder that ``transformers`` loads with ``GPT2LMHeadModel.from_pretrained``, with the same
logits: weights under GPT-2's published names, without the padding rows of the vocabulary, and the tokenizer's files
if the ids have a vocabulary. Does not need transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from infra.errors import UserError
from infra.storage import TEMPORARY, write_json
from infra.storage_dir import StorageDir
from infra.table import Part
from train.checkpoint.progress import Progress, read_progress
from train.config import config_from_json
from train.data.text import tokenizer_files
from train.loop.sampling import load_model
from train.model.gpt import GPT
from train.model_config import ModelConfig, format_model

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


def write_model(checkpoint: Path, folder: Path, run: str = "") -> None:
    """Write the model of ``checkpoint`` to the new ``folder``, whole or not at all.

    ``run`` names the run that trained it, for its model card.
    """
    progress = read_progress(checkpoint)
    model, vocabulary = load_model(checkpoint)
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file(published_weights(model), temporary / "model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "config.json", published_config(model.config))
        if vocabulary:
            for name, content in tokenizer_files(vocabulary, model.config.context_length).items():
                (temporary / name).write_text(content, encoding="utf-8")
        (temporary / "README.md").write_text(model_card(progress, checkpoint, run), encoding="utf-8")
        temporary.rename(folder)
    except (OSError, SafetensorError) as refused:
        shutil.rmtree(temporary, ignore_errors=True)  # on a disk that may be full
        raise UserError(f"--to {folder} could not be written ({refused}): make room, or name another.") from refused


def published_weights(model: GPT) -> dict[str, Tensor]:
    """The weights in fp32 under GPT-2's published names; linear weights as (in, out), like GPT-2's."""
    config = model.config
    weights = {}
    for name, value in model.state_dict().items():
        value = value.detach().float().cpu()
        if name in _NAMES:
            if name in ("token_embedding.weight", "head.weight"):
                value = value[: config.vocabulary]
            if name != "head.weight" or not config.tied:
                weights[_NAMES[name]] = value.contiguous()
            continue
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        is_linear = part not in ("norm_1", "norm_2")
        weights[f"transformer.h.{layer}.{_BLOCK[part]}.{kind}"] = (
            value.T if is_linear and value.dim() == 2 else value
        ).contiguous()
    if not config.bias:  # the format always has biases
        for name in [name for name in weights if name.endswith("weight") and (".h." in name or "ln_f" in name)]:
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(weights[name].shape[-1])
    return weights


def published_config(config: ModelConfig) -> dict[str, Any]:
    """The model's shape as transformers' ``GPT2Config`` reads it."""
    end_of_text = config.end_of_text % config.vocabulary
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_positions": config.context_length,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }


def model_card(progress: Progress, checkpoint: Path, run: str = "") -> str:
    """What the model is: the ``run`` that trained it if that is known, its data, its config, its measured loss."""
    config = config_from_json(progress.config, str(checkpoint))
    result = checkpoint.parent.parent / "result.json"
    measured = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    if measured.get("steps") != progress.step:  # of another part of the run
        measured = {}
    rows = [
        ("model", format_model(config.model)),
        *([("trained by", run)] if run else []),
        ("steps", f"{progress.step:,}"),
        ("training tokens", f"{progress.step * config.step_tokens:,}"),
        ("data fingerprint", progress.data_fingerprint),
        ("vocabulary sha256", progress.vocabulary_sha256),
    ]
    names = {
        "train_loss": f"training loss (nats per token, over {config.model.padded_vocabulary:,} ids)",
        "val_loss": f"validation loss (nats per token, over {config.model.vocabulary:,} ids)",
        "val_perplexity": "validation perplexity",
        "val_bits_per_byte": "validation bits per byte",
        "val_bits_per_character": "validation bits per character",
        "device": "trained on",
    }
    rows += [(text, str(measured[name])) for name, text in names.items() if measured.get(name) is not None]
    facts = Part("", ("", ""), rows).markdown()
    public = {name: value for name, value in config.to_json().items() if name != "stream"}  # paths of who trained it
    settings = json.dumps(public | {"data": StorageDir.of(config.data).name}, indent=2, sort_keys=True)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# GPT-2, {format_model(config.model)}, pre-trained on books\n\n{facts}\n\n"
        "Pre-trained from random weights on the books with this data fingerprint; neither aligned nor filtered.\n\n"
        f"## Settings\n\n```json\n{settings}\n```\n"
    )
