"""One worker's session, which the worker of a run and the process of a trial have in common.

A session prepares the process, loads the data, trains, tries a smaller micro-batch where one does not fit, and
completes the result with the machine's telemetry.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from infra.cli.units import GB
from infra.device.telemetry import Telemetry
from infra.errors import UserError
from train.callbacks import Callback
from train.config import ResolvedConfig
from train.data.source import TrainingData
from train.launch.job import WorkerJob, WorkerResult
from train.launch.link import Activity, CycleDone, Message, MicroBatchTooLarge, PrintLine, SystemMetrics
from train.loop import memory
from train.loop.execution import configure_allocator
from train.loop.memory_limit import MemoryLimit, cap_to_free_memory
from train.loop.oom import OutOfMemory
from train.loop.result_builder import StepTimes
from train.loop.sampling import closing_sample
from train.loop.trainer import Callbacks, Trainer
from train.loop.validation import Text, bits_per, id_counts
from train.reporting.diagnosis import first_loss_fault
from train.result import CycleReport, RunResult
from train.run_files.checkpoint import Checkpoints
from train.run_files.progress import newest, read_progress
from train.run_files.run_folder import RunFolder
from train.search_reference import FIRST_STEPS


class Driver:
    """The driver of a session: whoever started it, and waits for its result.

    This one, of a trial that always runs to its end, ignores the session's messages and never stops it.
    """

    checks_memory = False
    """Whether the driver checks the memory limit after each step, so that the loop must not."""
    telemetry_second = 0
    """Second of the run at which the session's telemetry starts, once connected."""

    @contextmanager
    def connect(self, session: "WorkerSession") -> Iterator[None]:
        """Watch ``session``, whose limit is set, during the block."""
        yield

    def post(self, message: Message) -> None:
        """Receive a message of the session, from its main thread or the one of its telemetry."""

    def should_stop(self) -> bool:
        """Return whether the session must stop after the step that it has just launched."""
        return False

    def should_discard(self) -> bool:
        """Return whether the session must stop within a long step."""
        return False


class SmallerBatchRequired(Exception):
    """Several workers must start again with a smaller micro-batch; ``message`` says why."""

    def __init__(self, message: MicroBatchTooLarge) -> None:
        super().__init__(message.text)
        self.message = message


class WorkerSession:
    """The session of one worker for ``job``.

    Args:
        job: the config to train, and the limits for it.
        folder: the run's folder for checkpoints and cycles; None for a trial, which keeps neither.
        driver: None for every worker of a run but the first.
        callbacks: callbacks of a Python program.
    """

    def __init__(
        self, job: WorkerJob, folder: RunFolder | None, driver: Driver | None, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.job, self.folder, self.driver, self.callbacks = job, folder, driver, callbacks
        self.config = job.config
        """The config with the micro-batch that is tried."""
        self.limit: MemoryLimit | None = None
        """The limit on the memory of this process, once it is set."""
        self.times = StepTimes()
        """The times of the steps so far, with the last micro-batch that was tried."""
        self._data: TrainingData | None = None
        self._val_text: Text | None = None
        """Size of the text of a validation, once it is known."""
        self._trainer: Trainer | None = None
        self._preparing = Activity("loading the data", 0)

    @property
    def activity(self) -> Activity:
        """The work that the session is doing. Any thread may read it."""
        trainer = self._trainer
        if trainer is None:
            return self._preparing
        micro_batches = trainer.config.batch.accumulation
        return Activity(trainer.activity, trainer.state.step, trainer.micro_batch, micro_batches)

    def run(self, resume: Path | None = None, failed_micro_batches: Sequence[int] = ()) -> WorkerResult:
        """Train from the checkpoint ``resume``, with a smaller micro-batch than the ``failed_micro_batches``.

        Raises:
            UserError: this machine, the data or the checkpoint do not suit the config.
            SmallerBatchRequired: several workers must start again.
            OutOfMemory: several workers ran out of memory, and there is no smaller micro-batch to try.
        """
        self.config = self.job.config.with_smaller_micro_batch(failed_micro_batches) or self.job.config
        configure_allocator(self.config.execution.allocator)
        if self.job.memory_limit:
            self.limit = MemoryLimit.apply(self.job.memory_limit, self.config.execution.device)
        else:
            cap_to_free_memory(self.config.execution.device)
        start_step, failed = step_of(resume), [*failed_micro_batches]
        self._preparing = Activity("loading the data", start_step)
        with ExitStack() as stack:
            telemetry = None
            if self.driver:
                stack.enter_context(self.driver.connect(self))
                telemetry = stack.enter_context(Telemetry(self._send_metrics, self.driver.telemetry_second))
            result = self._train(resume)
            while smaller := self._smaller_config(result, start_step):
                failed.append(self.config.batch.micro_batch)
                resume = self._prepare_retry(result.reason, smaller.batch.micro_batch) or resume
                self.config = smaller
                start_step = step_of(resume)  # Read now, because training removes old checkpoints.
                result = self._train(resume)
            result = replace(result, failed_micro_batches=tuple(failed))
            if self._trainer is None and self.config.batch.workers > 1:
                raise OutOfMemory(result)
            if self._trainer and telemetry:
                result = self._completed(self._trainer, result, telemetry, start_step)
        return WorkerResult(result, self._data.summary() if self._data else None)

    def _train(self, resume: Path | None) -> RunResult:
        """Run the loop once. If memory runs out where the loop cannot return, there is a result, but no trainer."""
        folder, driver, config = self.folder, self.driver, self.config
        self._val_text = None
        self._data = self.job.open_data(self._print_line)
        reported = read_progress(resume).last_reported_step if resume else 0
        if folder and driver:
            folder.truncate_after(reported)
            for cycle in folder.cycles_until(reported):
                driver.post(CycleDone(cycle))
        self._preparing = Activity("building the model", reported)
        checkpoints, keep = None, config.checkpoints.keep_checkpoints
        stopping = driver or Driver()
        if folder and keep:
            checkpoints = Checkpoints(folder.checkpoints, keep, folder.copy_of, self._data.tokenizer)
        try:
            self._trainer = Trainer(
                config,
                self._data,
                Callbacks(
                    self._on_cycle,
                    stopping.should_stop,
                    self.callbacks,
                    should_discard=stopping.should_discard,
                    on_line=self._print_line,
                ),
                checkpoints=checkpoints,
                resume=resume,
                limit=None if driver and driver.checks_memory else self.limit,
            )
            self.times = self._trainer.times
            if self._trainer.attention_message:
                self._print_line(self._trainer.attention_message)
            elif self._trainer.attention != config.execution.attention:
                self._print_line(f"attention {self._trainer.attention} (auto)")
            return self._trainer.run()
        except OutOfMemory as failure:
            self._trainer = None
            return failure.result

    def _smaller_config(self, result: RunResult, start_step: int) -> ResolvedConfig | None:
        """Return the config with a smaller micro-batch to try after ``result`` of a run from step ``start_step``; None
        to keep the result."""
        if self.job.retries_smaller_batch and did_not_fit(result, start_step):
            return self.config.with_smaller_micro_batch([self.config.batch.micro_batch])
        return None

    def _prepare_retry(self, reason: str, smaller: int) -> Path | None:
        """Free the memory of a micro-batch that did not fit, and announce the ``smaller`` one.

        Returns the checkpoint that was saved meanwhile, if there is one. Several workers must start again for it.
        """
        size = self.config.batch.micro_batch
        message = MicroBatchTooLarge(size, f"micro-batch {size} did not fit ({reason}); retrying with {smaller}")
        if self.config.batch.workers > 1:
            raise SmallerBatchRequired(message)
        self._post(message)
        self._preparing = Activity("building the model", 0)
        self._trainer = None
        memory.reset_after_oom(self.config.execution)
        return newest(self.folder.checkpoints) if self.folder else None

    def _on_cycle(self, report: CycleReport) -> None:
        """Log a cycle in the run's folder, and tell the driver. Called on the first worker only."""
        cycle = vars(report)
        if self.folder:
            self._describe_first(report)
            cycle = self.folder.append_report(replace(report, val_bits_per_byte=self._bits_per_byte(report)))
        self._post(CycleDone(cycle))

    def _bits_per_byte(self, report: CycleReport) -> float | None:
        """Return the validation loss in bits per byte, which is comparable between vocabularies."""
        data = self._data
        if report.val_loss is None or data is None or data.validation is None or data.tokenizer is None:
            return None
        if self._val_text is None:
            counts = id_counts(data.validation, report.val_windows, self.config.model.vocab_size)
            self._val_text = Text.of(counts, data.tokenizer)
        return bits_per(report.val_loss, self._val_text.tokens, self._val_text.bytes)

    def _describe_first(self, report: CycleReport) -> None:
        """After the first cycle print an implausible loss, if it has one, and on a GPU the memory in use."""
        trainer = self._trainer
        assert trainer is not None, "the trainer reports its cycles while it runs"
        config = trainer.config
        if fault := first_loss_fault(config.model, report.first_loss):
            self._print_line(fault)
        if trainer.device.type == "cuda" and len(trainer.times.reports) == 1:
            line = f"{self._gpu_memory(trainer)}; batch size {config.batch.micro_batch}; cycle {config.duration.cycle}"
            self._print_line(line)

    def _gpu_memory(self, trainer: Trainer) -> str:
        """Format the peak memory of this process and the memory that it may use, as the published study prints it."""
        peak = memory.peak(trainer.device)
        total = self.limit.size if self.limit else peak.capacity or peak.process
        return f"GPU {peak.process / GB:.1f}/{total / GB:.1f} GB ({peak.process / total:.1%})"

    def _completed(self, trainer: Trainer, result: RunResult, telemetry: Telemetry, start_step: int) -> RunResult:
        """Return ``result`` with the machine's telemetry, and for a run with a text that the model generates."""
        joules = energy(telemetry, trainer, result, start_step)
        result = replace(
            result, joules_per_million_tokens=joules, telemetry=trainer.while_training(telemetry),
            encoded_on=dict(trainer.data.encoded_on),
        )  # fmt: skip
        if self.folder is None:
            return result
        if trainer.device.type == "cuda" and len(trainer.times.reports) > 1:
            self._print_line(self._gpu_memory(trainer))
        try:
            return closing_sample(trainer, result)
        except UserError as fault:  # The model may fail in evaluation mode, which must not cost the result.
            self._print_line(str(fault))
            return result

    def _send_metrics(self, second: int, metrics: dict[str, float]) -> None:
        self._post(SystemMetrics(second, metrics))

    def _print_line(self, text: str) -> None:
        self._post(PrintLine(text))

    def _post(self, message: Message) -> None:
        if self.driver:
            self.driver.post(message)


def step_of(checkpoint: Path | None) -> int:
    """Return the step of ``checkpoint``; 0 without one."""
    return read_progress(checkpoint).step if checkpoint else 0


def did_not_fit(result: RunResult, start_step: int) -> bool:
    """Return whether a run from step ``start_step`` needed too much memory in its first steps or before them."""
    failed_step = result.steps - start_step + (result.outcome == "oom")  # An oom is raised before its step counts.
    return result.outcome in ("oom", "over_limit") and failed_step <= FIRST_STEPS


def energy(telemetry: Telemetry, trainer: Trainer, result: RunResult, start_step: int) -> float | None:
    """Return the joules of this worker's GPU per million tokens that it trained on after the first step from
    ``start_step``.

    None without a GPU that reports its power. Ends the telemetry, so that it knows the energy up to now.
    """
    telemetry.stop()
    if result.device == "cpu" or result.first_step_seconds is None:
        return None
    first = trainer.started + result.first_step_seconds
    joules = telemetry.joules(first, first + result.train_seconds - trainer.elapsed_before)
    tokens = (result.steps - start_step - 1) * trainer.config.step_tokens / trainer.config.batch.workers
    return joules / tokens * 1e6 if joules is not None and tokens > 0 else None
