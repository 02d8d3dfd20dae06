"""The chart of a finished run, ``curves.png``: losses and speed against training tokens."""

from infra import charts
from infra.storage.files import atomic_file
from train.run_files.run_folder import RunFolder


@charts.styled
def draw_curves(run_folder: RunFolder, title: str, conditions: str, steps: int) -> None:
    """Draw the run's first ``steps`` steps and their cycles to its folder, if there are at least two steps.

    The ``conditions`` are the line below the ``title``, as :func:`infra.charts.describe_conditions` formats them.
    """
    cycles = list(run_folder.cycles_until(steps))
    if not cycles or cycles[-1]["step"] < 2:
        return
    divisor, unit = charts.scale_of(cycles[-1]["train_tokens"])
    tokens_per_step = cycles[-1]["train_tokens"] / cycles[-1]["step"] / divisor
    starts = [cycle["step"] - len(cycle["step_losses"]) for cycle in cycles]
    figure, (losses, speed) = charts.new_figure(
        title, conditions, height=5.2, nrows=2, sharex=True, height_ratios=(2, 1)
    )
    step_losses = [loss for cycle in cycles for loss in cycle["step_losses"]]
    step_ends = [tokens_per_step * (starts[0] + number) for number in range(1, len(step_losses) + 1)]
    losses.plot(step_ends, step_losses, color=charts.SKY, linewidth=0.8, label="training steps")
    middles = [tokens_per_step * (start + 1 + cycle["step"]) / 2 for start, cycle in zip(starts, cycles, strict=True)]
    means = [cycle["train_loss"] for cycle in cycles]
    losses.plot(middles, means, "o-", color=charts.BLUE, markersize=4, label="mean of each cycle")
    cycle_ends = [tokens_per_step * cycle["step"] for cycle in cycles]
    validations = [cycle["val_loss"] for cycle in cycles]
    if any(loss is not None for loss in validations):
        values = [float("nan") if loss is None else loss for loss in validations]
        losses.plot(cycle_ends, values, "s-", color=charts.ORANGE, markersize=4, label="validation")
    losses.set_ylabel("loss (nats/token)")
    charts.add_legend(losses)
    speeds = [cycle["cycle_tokens"] / cycle["cycle_seconds"] for cycle in cycles]
    speed.stairs(speeds, [tokens_per_step * starts[0], *cycle_ends], baseline=None, color=charts.GREEN, linewidth=1.6)
    speed.set(xlabel=f"training tokens{unit}", ylabel="tokens/s", ylim=(0, 1.15 * max(speeds)))
    charts.format_thousands(speed.xaxis, speed.yaxis)
    with atomic_file(run_folder.curves) as file:
        charts.save(figure, file)
