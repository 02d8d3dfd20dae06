"""Profiles of two rungs side by side: the time by class of kernel, the memory by part, and both memory timelines."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from infra import charts
from infra.cli.progress import status
from infra.cli.table import Table
from infra.errors import UserError
from infra.storage.files import write_json
from train.estimate.memory import peak_if_known
from train.profile.memory_timeline import CATEGORIES, POINTS, stack_layers
from tune.suite.runs import RungResult

PROFILES = "profiles"
"""Folder of the profiles in the folder of a ladder."""


@dataclass(frozen=True)
class RungProfile:
    """A recorded rung."""

    rung: RungResult
    """The rung with its measurement."""
    profile: dict[str, Any]
    """The fields of its :class:`train.profile.trace.Profile`."""
    timeline: tuple[list[float], list[list[int]]] | None
    """(microseconds, bytes by category after a total at each); None if torch could not draw it."""


def check_profiled_rungs(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ``UserError`` unless all ``names`` are ``known``."""
    for name in names:
        if name not in known:
            raise UserError(f"--profile {name!r} is not a rung of this ladder. Choose from {', '.join(known)}.")


def profile_rungs(
    names: Sequence[str], rungs: Sequence[RungResult], folder: Path, record: Callable[[RungResult, Path], None]
) -> list[RungProfile]:
    """Return the profiles of the rungs with these ``names``.

    Those that are not in ``folder`` yet are recorded by ``record``, which writes the profile of a rung to a folder.
    Raises ``UserError`` for a rung without a speed.
    """
    by_name = {rung.name: rung for rung in rungs}
    profiles = []
    for name in names:
        rung = by_name[name]
        if rung.row is None:
            raise UserError(f"--profile {name!r} was not measured: {rung.reason}. Choose another rung.")
        rung_folder = folder / re.sub(r"\W+", "-", name).strip("-")
        if not (rung_folder / "profile.json").exists():
            record(rung, rung_folder)
        points = rung_folder / POINTS
        timeline = json.loads(points.read_text(encoding="utf-8")) if points.exists() else None
        profile = json.loads((rung_folder / "profile.json").read_text(encoding="utf-8"))
        profiles.append(RungProfile(rung, profile, timeline))
    return profiles


def record_rung(rung: RungResult, folder: Path, *, tracking_uri: str | None) -> None:
    """Record a rung in a fresh process with ``python -m train.profile``, as a run of its own in MLflow."""
    assert rung.config is not None, "a rung with a row has run"
    folder.parent.mkdir(exist_ok=True)
    config = folder.with_suffix(".json")
    write_json(config, rung.config.to_json())
    store = ["--tracking-uri", tracking_uri] if tracking_uri else []
    with status(f"recording the profile of {rung.name}"):
        process = subprocess.run(
            [
                sys.executable, "-P", "-m", "train.profile", "--config", str(config), "--name", folder.name,
                "--out", str(folder.parent), *store,
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        )  # fmt: skip
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(
            f"--profile {rung.name!r} failed: {last_line.rstrip('.')}. Run 'python -m train.profile --config {config}' "
            "to see its output."
        )


def profile_tables(profiles: Sequence[RungProfile]) -> list[Table]:
    """Build the tables of time and memory of two profiles side by side."""
    first, second = profiles
    names = first.rung.name, second.rung.name
    times = [
        (label, *(profile.profile[name] for profile in profiles))
        for label, name in (("step", "step"), ("forward pass", "forward"), ("backward pass", "backward"))
    ]
    classes = dict.fromkeys([*first.profile["by_class"], *second.profile["by_class"]])
    times += [(f"kernels: {kind}", *(p.profile["by_class"].get(kind, 0.0) for p in profiles)) for kind in classes]
    causes = dict.fromkeys([*first.profile["gaps"], *second.profile["gaps"]])
    times += [(f"idle: {cause}", *(p.profile["gaps"].get(cause, 0.0) for p in profiles)) for cause in causes]
    time_rows = [
        (label, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}", f"x{b / a:.2f}" if a else "-") for label, a, b in times
    ]
    tables = [Table("Time of two rungs (ms/step)", ("part", *names, "difference", "ratio"), time_rows)]
    breakdowns = [peak_if_known(profile.rung.config.step) if profile.rung.config else None for profile in profiles]
    memory: list[tuple[str, float, float]] = []
    if all(breakdowns):
        parts = [breakdown.parts() for breakdown in breakdowns if breakdown]
        memory += [(f"predicted {part}", parts[0][part], parts[1][part]) for part in parts[0]]
    peaks = [profile.rung.memory or 0 for profile in profiles]
    memory.append(("measured peak of the process", peaks[0], peaks[1]))
    memory_rows = [
        (label, f"{a / 1e9:.3f}", f"{b / 1e9:.3f}", f"{(b - a) / 1e9:+.3f}") for label, a, b in memory if a or b
    ]
    tables.append(Table("Memory of two rungs (GB)", ("part", *names, "difference"), memory_rows))
    return tables


@charts.styled
def draw_timelines(profiles: Sequence[RungProfile], conditions: str) -> Figure | None:
    """Draw the memory over time of two profiles with equal axes; None if one has no timeline.

    The ``conditions`` are the line below the title.
    """
    timelines = [profile.timeline for profile in profiles if profile.timeline]
    if len(timelines) < len(profiles):
        return None
    title = f"Memory over {profiles[0].profile['steps']} steps: {' and '.join(p.rung.name for p in profiles)}"
    highest = max(sum(row[1:]) for _, sizes in timelines for row in sizes)
    longest = max(max(times) - min(times) for times, _ in timelines) / 1e3
    figure, panels = charts.new_figure(title, conditions, height=6.0, nrows=len(profiles), sharex=True, sharey=True)
    for axes, profile, (times, sizes) in zip(panels, profiles, timelines, strict=True):
        layers = [[row[number] for row in sizes] for number in range(1, len(CATEGORIES) + 1)]
        stack_layers(axes, times, layers, highest)
        axes.annotate(profile.rung.name, (1, 1.01), xycoords="axes fraction", ha="right", va="bottom", weight="bold")
    panels[0].set_xlim(0, longest)
    panels[-1].set_xlabel("time (ms)")
    charts.add_legend(panels[0])
    return figure
