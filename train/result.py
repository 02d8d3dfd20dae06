"""The result of a run, which ladders and searches compare, and which MLflow and ``result.json`` store."""

import math
from dataclasses import dataclass, field
from typing import Literal

from infra.schema import strict
from train.intervals import Estimate

Outcome = Literal["finished", "interrupted", "oom", "over_limit", "diverged"]

MemorySource = Literal["nvml", "device", "reserved", "rss", "rss-of-process"]

TRAINING = "training"
"""Activity of a loop between its first step, which compiles, and its end."""

BUILDING = "building the model"
"""Stage of a loop before its first step, in which it creates weights and optimizer, or loads a checkpoint."""


@strict
@dataclass(frozen=True)
class Throughput:
    """Training speed in the steady state, with its 95% interval and the number of steps that were measured."""

    tokens_per_second: float
    """Training speed in tokens/s."""
    low: float
    """Lower end of the speed's 95% interval."""
    high: float
    """Upper end of the speed's 95% interval."""
    steps: int
    """Number of steps in the steady state, without warm-up."""
    warmup_steps: int
    """Number of steps before the steady state."""
    unit: Literal["step", "micro-batch"] = "step"
    """The unit that ``steps`` and ``warmup_steps`` count: in a run of a few long steps, micro-batches are measured."""

    @property
    def estimate(self) -> Estimate:
        """The speed in tokens/s with its interval."""
        return Estimate(self.tokens_per_second, self.low, self.high)


@strict
@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes, measured in three ways; None if the device does not support a measurement."""

    allocated: int | None
    """Peak bytes of tensors in torch's CUDA allocator."""
    reserved: int | None
    """Peak bytes of segments that torch's CUDA allocator reserved."""
    process: int
    """Peak bytes of the whole process: GPU memory reported by NVML, or the resident set on a CPU."""
    process_source: MemorySource
    """Measurement behind ``process``: ``nvml``; without it ``reserved``, or ``device`` (the increase of the GPU's used
    memory) in a trial; ``rss``; or ``rss-of-process`` if the system cannot reset the peak before the run."""
    allocator_retries: int = 0
    """Number of times that the allocator freed its cache to continue, which slows a run with too little memory."""
    capacity: int | None = None
    """Bytes of memory that the GPU has; None on a CPU."""


@strict
@dataclass(frozen=True)
class MemoryShortage:
    """Details of the moment in which a run ran out of memory. Sizes are in bytes."""

    stage: str
    """Activity of the loop at that time, such as ``running the backward pass of step 1``."""
    requested_bytes: int | None
    """Size of the allocation that failed, by torch's message; None if no allocation failed or its size is unknown."""
    available_bytes: int
    """Memory that the process could use: its limit, or the memory of the device."""
    bytes_by_part: dict[str, int]
    """Bytes of weights, gradients and optimizer state by part; parts that cannot be measured are missing."""
    message: str = ""
    """First line of torch's error; empty if a limit was exceeded."""


@strict
@dataclass(frozen=True)
class Diagnosis:
    """Findings about a faulty run, with advice."""

    rows: list[tuple[str, str]]
    """Findings: (name, text)."""
    advice: str = ""
    """Advice on the next step: a sentence, or the start of a sentence that ends with ``command``."""
    command: str = ""
    """Command that follows the advice; empty if there is none."""


@strict
@dataclass(frozen=True)
class LossPrediction:
    """The held-out loss at the end of a run that a search predicted, in nats/token, with its 95% interval."""

    loss: float
    """Predicted validation loss."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    train_tokens: int
    """Number of training tokens for which the loss is predicted."""
    slope: float
    """Change of the loss by the natural logarithm of the number of training tokens; usually negative."""
    val_windows: int
    """Number of held-out windows on which the search validated."""
    data_fingerprint: str
    """Fingerprint of the search's data."""

    def after(self, train_tokens: int) -> Estimate:
        """Return the loss that is predicted after another number of training tokens."""
        change = self.slope * math.log(train_tokens / self.train_tokens)
        return Estimate(self.loss + change, self.low + change, self.high + change)


@strict
@dataclass(frozen=True)
class CycleReport:
    """Report of a cycle: losses, progress and times, which the clock of the device measures (``loop.timing``)."""

    step: int
    """Number of the cycle's last step."""
    batches: int
    """Number of training steps and validation batches since the start of the run."""
    train_loss: float
    """Mean loss of the cycle's steps, in nats/token."""
    val_loss: float | None
    """Mean loss over the tokens of the validation windows, in nats/token; None without validation."""
    train_tokens: int
    """Number of training tokens since the start of the run, over all workers."""
    val_tokens: int
    """Number of validation tokens since the start of the run, over all workers."""
    books_seen: int
    """Number of whole books trained on since the start of the run, by the mean length of the data's books."""
    cycle_seconds: float
    """Duration of the cycle, including validation."""
    train_seconds: float
    """Duration of the cycle's training steps."""
    data_wait_seconds: float
    """Time in the cycle that the loop waited for batches."""
    optimizer_seconds: float
    """Time in the cycle for gradient clipping, the optimizer's step and clearing the gradients."""
    elapsed: float
    """Training time since the end of the run's first step, in seconds."""
    cycle_tokens: int
    """Number of training and validation tokens in the cycle."""
    epoch_seconds: float
    """Time that an epoch takes at the cycle's training speed."""
    learning_rate: float
    """Learning rate of the cycle's last step."""
    gradient_norm: float
    """Gradient norm of the cycle's last step, before clipping."""
    step_losses: list[float] = field(default_factory=list)
    """Loss of each of the cycle's steps, in nats/token."""
    val_windows: int = 0
    """Number of validation windows, the same in each validation of the run; 0 without validation."""
    val_bits_per_byte: float | None = None
    """Validation loss in bits per UTF-8 byte of the validation windows' text; None without a tokenizer."""

    @property
    def first_loss(self) -> float | None:
        """Loss of the run's first step; None in a later cycle."""
        return self.step_losses[0] if self.step_losses and self.step == len(self.step_losses) else None

    def format_line(self) -> str:
        """Format the cycle as a line of the log."""
        val = "-" if self.val_loss is None else f"{self.val_loss:.3f}"
        return (
            f"batches:{self.batches} | loss: {self.train_loss:.3f}/{val} "
            f"| tok-seen: {self.train_tokens + self.val_tokens:,} | time: {self.cycle_seconds:.2f} "
            f"| tok/sec: {self.cycle_tokens / self.cycle_seconds:,.2f} | epoch: {self.epoch_seconds / 3600:.2f} hrs"
        )


@strict
@dataclass(frozen=True)
class RunResult:
    """The outcome of a run with its measurements."""

    outcome: Outcome
    """Outcome of the run."""
    reason: str
    """Reason for the outcome, as a part of a sentence."""
    steps: int
    """Number of completed optimizer steps."""
    throughput: Throughput | None
    """Training speed; None if the run was too short for a steady state, or if its speed is implausible."""
    implausible_reason: str = field(default="", kw_only=True)
    """Why the measured speed is invalid, because the device cannot compute so fast; empty if it is valid."""
    memory: Memory
    """Peak memory."""
    first_loss: float | None = field(default=None, kw_only=True)
    """Training loss of the first step; None if this process resumed the run."""
    train_loss: float | None
    """Training loss of the last cycle in nats/token, over the padded vocabulary."""
    val_loss: float | None
    """Validation loss of the last cycle in nats/token, over the vocabulary without padding, as the exported model's."""
    train_tokens: int
    """Number of training tokens, over all workers."""
    val_tokens: int
    """Number of validation tokens, over all workers."""
    val_windows: int = field(default=0, kw_only=True)
    """Number of windows of each validation; 0 without validation."""
    books_seen: int
    """Number of whole books trained on, by the mean length of the data's books."""
    train_seconds: float
    """Training time since the end of the first step."""
    first_step_seconds: float | None
    """Time from the start of the loop to the end of the first step, which includes compilation."""
    data_wait_fraction: float | None
    """Fraction of a steady-state step in which the loop waits for a batch."""
    optimizer_fraction: float | None = field(default=None, kw_only=True)
    """Fraction of a steady-state step for gradient clipping, the optimizer's step and clearing the gradients."""
    paused_seconds: float = field(default=0.0, kw_only=True)
    """Time in which the process was paused, which is excluded from speed and step time."""
    flops_per_token: float
    """FLOPs per token of a forward and backward pass, by the formula ``flops_formula``."""
    petaflop_days: float = field(default=0.0, kw_only=True)
    """Compute of the training: ``train_tokens`` x ``flops_per_token``, in PF-days of 8.64e19 FLOPs."""
    flops_formula: str
    """Formula of ``flops_per_token``, with its source."""
    flops_per_second: float | None
    """Training speed in FLOP/s; None without a speed."""
    mfu: float | None
    """Model FLOPs utilization: fraction of the peak FLOP/s at the run's precision; None if the peak is unknown."""
    hfu: float | None = field(default=None, kw_only=True)
    """Hardware FLOPs utilization, which includes recomputation; None if nothing is recomputed."""
    matmul_utilization: float | None = field(default=None, kw_only=True)
    """Fraction of the matmul rate that ``infra.doctor`` measured on this machine; None if it was not measured."""
    joules_per_million_tokens: float | None = field(default=None, kw_only=True)
    """Energy of the first worker's GPU for a million of its tokens, after the first step; None if it is unknown."""
    device: str
    """Name of the device."""
    attention: str = field(default="", kw_only=True)
    """Name of the kernel that computed attention."""
    machine: str
    """Name of the machine of the first worker."""
    encoded_on: dict[str, int] = field(default_factory=dict, kw_only=True)
    """Number of tokens of a book stream by the machine that encoded them; empty for shards."""
    checkpoint: str | None
    """Location of the newest checkpoint; None if there is none."""
    data_fingerprint: str
    """Fingerprint of the data."""
    loss_curve: list[tuple[int, float, float | None]]
    """(step, training loss, validation loss) of each cycle of this process."""
    unreported_losses: list[float] = field(default_factory=list, kw_only=True)
    """Losses of the steps after the last cycle, in nats/token; empty unless the run was interrupted within a cycle."""
    unigram_loss: float | None = field(default=None, kw_only=True)
    """Minimum loss on the validation windows of a model that ignores its inputs; None without validation."""
    val_perplexity: float | None = None
    """Perplexity per token of the validation windows, which is only comparable between equal vocabularies."""
    val_bits_per_byte: float | None = None
    """Validation loss in bits per UTF-8 byte of the validation windows' text; None without a tokenizer."""
    val_bits_per_character: float | None = None
    """Validation loss in bits per character of the validation windows' text; None without a tokenizer."""
    sample: str | None = None
    """Text that the model generated at the end; None if it did not generate one."""
    no_sample_reason: str = ""
    """Why a finished run of a model that can generate text has no sample, as a part of a sentence; empty if it has
    one."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Averages of the first worker's machine after the first step, by metric; empty if the run was too short."""
    shortage: MemoryShortage | None = None
    """Details of a run that did not fit in memory; None if it did."""
    diagnosis: Diagnosis | None = None
    """Findings about the run; None if there are none."""
    predicted_memory: int | None = None
    """Predicted peak memory of the process, in bytes."""
    loss_prediction: LossPrediction | None = None
    """The loss that the search of this config predicted; None if it comes from no such search, or did not finish."""
    failed_micro_batches: tuple[int, ...] = ()
    """Micro-batches that were chosen automatically and did not fit in memory."""
