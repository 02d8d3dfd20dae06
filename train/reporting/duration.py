"""The lines of a run's header about its length: when it ends, when it reports, and how long it validates."""

from infra.cli.units import format_count, format_duration
from pipeline.shards import Manifest
from train.config import Cycle, ResolvedConfig
from train.data.sources import source_of
from train.loop.epochs import repetition_warning


def duration_lines(config: ResolvedConfig, manifest: Manifest) -> list[str]:
    """Return the lines about the length of a run and of its cycles."""
    duration, has_epoch = config.duration, source_of(config.dataset).has_epoch
    epoch_steps = manifest.splits["train"]["tokens"] / config.step_tokens
    steps = config.total_steps
    warning = ""
    if duration.time_budget is not None:
        end = (
            f"ends {format_duration(duration.time_budget)} after its first step, including validation, checkpoints and "
        )
        end += "the end of the run"
    elif steps is None:
        end = f"ends after one epoch, {format_count(max(1, int(epoch_steps)), 'step')}"
    else:
        end = f"ends after {format_count(steps, 'step')}"
        if has_epoch:
            end += f", {steps / epoch_steps:.2g} epochs"
            warning = repetition_warning(format_count(steps, "step"), steps / epoch_steps)
    return [f"{end}; {describe_cycle(duration.cycle)}", *([warning] if warning else [])]


def describe_cycle(cycle: Cycle) -> str:
    """Describe when a run reports and validates."""
    length = cycle.train_part if cycle.train_steps is None else format_count(cycle.train_steps, "step")
    report = f"reports every {length}"
    if cycle.val_batches is None:
        return f"{report} and validates for at most a tenth of the training time"
    if cycle.validates:
        return f"{report} and validates on {format_count(cycle.val_batches, 'batch')}"
    return f"{report} without validation"
