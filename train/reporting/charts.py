"""The chart of a finished run, ``curves.png``: losses and speed against training tokens."""

from infra.storage.files import atomic_file
from train.run_files.run_folder import RunFolder


def draw_curves(run_folder: RunFolder, title: str, steps: int) -> None:
    """Draw the cycles of the run's first ``steps`` steps to its folder, if there are at least two cycles."""
    cycles = list(run_folder.cycles_until(steps))
    if len(cycles) < 2:
        return
    from matplotlib.figure import Figure  # The import takes half a second, and commands must not wait for it.

    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, speed = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for name, key in (("training", "train_loss"), ("validation", "val_loss")):
        with_loss = [cycle for cycle in cycles if cycle[key] is not None]
        points = [cycle["train_tokens"] for cycle in with_loss], [cycle[key] for cycle in with_loss]
        losses.plot(*points, ".-", linewidth=1, label=name)
    losses.set_title(title, loc="left", fontsize=10)
    losses.set_ylabel("loss (nats/token)")
    losses.legend(frameon=False)
    speeds = [cycle["cycle_tokens"] / cycle["cycle_seconds"] for cycle in cycles]
    speed.plot([cycle["train_tokens"] for cycle in cycles], speeds, ".-", color="#4477aa", linewidth=1)
    speed.set(xlabel="training tokens", ylabel="speed (tokens/s)", ylim=(0, 1.1 * max(speeds)))
    for axes in (losses, speed):
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(run_folder.curves) as file:
        figure.savefig(file, format="png", dpi=130)
