"""A trained model in the Hugging Face format, with its model card.

In: a checkpoint. Out: a folder that ``transformers`` loads with ``GPT2LMHeadModel.from_pretrained``, with the same
logits: weights under GPT-2's published names, without the padding rows of the vocabulary, and the tokenizer's files
if the ids have a vocabulary. Does not need transformers. Of a custom model: its weights under its own names, and the
callable that makes it.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from infra.errors import UserError
from infra.schema import to_json
from infra.storage import TEMPORARY, write_json
from infra.storage_dir import StorageDir
from infra.table import Part
from train.checkpoint.progress import Progress, read_progress
from train.checkpoint.save import save_weights, shared_names
from train.config import TrainConfig, config_from_json
from train.custom_model import CustomModel
from train.data.text import tokenizer_files
from train.loop.sampling import load_model
from train.model.published import published_config, published_weights
from train.model_config import ModelConfig, format_model


def write_model(checkpoint: Path, folder: Path, run: str = "") -> str:
    """Write the model of ``checkpoint`` to the new ``folder``, whole or not at all; returns how to load it, in words.

    ``run`` names the run that trained it, for its model card.
    """
    progress = read_progress(checkpoint)
    model, vocabulary = load_model(checkpoint)
    kind = config_from_json(progress.config, str(checkpoint)).model
    if isinstance(kind, CustomModel):
        shared = shared_names(model)
        weights = {name: value.contiguous().cpu() for name, value in model.state_dict().items() if name not in shared}
        described = to_json(replace(kind, found=None))
        loading = f"load it into what {kind.callable} returns, with safetensors.torch.load_model"
    else:
        weights, described = published_weights(model), published_config(kind)
        loading = f"load it with transformers' GPT2LMHeadModel.from_pretrained({str(folder)!r})"
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_weights(weights, temporary / "model.safetensors")
        write_json(temporary / "config.json", described)
        if vocabulary:
            for name, content in tokenizer_files(vocabulary, kind.context_length).items():
                (temporary / name).write_text(content, encoding="utf-8")
        (temporary / "README.md").write_text(model_card(progress, checkpoint, run), encoding="utf-8")
        temporary.rename(folder)
    except (OSError, SafetensorError) as refused:
        shutil.rmtree(temporary, ignore_errors=True)  # on a disk that may be full
        raise UserError(f"--to {folder} could not be written ({refused}): make room, or name another.") from refused
    return loading


def model_card(progress: Progress, checkpoint: Path, run: str = "") -> str:
    """What the model is: the ``run`` that trained it if that is known, its data, its config, its measured loss."""
    config = _public(config_from_json(progress.config, str(checkpoint)))
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
    custom = isinstance(config.model, CustomModel)
    ids = config.model.vocabulary if custom else config.shape.padded_vocabulary
    names = {
        "train_loss": f"training loss (nats per token, over {ids:,} ids)",
        "val_loss": f"validation loss (nats per token, over {config.model.vocabulary:,} ids)",
        "val_perplexity": "validation perplexity",
        "val_bits_per_byte": "validation bits per byte",
        "val_bits_per_character": "validation bits per character",
        "device": "trained on",
    }
    rows += [(text, str(measured[name])) for name, text in names.items() if measured.get(name) is not None]
    facts = Part("", ("", ""), rows).markdown()
    settings = json.dumps(config.to_json(), indent=2, sort_keys=True)
    begun = "random weights" if custom or not config.shape.start else f"the weights of {config.shape.start}"
    library = "" if custom else "library_name: transformers\n"
    return (
        f"---\n{library}pipeline_tag: text-generation\n---\n\n"
        f"# {'' if custom else 'GPT-2, '}{format_model(config.model)}, pre-trained on books\n\n{facts}\n\n"
        f"Pre-trained from {begun} on the books with this data fingerprint; neither aligned nor filtered.\n\n"
        f"## Settings\n\n```json\n{settings}\n```\n"
    )


def _public(config: TrainConfig) -> TrainConfig:
    """``config`` without the paths of who trained it."""
    model = config.model
    if isinstance(model, ModelConfig):
        model = replace(model, start=Path(model.start).name)
    vocabulary = config.reading.vocabulary and StorageDir.of(config.reading.vocabulary).name
    return replace(
        config, model=model, data=StorageDir.of(config.data).name,
        stream=tuple(StorageDir.of(source).name for source in config.stream),
        reading=replace(config.reading, vocabulary=vocabulary),
    )  # fmt: skip
