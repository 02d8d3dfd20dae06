"""The next command after a run, a search or a ladder, with the time that it takes on the device that trained."""

from infra.device.first_run import START_SECONDS, TRAINING_SECONDS, NextCommand, time_budget, without_validation
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import DurationConfig, Step, TrainConfig
from train.data.sources import source_of
from train.result import RunResult
from train.run_files.lookup import format_resume_command, format_run_argument, format_run_command

MAX_TRAINING_SECONDS = 600.0
"""Maximum training time of a next command. Instead of a longer epoch, it has a time budget."""

READING_SECONDS = 10.0
"""Typical time of a command that loads a checkpoint and generates a few words or exports it."""


def after_run(step: Step, duration: DurationConfig, result: RunResult, run_dir: StorageDir) -> str:
    """Return the next step after a run: a command, or a sentence."""
    optimization = step.optimization
    if result.diagnosis and result.diagnosis.advice:
        command = result.diagnosis.command
        return result.diagnosis.advice + (f"`{command}`" if command else "")
    match result.outcome, bool(result.checkpoint):
        case "interrupted", True:
            return f"resume with: `{format_resume_command(run_dir)}`"
        case "interrupted", False:
            return "no checkpoint was saved; start again with another --name, and with --keep-checkpoints above 0"
        case "diverged", True:
            return (
                "resume from the last checkpoint before the divergence with a lower learning rate: "
                f"`{format_resume_command(run_dir)} --learning-rate {optimization.learning_rate / 3:.1g}`"
            )
        case "diverged", False:
            return (
                "no checkpoint was saved; start again with another --name, and with --learning-rate below "
                f"{optimization.learning_rate:g} or, in a long run, --warmup-steps above {optimization.warmup_steps}"
            )
        case _, False:
            seconds = result.train_seconds + (result.first_step_seconds or 0.0)
            command = format_run_command(run_dir / "config.json")
            return f"run it again, {NextCommand(command, seconds + READING_SECONDS)}"
    if result.no_sample_reason:
        return f"train longer, {longer_run(step, duration, result, run_dir)}"
    argument = format_run_argument(run_dir)
    command = f"python -m train.export --checkpoint {argument} --to exported"
    if result.sample is not None:
        command = f'python -m train.generate --checkpoint {argument} --prompt "In the beginning"'
    return str(NextCommand(command, READING_SECONDS))


def longer_run(step: Step, duration: DurationConfig, result: RunResult, run_dir: StorageDir) -> NextCommand:
    """Return the command that resumes a finished run for as long as it has trained, but for minutes: at least as long
    as a first run and at most :data:`MAX_TRAINING_SECONDS`. A slow run is resumed for one step."""
    kind = step.execution.device
    training = min(max(TRAINING_SECONDS[kind], result.train_seconds), MAX_TRAINING_SECONDS)
    seconds = START_SECONDS[kind] + training
    resume = format_resume_command(run_dir)
    if duration.time_budget is not None:
        return NextCommand(f"{resume} --time-budget {round(result.train_seconds + training)}s", seconds)
    step_seconds = (result.train_seconds + (result.first_step_seconds or 0.0)) / max(1, result.steps)
    if result.throughput:
        step_seconds = step.step_tokens / result.throughput.tokens_per_second
    steps = result.steps + max(1, round(training / max(step_seconds, 1e-3)))
    length = f"--tokens {steps * step.step_tokens}" if duration.tokens is not None else f"--steps {steps}"
    return NextCommand(f"{resume} {length}", max(seconds, START_SECONDS[kind] + step_seconds))


def after_comparison(
    config: TrainConfig, device: str, manifest: Manifest, tokens_per_second: float, best_file: StorageDir
) -> NextCommand:
    """Return the command that trains the winner of a search or ladder, whose config in ``best_file`` is ``config``.

    It trains for an epoch if that takes minutes at the winner's speed on the ``device``, cuda or cpu.
    """
    kind = "cuda" if device == "cuda" else "cpu"
    command, duration = format_run_command(best_file), config.duration
    if source_of(config.dataset).has_epoch:
        flag = without_validation(manifest.longest_shard("val"), config.model.context_length)
        command = f"{command} {flag}".strip()
    seconds = duration.time_budget or (config.total_steps or 0) * config.step_tokens / tokens_per_second
    if not duration.ends:
        seconds = manifest.splits["train"]["tokens"] / tokens_per_second
        if seconds > MAX_TRAINING_SECONDS:
            command, seconds = f"{command} {time_budget(kind)}", TRAINING_SECONDS[kind]
    return NextCommand(command, START_SECONDS[kind] + seconds)
