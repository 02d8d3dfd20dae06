"""The chart of a finished run, ``curves.png``: losses and speed against training tokens."""

from infra.storage.files import atomic_file
from infra.tracking.tracker import Tracker
from train.model_config import AnyModel, format_model
from train.result import RunResult
from train.run_files.run_folder import RunFolder


def record_curves(tracker: Tracker, model: AnyModel, result: RunResult, run_folder: RunFolder) -> None:
    """Draw the cycles of the run in its folder and record the chart, if there are at least two cycles."""
    cycles = list(run_folder.cycles_until(result.steps))
    if len(cycles) < 2:
        return
    from matplotlib.figure import Figure  # Importing it takes half a second, for which training must not wait.

    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, speed = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for name, run_ref in (("training", "train_loss"), ("validation", "val_loss")):
        with_loss = [cycle for cycle in cycles if cycle[run_ref] is not None]
        points = [cycle["train_tokens"] for cycle in with_loss], [cycle[run_ref] for cycle in with_loss]
        losses.plot(*points, ".-", linewidth=1, label=name)
    losses.set_title(f"{format_model(model)}; {result.device}", loc="left", fontsize=10)
    losses.set_ylabel("loss (nats/token)")
    losses.legend(frameon=False)
    speeds = [cycle["cycle_tokens"] / cycle["seconds"] for cycle in cycles]
    speed.plot([cycle["train_tokens"] for cycle in cycles], speeds, ".-", color="#4477aa", linewidth=1)
    speed.set(xlabel="training tokens", ylabel="speed (tokens/s)", ylim=(0, 1.1 * max(speeds)))
    for axes in (losses, speed):
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(run_folder.curves) as file:
        figure.savefig(file, format="png", dpi=130)
    run_folder.push(run_folder.curves)
    tracker.log_file(run_folder.curves)
