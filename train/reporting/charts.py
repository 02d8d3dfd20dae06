"""The chart of a finished run, ``curves.png``: losses and speed against training tokens."""

from collections.abc import Sequence

from infra import charts
from infra.storage.files import atomic_file
from train.run_files.run_folder import RunFolder


@charts.styled
def draw_curves(
    run_folder: RunFolder,
    title: str,
    conditions: str,
    steps: int,
    *,
    step_tokens: int,
    unreported_losses: Sequence[float] = (),
) -> None:
    """Draw the run's first ``steps`` steps and their cycles to its folder, if there are at least two steps.

    The ``conditions`` are the line below the ``title``, as :func:`infra.charts.describe_conditions` formats them. A run
    that was interrupted has ``unreported_losses`` of the steps after its last cycle, or of all if it has no cycle.
    """
    cycles = list(run_folder.cycles_until(steps))
    step_losses = [*(loss for cycle in cycles for loss in cycle["step_losses"]), *unreported_losses]
    if len(step_losses) < 2:
        return
    last_step = (cycles[-1]["step"] if cycles else steps - len(unreported_losses)) + len(unreported_losses)
    first_step = last_step - len(step_losses)
    divisor, unit = charts.scale_of(step_tokens * last_step)
    tokens_per_step = step_tokens / divisor
    panels = {"height": 5.2, "nrows": 2, "sharex": True, "height_ratios": (2, 1)} if cycles else {"height": 4.0}
    figure, (losses, *speeds) = charts.new_figure(title, conditions, **panels)
    step_ends = [tokens_per_step * step for step in range(first_step + 1, last_step + 1)]
    losses.plot(step_ends, step_losses, color=charts.SKY, linewidth=0.8, label="training steps")
    losses.set_ylabel("loss (nats/token)")
    bottom = [losses, *speeds][-1]
    bottom.set_xlabel(f"training tokens{unit}")
    if cycles:
        starts = [cycle["step"] - len(cycle["step_losses"]) for cycle in cycles]
        middles = [
            tokens_per_step * (start + 1 + cycle["step"]) / 2 for start, cycle in zip(starts, cycles, strict=True)
        ]
        means = [cycle["train_loss"] for cycle in cycles]
        losses.plot(middles, means, "o-", color=charts.BLUE, markersize=4, label="mean of each cycle")
        cycle_ends = [tokens_per_step * cycle["step"] for cycle in cycles]
        validated = [(end, cycle["val_loss"]) for end, cycle in zip(cycle_ends, cycles, strict=True)]
        if points := [(end, loss) for end, loss in validated if loss is not None]:
            losses.plot(*zip(*points, strict=True), "s-", color=charts.ORANGE, markersize=4, label="validation")
        values = [cycle["cycle_tokens"] / cycle["cycle_seconds"] for cycle in cycles]
        edges = [tokens_per_step * starts[0], *cycle_ends]
        bottom.stairs(values, edges, baseline=None, color=charts.GREEN, linewidth=1.6)
        bottom.set(ylabel="tokens/s", ylim=(0, 1.15 * max(values)))
    charts.add_legend(losses)
    charts.format_thousands(*([bottom.xaxis, bottom.yaxis] if cycles else [bottom.xaxis]))
    with atomic_file(run_folder.curves) as file:
        charts.save(figure, file)
