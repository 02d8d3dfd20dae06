"""The suites of this project by name, and suites of the user's Python files.

Batches are the published studies' batches, for one GPU with 40 GB.
"""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.errors import UserError, suggest_nearest
from train.config import TrainConfig
from tune.config import check_same_windows
from tune.suite.suites import Changes, Rung, Suite, apply_changes

_TEXTBOOK_BASE: Changes = {
    "precision": "fp32", "attention": "manual", "optimizer": "adamw", "compile": "off", "checkpointing": "none",
    "loss": "plain", "loss_chunks": 1, "loader_threads": 0, "vocabulary_multiple": 1, "schedule": "constant",
}  # fmt: skip

_TUNED_BASE: Changes = {
    "model": "gpt2-124m", "model.context_length": 512, "batch": 32, "vocabulary_multiple": 64, "schedule": "constant",
}  # fmt: skip

A100 = Suite(
    "a100",
    "GPT-2 124M on one GPU, starting from the textbook loop; each rung keeps the previous changes",
    _TEXTBOOK_BASE | {"model": "gpt2-124m", "model.context_length": 512, "model.tied": False, "batch": 28,
              "ablate": ("async-loss", "prefetch", "gc-pause")},
    (
        Rung("tensor cores", {"precision": "tf32"}),
        Rung("no synchronization", {"ablate": ("prefetch", "gc-pause")}),
        Rung("mixed precision fp16", {"precision": "fp16", "batch": 32}, changes_numerics=True),
        Rung("compile", {"compile": "whole", "batch": 48}),
        Rung("flash attention", {"attention": "sdpa", "batch": 64}),
        Rung("padded vocabulary", {"vocabulary_multiple": 64}, changes_numerics=True),
        Rung("tied weights", {"model.tied": True}, changes_numerics=True),
        Rung("data-loading workers", {"loader_threads": 1}),
        Rung("bf16 without scaler", {"precision": "bf16"}, changes_numerics=True),
        Rung("bf16 activations", {"precision": "bf16-activations"}, changes_numerics=True),
        Rung("fused AdamW", {"optimizer": "adamw-fused"}),
        Rung("the GPU's attention", {"attention": "auto"}),
        Rung("frozen collector", {"ablate": ("prefetch",)}),
        Rung("prefetched copies", {"ablate": ()}),
        Rung("max-autotune", {"compile": "max-autotune"}),
    ),
    cumulative=True,
)  # fmt: skip

LOOP = Suite(
    "loop",
    "Habits of a training loop and their cost on a small model (two batches are two steps)",
    _TEXTBOOK_BASE | {"model": "small", "batch": 32,
              "ablate": ("async-loss", "set-to-none", "prefetch", "gc-pause", "large-pages")},
    (
        Rung("accumulation", {"micro_batch": 8}),
        Rung("gradients set to none", {"ablate": ("async-loss", "prefetch", "gc-pause", "large-pages")}),
        Rung("mixed precision bf16", {"precision": "bf16"}, changes_numerics=True),
        Rung("tensor cores", {"precision": "tf32"}),
        Rung("checkpointing", {"checkpointing": "full"}),
        Rung("no synchronization", {"ablate": ("set-to-none", "prefetch", "gc-pause", "large-pages")}),
        Rung("asynchronous copies", {"ablate": ("async-loss", "set-to-none", "gc-pause", "large-pages")}),
        Rung("large pages", {"ablate": ("async-loss", "set-to-none", "prefetch", "gc-pause")}),
        Rung("compile", {"compile": "whole"}),
        Rung("max-autotune", {"compile": "max-autotune"}),
        Rung("all together", {"ablate": (), "precision": "bf16", "attention": "auto", "optimizer": "adamw-fused",
                              "compile": "max-autotune"}, changes_numerics=True),
    ),
    steps_timed=2,
)  # fmt: skip

_CHECKPOINTED: Mapping[str, Any] = {"micro_batch": 4, "checkpointing": "full"}
_CHECKPOINTED_FP16: dict[str, Any] = {**_CHECKPOINTED, "precision": "fp16"}

MEMORY = Suite(
    "memory",
    "Techniques that save memory, and their cost in speed",
    _TEXTBOOK_BASE | {"model": "gpt2-124m", "attention": "sdpa", "optimizer": "adamw-fused", "batch": 16,
              "allocator": "default"},
    (
        Rung("accumulation", {"micro_batch": 4}),
        Rung("accumulation, checkpointing", _CHECKPOINTED),
        Rung("expandable segments", {"allocator": "expandable"}),
        Rung("checkpointing", {"checkpointing": "full"}),
        Rung("checkpointing every second block", {"checkpointing": "alternate"}),
        Rung("selective checkpointing", {"checkpointing": "selective"}),
        Rung("fp16", {"precision": "fp16"}, changes_numerics=True),
        Rung("accumulation, checkpointing, fp16", _CHECKPOINTED_FP16, changes_numerics=True),
        Rung("bf16", {"precision": "bf16"}, changes_numerics=True),
        Rung("bf16 activations", {"precision": "bf16-activations"}, changes_numerics=True),
        Rung("TF32", {"precision": "tf32"}),
        Rung("Adafactor", {"optimizer": "adafactor"}, changes_numerics=True),
        Rung("accumulation, checkpointing, fp16, Adafactor", _CHECKPOINTED_FP16 | {"optimizer": "adafactor"},
             changes_numerics=True),
        Rung("Lion", {"optimizer": "lion", "learning_rate": 1e-4}, changes_numerics=True),
        Rung("SGD with momentum", {"optimizer": "sgd", "learning_rate": 0.1}, changes_numerics=True),
        Rung("optimizer on the CPU", {"offload_optimizer": True}),
        Rung("8-bit AdamW", {"optimizer": "adamw-8bit"}, changes_numerics=True),
        Rung("accumulation, checkpointing, fp16, 8-bit AdamW", _CHECKPOINTED_FP16 | {"optimizer": "adamw-8bit"},
             changes_numerics=True),
        Rung("bf16 AdamW", {"optimizer": "adamw-bf16", "precision": "bf16-activations"}, changes_numerics=True),
        Rung("chunked loss", {"loss_chunks": 8}),
        Rung("compile", {"compile": "whole"}),
        Rung("compile with half the memory", {"compile": "whole", "checkpointing": "budget"}),
        Rung("all together", {"micro_batch": 4, "checkpointing": "full", "precision": "bf16-activations",
                              "loss_chunks": 8, "optimizer": "adamw-bf16", "compile": "blocks",
                              "allocator": "expandable"}, changes_numerics=True),
    ),
)  # fmt: skip

KERNELS = Suite(
    "kernels",
    "Ways in which torch.compile chooses and launches kernels, compared with the defaults for the whole graph",
    _TUNED_BASE | {"compile": "whole"},
    (
        Rung("coordinate descent", {"compile": "coordinate-descent"}),
        Rung("max-autotune", {"compile": "max-autotune"}),
        Rung("CUDA graphs", {"compile": "reduce-overhead"}),
        Rung("max-autotune with CUDA graphs", {"compile": "max-autotune-graphs"}),
        Rung("no biases (another model)", {"model.bias": False}, changes_numerics=True),
    ),
)  # fmt: skip

ACCUMULATION = Suite(
    "accumulation",
    "A small model with four micro-batches per step; each rung keeps the previous changes",
    _TEXTBOOK_BASE | {"model": "small", "vocabulary_multiple": 64, "global_batch": 32, "micro_batch": 32,
              "precision": "tf32", "attention": "sdpa", "optimizer": "adamw-fused",
              "ablate": ("prefetch", "gc-pause")},
    (
        Rung("4 accumulated", {"micro_batch": 8}),
        Rung("asynchronous copies", {"ablate": ("gc-pause",)}),
        Rung("compile", {"compile": "whole"}),
        Rung("max-autotune", {"compile": "max-autotune"}),
    ),
    cumulative=True,
)  # fmt: skip

LOADER = Suite(
    "loader",
    "Loader threads, or a stream of books, compared with a loop that reads shards itself",
    _TUNED_BASE,
    tuple(Rung(f"{count} thread{'s' * (count > 1)}", {"loader_threads": count}) for count in (1, 2, 4)),
)  # fmt: skip

PRECISION = Suite(
    "precision",
    "Precisions with fewer bits: their cost in validation loss over three seeds, and their gain in speed",
    _TEXTBOOK_BASE
    | {
        "model": "gpt2-124m", "model.context_length": 512, "attention": "sdpa", "optimizer": "adamw-fused",
        "vocabulary_multiple": 64, "batch": 16,
    },
    (
        Rung("TF32", {"precision": "tf32"}),
        Rung("fp16", {"precision": "fp16"}, changes_numerics=True),
        Rung("bf16", {"precision": "bf16"}, changes_numerics=True),
        Rung("bf16 activations", {"precision": "bf16-activations"}, changes_numerics=True),
        Rung("8-bit AdamW", {"optimizer": "adamw-8bit"}, changes_numerics=True),
        Rung("bf16 AdamW", {"optimizer": "adamw-bf16", "precision": "bf16-activations"}, changes_numerics=True),
    ),
    seeds=3,
)  # fmt: skip

SIZES = Suite(
    "sizes",
    "Sizes that fill a GPU's tiles and waves, and sizes that do not",
    _TUNED_BASE,
    (
        Rung("vocabulary not padded", {"vocabulary_multiple": 1}, changes_numerics=True),
        Rung("vocabulary to 50,432", {"vocabulary_multiple": 256}, changes_numerics=True),
        Rung("6 heads", {"model.heads": 6}, changes_numerics=True),
        Rung("16 heads", {"model.heads": 16}, changes_numerics=True),
        Rung("24 heads", {"model.heads": 24}, changes_numerics=True),
        Rung("width 780", {"model.width": 780}, changes_numerics=True),
        Rung("width 832, 13 heads", {"model.width": 832, "model.heads": 13}, changes_numerics=True),
        *(Rung(f"batch {size}", {"batch": size}) for size in (7, 8, 9, 31, 33, 63, 64, 65)),
    ),
)  # fmt: skip

AA = Suite(
    "aa",
    "A/A test: identical runs, to measure how often the verdict is a false alarm",
    {"model": "gpt2-124m", "batch": 16, "schedule": "constant"},
    tuple(Rung(f"again {number}") for number in range(1, 11)),
)

SUITES = {suite.name: suite for suite in (A100, LOOP, MEMORY, KERNELS, ACCUMULATION, LOADER, PRECISION, SIZES, AA)}


def find_suite(text: str) -> Suite:
    """Find the suite with the name ``text``, or load the suite in the Python file at that path."""
    if text in SUITES:
        return SUITES[text]
    path = Path(text)
    if path.suffix != ".py":
        hint = suggest_nearest(text, SUITES)
        raise UserError(f"--suite {text!r} is not a suite{hint} The name of a file must end in .py.")
    return _load_suite(path)


def check_applicable(suite: Suite, start: TrainConfig, file: str) -> None:
    """Raise ``UserError`` if the ``suite`` of a ``file`` has a rung that no machine could run from ``start`` on.

    A rung that only this machine cannot run is skipped, with its reason in the report.
    """

    def apply(state: TrainConfig, changes: Mapping[str, Any], name: str) -> TrainConfig:
        config = apply_changes(state, changes, f"--suite {file}, {name}")
        if "cycle" in changes:
            try:
                check_same_windows(config.duration.cycle)
            except UserError as mistake:
                raise UserError(f"--suite {file}, {name}: {mistake}") from None
        return config

    # With the device cuda, no setting is rejected only because of the device.
    state = apply(start.replace(device="cuda"), suite.base, "the base")
    for rung in suite.rungs:
        config = apply(state, rung.changes, f"rung {rung.name!r}")
        state = config if suite.cumulative else state


def _load_suite(path: Path) -> Suite:
    """Load ``SUITE`` of a Python file: a :class:`Suite` or a list of rungs."""
    if not path.is_file():
        raise UserError(f"--suite {path} does not exist. Use the name of a suite or the path of a Python file.")
    try:
        suite = runpy.run_path(str(path)).get("SUITE")
    except (Exception, SystemExit) as failure:
        raise UserError(
            f"--suite {path} failed with {type(failure).__name__}: {failure}. Fix the file and run the command again."
        ) from failure
    if isinstance(suite, list):
        suite = Suite(path.stem, path.stem, {}, tuple(suite))
    if not isinstance(suite, Suite):
        raise UserError(
            f"--suite {path} does not define SUITE. Write SUITE = [Rung(...), ...] or Suite(...), with both classes "
            "from tune.suite.suites."
        )
    for rung in suite.rungs:
        if not (isinstance(rung, Rung) and isinstance(rung.changes, Mapping)):
            raise UserError(f"--suite {path}: {rung!r} is not a rung. Write Rung('name', {{'setting': value}}).")
    if not suite.rungs:
        raise UserError(f"--suite {path} has no rungs. Add at least one Rung('name', {{'setting': value}}).")
    return suite
