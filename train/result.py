"""The result of a run: the record that ladders and searches compare, and that MLflow and ``result.json`` keep."""

from dataclasses import dataclass, field
from typing import Literal

from infra.schema import strict
from train.intervals import Estimate

Outcome = Literal["finished", "interrupted", "oom", "over_limit", "diverged"]

MemorySource = Literal["nvml", "device", "reserved", "rss", "rss-of-process"]

TRAINING = "training"
"""What a loop does between its first step, which compiles, and its end."""

BUILDING = "building the model"
"""The stage of a loop before its first step: weights, optimizer and, of a run that is continued, its checkpoint."""


@strict
@dataclass(frozen=True)
class Throughput:
    """Training speed in the steady state: tokens per second, its 95% interval, and the steps that it is based on."""

    tokens_per_second: float
    low: float
    high: float
    steps: int
    """Steps in the steady state, without the ``warmup_steps``."""
    warmup_steps: int

    @property
    def estimate(self) -> Estimate:
        """Tokens per second with its interval, as comparisons take it."""
        return Estimate(self.tokens_per_second, self.low, self.high)


@strict
@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes, measured in three ways; None where the device has no such measure."""

    allocated: int | None
    """Tensors in torch's CUDA allocator."""
    reserved: int | None
    """Segments that the allocator took from the device."""
    process: int
    """The whole process: NVML's count on a GPU, peak resident set on the CPU."""
    process_source: MemorySource
    """Where ``process`` comes from; ``reserved`` is used where NVML does not report it, ``device`` (the growth of the
    GPU's use) for a trial there, and ``rss-of-process`` where the system does not allow the peak of what the process
    did before the run to be forgotten."""
    allocator_retries: int = 0
    """Times the allocator had to free its cache to continue: a sign that too little memory slows the run."""


@strict
@dataclass(frozen=True)
class MemoryShortage:
    """What was known when a run did not fit in memory. Sizes in bytes."""

    stage: str
    """Activity of the loop at that time, such as ``running the backward pass of step 1``."""
    requested_bytes: int | None
    """The allocation that failed, by torch's message; None where nothing failed, or the message has no size."""
    available_bytes: int
    """What the process could use: its limit, or all that the device has for it."""
    bytes_by_part: dict[str, int]
    """Weights, gradients and optimizer state at that moment, by the part's name; without what cannot be counted."""
    message: str = ""
    """torch's, on one line."""


@strict
@dataclass(frozen=True)
class Diagnosis:
    """What was wrong with a run, for a person to read."""

    rows: list[tuple[str, str]]
    """What was found: name and text."""
    advice: str = ""
    """What to do about it: a sentence, or the beginning of one that ends with the command."""
    command: str = ""


@strict
@dataclass(frozen=True)
class CycleReport:
    """One cycle: losses, position, and where the time went. Seconds by the device's own clock, see ``loop.timing``."""

    step: int
    batches: int
    """Training steps and validation batches so far."""
    train_loss: float
    val_loss: float | None
    """Mean over the tokens of the validation windows; None without validation."""
    train_tokens: int
    """Training tokens seen so far, over all workers."""
    val_tokens: int
    books_seen: float
    """Books seen so far, at the corpus's mean length."""
    cycle_seconds: float
    """Of this cycle."""
    train_seconds: float
    data_wait_seconds: float
    optimizer_seconds: float
    """Clipping, the optimizer's step and clearing the gradients."""
    elapsed: float
    """Since the first step."""
    cycle_tokens: int
    epoch_seconds: float
    """Time that one pass over the training tokens takes at this cycle's speed."""
    learning_rate: float
    gradient_norm: float
    step_losses: list[float] = field(default_factory=list)

    @property
    def first_loss(self) -> float | None:
        """The loss of the run's first step; None in a later cycle."""
        return self.step_losses[0] if self.step_losses and self.step == len(self.step_losses) else None

    def format_line(self) -> str:
        val = "-" if self.val_loss is None else f"{self.val_loss:.3f}"
        return (
            f"batches:{self.batches} | loss: {self.train_loss:.3f}/{val} "
            f"| tok-seen: {self.train_tokens + self.val_tokens:,} | time: {self.cycle_seconds:.2f} "
            f"| tok/sec: {self.cycle_tokens / self.cycle_seconds:,.2f} | epoch: {self.epoch_seconds / 3600:.2f} hrs"
        )


@strict
@dataclass(frozen=True)
class RunResult:
    """The outcome of a run and everything that was measured."""

    outcome: Outcome
    reason: str
    steps: int
    throughput: Throughput | None
    """None when the run was too short to have a steady state, or when that was ``implausible_reason``."""
    implausible_reason: str = field(default="", kw_only=True)
    """Why the speed of its steps is no measurement: no such device computes so fast; empty where one could."""
    memory: Memory
    first_loss: float | None = field(default=None, kw_only=True)
    """Training loss of the first step; None in a result that does not begin with it."""
    train_loss: float | None
    """Over the padded vocabulary."""
    val_loss: float | None
    """Over the vocabulary without padding, as that of the exported model."""
    train_tokens: int
    val_tokens: int
    books_seen: float
    train_seconds: float
    """Training time, since the first step."""
    first_step_seconds: float | None
    """From the start of the loop to the end of the first step, which includes compilation."""
    data_wait_fraction: float | None
    """Share of a step of the steady state spent waiting for a batch."""
    optimizer_fraction: float | None = field(default=None, kw_only=True)
    """Share of it spent in clipping, the optimizer's step and clearing the gradients."""
    paused_seconds: float = field(default=0.0, kw_only=True)
    """What single steps took beyond a usual one because the process stood still; it is in no speed and no share."""
    flops_per_token: float
    flops_formula: str
    flops_per_second: float | None
    mfu: float | None
    """Fraction of the datasheet peak at the run's precision; None on hardware without a known peak."""
    hfu: float | None = field(default=None, kw_only=True)
    """The same of all arithmetic, also what is done a second time; None where nothing is recomputed."""
    matmul_utilization: float | None = field(default=None, kw_only=True)
    """Fraction of the matmul rate that ``infra.doctor`` measured on this machine; None if it has not."""
    joules_per_million_tokens: float | None = field(default=None, kw_only=True)
    """Energy of the GPU alone, over the steps after the first; None where no GPU reported it. With several workers it
    is that of the first one's GPU for its share of the tokens."""
    device: str
    attention: str = field(default="", kw_only=True)
    """The kernel that computed attention."""
    machine: str
    """Name of the machine of the first worker."""
    encoded_on: dict[str, int] = field(default_factory=dict, kw_only=True)
    """Tokens of a stream of books by the machine that encoded them ahead of training; empty for shards."""
    checkpoint: str | None
    data_fingerprint: str
    loss_curve: list[tuple[int, float, float | None]]
    """(step, training loss, validation loss) of the cycles of this process."""
    unigram_loss: float | None = field(default=None, kw_only=True)
    """Least loss on the validation windows of a model that does not use its inputs; None without validation."""
    val_perplexity: float | None = None
    """exp of the validation loss: per token, so it is comparable only within one vocabulary."""
    val_bits_per_byte: float | None = None
    """Validation loss per UTF-8 byte of the text of the validation windows; None without a tokenizer."""
    val_bits_per_character: float | None = None
    """The same per character."""
    sample: str | None = None
    """Text that the model wrote at the end."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Means of what the first worker's machine did after the first step, by metric; empty if that was too short."""
    shortage: MemoryShortage | None = None
    """Of a run that did not fit in memory."""
    diagnosis: Diagnosis | None = None
    """None where nothing was wrong."""
    predicted_memory: int | None = None
    """Predicted peak of the process's memory, in bytes."""
    failed_micro_batches: tuple[int, ...] = ()
    """Micro-batches that were chosen automatically and did not fit, before the one that the run was made with."""
