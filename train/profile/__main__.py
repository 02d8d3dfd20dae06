"""Entry: ``python -m train.profile`` shows where a configuration's time and memory go, in numbers and in words.

It runs the real loop in this process, without Ray, and records a few steps after warm-up.
"""

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from infra import command, flags
from infra.console import console
from infra.errors import UserError
from infra.hardware import device_facts
from infra.options import ConfigFile, TrackingUri
from infra.progress import IMPORTING, doing
from infra.storage_dir import StorageDir
from infra.table import Part, Report, listed
from train.checkpoint.run_folder import new_folder
from train.config import TrainConfig, load_config
from train.model_config import short_name
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
    command.run(profile, ProfileOptions, module="train.profile", default=defaults)


def defaults() -> ProfileOptions:
    """The options whose values flags override."""
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
        from train import report, tracking
        from train.data.text import with_vocabulary_of
        from train.profile.memory_timeline import VIEWER
        from train.profile.record import record

    manifest = read_manifest(options.training.data)
    config = resolve(with_vocabulary_of(options.training, manifest), device_facts())
    name = options.name or f"profile-{short_name(options.training.model)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = new_folder(options.out, name, resumable=False, begun=(StorageDir.LOCK,))
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
        tracking.record_start(tracker, config, manifest, options.training)
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
            told = profile_report(found, words)
            tracker.note(told.markdown())
            status = "FINISHED"
        except OSError as failure:
            raise UserError(f"the profile cannot be written to {folder}: {failure.strerror}.") from failure
        finally:
            tracker.finish(status)
    told.show()
    console.print(f"trace (open in ui.perfetto.dev), tables and pictures: {folder}")
    if (folder / "memory.pickle").exists():
        console.print(f"allocations: drop {folder / 'memory.pickle'} on {VIEWER}")
    console.print(ui_link(key), markup=False)


def profile_report(found: "Profile", words: list[str]) -> Report:
    """Time by class, the most expensive kernels, and the findings."""
    title = f"{found.step:.2f} ms per step; forward {found.forward:.2f}, backward {found.backward:.2f}"
    total = sum(found.by_class.values()) or 1.0
    classes = [(kind, f"{spent:.3f}", f"{spent / total:.1%}") for kind, spent in found.by_class.items()]
    classes += [(f"idle: {cause}", f"{spent:.3f}", "") for cause, spent in found.gaps.items()]
    kernels = [(each.name[:70], each.kind, str(each.calls), f"{each.milliseconds:.3f}") for each in found.kernels[:12]]
    return Report(
        [("Attention kernel", found.attention)],
        [
            Part(title, ("class", "ms per step", "share"), classes),
            Part("Most expensive, over the recorded steps", ("kernel", "class", "calls", "ms"), kernels),
            listed(words),
        ],
    )


if __name__ == "__main__":
    main()
