"""Entry: ``python -m train.profile`` shows the time and memory of a configuration's kernels.

It runs the training loop in this process, without Ray, and records a few steps after warm-up.
"""

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from infra.cli import command, flags
from infra.cli.console import console
from infra.cli.options import ConfigFile, TrackingUri
from infra.cli.progress import IMPORTING_ACTIVITY, status
from infra.cli.table import Report, Table, bullet_list
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from train.config import TrainConfig, load_config
from train.model_config import short_name
from train.resolved import resolve_local
from train.run_files.run_folder import new_directory

if TYPE_CHECKING:
    from train.profile.trace import Profile

MAX_TRACE_BYTES = 2 * 10**9
"""Disk space that a trace may need: two steps of GPT-2 have about 100 MB of JSON, and many times more with stacks."""


@dataclass(frozen=True)
class ProfileOptions:
    """Record a few training steps, and show the time and memory of their kernels."""

    main_flags: ClassVar[tuple[str, ...]] = (
        "data", "model", "global_batch", "micro_batch", "precision", "attention", "compile", "device", "name", "out",
    )  # fmt: skip
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {"output": ("config", "tracking_uri")}

    training: TrainConfig = field(default_factory=TrainConfig)
    name: str | None = None
    """Name of the profile and of its folder. By default "profile-" with the model and the time."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Local folder that contains runs."""
    config: ConfigFile = None
    tracking_uri: TrackingUri = None


def main() -> None:
    command.run(profile, ProfileOptions, module="train.profile", default=defaults)


def defaults() -> ProfileOptions:
    """Return the options that flags override: the defaults, with the settings of ``--config``."""
    path = flags.parse_only(ProfileOptions, "config").config
    return ProfileOptions(training=load_config(path) if path else TrainConfig())


def profile(options: ProfileOptions) -> None:
    """Profile a configuration.

    torch and MLflow are imported after the flags are checked, so that invalid flags are reported at once.
    """
    if options.training.dataset.stream:
        raise UserError(
            f"--stream {' '.join(options.training.dataset.stream)} is not supported by train.profile. Create token "
            "shards with 'python -m pipeline.tokenize', and use --data."
        )
    with status(IMPORTING_ACTIVITY):
        from infra.device import provenance
        from infra.tracking.store import create_run, open_store
        from infra.tracking.tracker import Tracker
        from infra.tracking.views import ui_link
        from pipeline.shards import read_manifest
        from train.profile.memory_timeline import VIEWER
        from train.profile.record import record
        from train.reporting import report, tracking

    manifest = read_manifest(options.training.dataset.data)
    config = resolve_local(options.training, manifest)
    name = options.name or f"profile-{short_name(options.training.model)}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = new_directory(options.out, name, resumable_with=None, allowed_leftovers=(StorageDir.LOCK_FILE,))
    folder = Workspace.of(run_dir).path
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise UserError(f"Cannot create --out {options.out}: {failure.strerror}. Choose another folder.") from failure
    free = shutil.disk_usage(folder.parent).free
    if free < MAX_TRACE_BYTES:
        raise UserError(
            f"--out {options.out} has only {free / 1e9:.1f} GB free, but a trace may need {MAX_TRACE_BYTES / 1e9:g} "
            "GB. Free disk space, or choose another folder."
        )
    tags = provenance.collect_tags() | {"kind": "profile"}
    open_store(options.tracking_uri)
    # The header comes first, because compilation can take a minute before any other output.
    report.print_header(config, manifest, run_dir)
    with ExitStack() as stack:
        stack.enter_context(run_dir.lock(f"Another command is writing to {run_dir}. Choose another --name."))
        run_ref = create_run("train", name, tracking_uri=options.tracking_uri, run_dir=run_dir.address, tags=tags)
        tracker = stack.enter_context(Tracker(run_ref))
        start = tracking.RunStart(config.to_json(), manifest.fingerprint, manifest.splits)
        tracking.log_start(tracker, config, start)
        run_status = "FAILED"
        try:
            with status("recording steps" + " after compiling" * (config.execution.compile != "off")):
                result, sentences = record(config, folder)
            tracker.log_metrics(
                {f"profile/{kind.replace(' ', '_')}_ms": total for kind, total in result.by_class.items()}
                | {"profile/step_ms": result.step, "profile/idle_ms": result.idle, "profile/loader_ms": result.loader}
            )
            for path in sorted(folder.glob("[!.]*")):
                tracker.log_file(path)
            summary = profile_report(result, sentences)
            tracker.set_description(summary.markdown())
            run_status = "FINISHED"
        except OSError as failure:
            raise UserError(
                f"Cannot write the profile to {folder}: {failure.strerror}. Free disk space, or choose another --out."
            ) from failure
        finally:
            tracker.finish(run_status)
    summary.show()
    console.print(f"trace (open in ui.perfetto.dev), tables and charts: {folder}", markup=False)
    if (folder / "memory.pickle").exists():
        console.print(f"allocations: open {folder / 'memory.pickle'} in {VIEWER}", markup=False)
    console.print(ui_link(run_ref), markup=False)


def profile_report(result: "Profile", sentences: list[str]) -> Report:
    """Build the report of a profile: time by class, the most expensive kernels, and the findings."""
    title = f"Step time {result.step:.2f} ms: forward {result.forward:.2f} ms, backward {result.backward:.2f} ms"
    total = sum(result.by_class.values()) or 1.0
    classes = [(kind, f"{time:.3f}", f"{time / total:.1%}") for kind, time in result.by_class.items()]
    classes += [(f"idle: {cause}", f"{time:.3f}", "") for cause, time in result.gaps.items()]
    kernels = [
        (kernel.name[:70], kernel.kind, str(kernel.calls), f"{kernel.milliseconds:.3f}")
        for kernel in result.kernels[:12]
    ]
    return Report(
        [("Attention kernel", result.attention)],
        [
            Table(title, ("class of kernel", "ms/step", "% of kernel time"), classes),
            Table(
                f"Most expensive kernels over {result.steps} steps", ("kernel", "class", "calls", "total (ms)"), kernels
            ),
            bullet_list(sentences),
        ],
    )


if __name__ == "__main__":
    main()
