"""Export of a trained model in the Hugging Face format, with its model card.

A checkpoint of a GPT-2 becomes a folder that ``GPT2LMHeadModel.from_pretrained`` of transformers loads, with the same
logits. It has the weights under GPT-2's published names, without the padding rows of the vocabulary, and the files of
the tokenizer if the data have one. A custom model is exported with the names of its own weights and of its callable.
The export does not need transformers.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from infra.cli.table import Table
from infra.errors import UserError
from infra.storage.files import TEMPORARY_PREFIX, write_json
from train.config import config_from_json
from train.data.tokenizer import tokenizer_files
from train.loop.sampling import load_model
from train.models.builders import builder_of
from train.run_files.checkpoint import save_weights
from train.run_files.progress import Progress, read_progress


def write_model(checkpoint: Path, folder: Path, run: str = "") -> str:
    """Write the model of ``checkpoint`` to the new ``folder`` atomically, and return a sentence on how to load it.

    ``run`` is the name of the run that trained it, for the model card.
    """
    progress = read_progress(checkpoint)
    model, tokenizer = load_model(checkpoint)
    kind = config_from_json(progress.config, str(checkpoint)).model
    export = builder_of(kind).export(model, folder)
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_weights(export.weights, temporary / "model.safetensors")
        write_json(temporary / "config.json", export.config)
        if tokenizer:
            for name, content in tokenizer_files(tokenizer, kind.context_length).items():
                (temporary / name).write_text(content, encoding="utf-8")
        (temporary / "README.md").write_text(model_card(progress, checkpoint, run), encoding="utf-8")
        temporary.rename(folder)
    except (OSError, SafetensorError) as failure:
        shutil.rmtree(temporary, ignore_errors=True)  # The disk may be full.
        raise UserError(
            f"Cannot write --to {folder}: {failure}. Free disk space, or choose another folder."
        ) from failure
    return export.loading


def model_card(progress: Progress, checkpoint: Path, run: str = "") -> str:
    """Format the model card: the ``run`` that trained the model if it is known, its data, config and loss."""
    config = config_from_json(progress.config, str(checkpoint))
    # A published model card should not contain local paths.
    config = replace(config, model=config.model.without_paths(), dataset=config.dataset.without_paths())
    result_file = checkpoint.parent.parent / "result.json"
    result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {}
    if result.get("steps") != progress.step:  # The result belongs to another checkpoint of the run.
        result = {}
    rows = [
        ("model", config.model.text),
        *([("trained by", run)] if run else []),
        ("steps", f"{progress.step:,}"),
        ("training tokens", f"{progress.step * config.step_tokens:,}"),
        ("data fingerprint", progress.data_fingerprint),
        ("tokenizer sha256", progress.tokenizer_sha256),
    ]
    names = {
        "train_loss": f"training loss (nats/token, over {config.model.output_size:,} token ids)",
        "val_loss": f"validation loss (nats/token, over {config.model.vocab_size:,} token ids)",
        "val_perplexity": "validation perplexity",
        "val_bits_per_byte": "validation bits per byte",
        "val_bits_per_character": "validation bits per character",
        "device": "trained on",
    }
    rows += [(text, str(result[name])) for name, text in names.items() if result.get(name) is not None]
    table = Table("", ("property", "value"), rows).markdown()
    settings = json.dumps(config.to_json(), indent=2, sort_keys=True)
    weights_folder = config.model.initial_weights
    initial_weights = f"the weights of {weights_folder}" if weights_folder else "random weights"
    title = f"{config.model.title}, " if config.model.title else ""
    library = f"library_name: {config.model.library}\n" if config.model.library else ""
    return (
        f"---\n{library}pipeline_tag: text-generation\n---\n\n"
        f"# {title}{config.model.text}, pre-trained on books\n\n{table}\n\n"
        f"Pre-trained from {initial_weights} on the books with this data fingerprint; neither aligned nor filtered.\n\n"
        f"## Settings\n\n```json\n{settings}\n```\n"
    )
