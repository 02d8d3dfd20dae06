"""Entry: ``python -m train.profile`` shows where a configuration's time and memory go, in numbers and in words.

In: the flags of ``train.run``. Out: ``runs/NAME/`` with a Chrome/Perfetto trace, the kernel table, a
memory timeline as PNG (on a GPU also the allocator's snapshot for torch's viewer), and findings; all of it in MLflow.
It runs the real loop in this process, without Ray, and records a few steps after warm-up.
"""

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from infra import command, flags
from infra.console import console
from infra.errors import UserError
from infra.hardware import device_facts
from infra.options import ConfigFile, TrackingUri
from infra.progress import IMPORTING, doing
from infra.storage_dir import StorageDir
from train.checkpoint.run_folder import new_folder
from train.config import TrainConfig, load_config
from train.model_config import format_model
from train.resolve import resolve

if TYPE_CHECKING:
    from train.profile.trace import Profile

TRACE_ROOM = 2 * 10**9
"""Free bytes that a trace may need: two steps of GPT-2 are about 100 MB of JSON, and many times that with stacks."""


@dataclass(frozen=True)
class ProfileOptions:
    """Record a few training steps and show where time and memory go."""

    training: TrainConfig = field(default_factory=TrainConfig)
    name: str | None = None
    """Name of the profile and of its folder; by default made from the model and the time."""
    out: Path = Path("runs")
    """Folder that holds runs."""
    config: ConfigFile = None
    tracking_uri: TrackingUri = None


def main() -> None:
    """Parse, profile, print, exit."""
    command.run(profile, ProfileOptions, module="train.profile", default=defaults)


def defaults() -> ProfileOptions:
    """The options whose values flags override. Raises ``UserError``."""
    path = flags.given(ProfileOptions, "config").config
    return ProfileOptions(training=load_config(path) if path else TrainConfig())


def profile(options: ProfileOptions) -> None:
    """Profile a configuration from its options; torch and MLflow are imported once the flags are known to be valid."""
    if options.training.stream:
        raise UserError(
            f"--stream {' '.join(options.training.stream)} is not profiled: make token shards with 'python -m "
            "pipeline.tokenize' and give them with --data."
        )
    with doing(IMPORTING):
        from infra import provenance
        from infra.tracking.store import create_run, open_store
        from infra.tracking.tracker import Tracker
        from infra.tracking.views import ui_link
        from pipeline.shards import read_manifest
        from train import report
        from train.data.text import with_vocabulary_of
        from train.profile.memory_timeline import VIEWER
        from train.profile.record import record

    manifest = read_manifest(options.training.data)
    config = resolve(with_vocabulary_of(options.training, manifest), device_facts())
    preset = format_model(options.training.model).partition(",")[0]
    name = options.name or f"profile-{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = new_folder(options.out, name, resumable=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise UserError(f"--out {options.out} cannot be created ({refused.strerror}): name another.") from refused
    free = shutil.disk_usage(folder.parent).free
    if free < TRACE_ROOM:
        raise UserError(f"{options.out} has {free / 1e9:.1f} GB free and a trace may need {TRACE_ROOM / 1e9:g} GB.")
    tags = provenance.collect() | {"kind": "profile"}
    open_store(options.tracking_uri)
    place = StorageDir.of(folder)
    # Compiling can take a minute before there is more output.
    report.print_header(config, options.training, manifest, place)
    with ExitStack() as stack:
        stack.enter_context(place.locked(f"another command writes to {place}: give another --name."))
        key = create_run("train", name, tracking_uri=options.tracking_uri, home=place.address, tags=tags)
        tracker = stack.enter_context(Tracker(key))
        report.record_start(tracker, config, manifest, options.training)
        status = "FAILED"
        try:
            with doing("recording steps" + " after compiling" * (config.compile != "off")):
                found, words = record(config, folder)
            tracker.metrics(
                {f"profile/{kind.replace(' ', '_')}_ms": spent for kind, spent in found.by_class.items()}
                | {"profile/step_ms": found.step, "profile/idle_ms": found.idle, "profile/loader_ms": found.loader}
            )
            for path in sorted(folder.glob("[!.]*")):
                tracker.file(path)
            tracker.note("\n".join(f"- {line}" for line in words))
            status = "FINISHED"
        except OSError as failure:
            raise UserError(f"the profile cannot be written to {folder}: {failure.strerror}.") from failure
        finally:
            tracker.finish(status)
    show(found, words)
    console.print(f"trace (open in ui.perfetto.dev), tables and pictures: {folder}")
    if (folder / "memory.pickle").exists():
        console.print(f"allocations: drop {folder / 'memory.pickle'} on {VIEWER}")
    console.print(ui_link(key), markup=False)


def show(found: "Profile", words: list[str]) -> None:
    """Print time by class, the most expensive kernels, and the findings."""
    looks: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "title_justify": "left"}
    title = f"{found.step:.2f} ms per step; forward {found.forward:.2f}, backward {found.backward:.2f}"
    classes = Table("class", "ms per step", "share", title=title, **looks)
    total = sum(found.by_class.values()) or 1.0
    for kind, spent in found.by_class.items():
        classes.add_row(kind, f"{spent:.3f}", f"{spent / total:.1%}")
    for cause, spent in found.gaps.items():
        classes.add_row(f"idle: {cause}", f"{spent:.3f}", "")
    console.print(classes)
    kernels = Table("kernel", "class", "calls", "ms", title="Most expensive, over the recorded steps", **looks)
    for kernel in found.kernels[:12]:
        kernels.add_row(kernel.name[:70], kernel.kind, str(kernel.calls), f"{kernel.milliseconds:.3f}")
    console.print(kernels)
    console.print(f"attention kernel: {found.attention}")
    for line in words:
        console.print(f"- {line}")


if __name__ == "__main__":
    main()
