"""Replay all searches for the lowest loss on the recorded grid, and compare what they choose and cost.

    python tests/benchmarks/learning/compare.py --grid RECORD.json [--repeats 20] [--out FILE.json]

This project's search begins at the default settings and at random ones. Of a partial grid, the largest part in which
every cell has every seed is replayed.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import product
from replay import COMPETITORS, Cell, Competitor, Grid, Score, Session, extrapolate, is_goal_met, scores, summary_table

from infra.cli.console import console
from infra.schema import from_json, to_json
from infra.storage.files import write_json
from train.config import TrainConfig

THIS, FROM_ANYWHERE = "this search, from the defaults", "this search, from any cell"
MIN_CELLS = 8
"""Minimum number of cells of a grid that is replayed."""


def default_cell(grid: Grid) -> Cell:
    """Return the cell nearest to the default settings."""
    default = TrainConfig()
    rate, batch = default.optimization.learning_rate, default.batch.global_batch

    def distance(cell: Cell) -> tuple[bool, float]:
        ratios = cell.learning_rate / rate, cell.global_batch / batch
        return cell.optimizer != default.optimization.optimizer, sum(abs(math.log(ratio)) for ratio in ratios)

    return min(grid.cells, key=distance)


def from_defaults(session: Session, draw: random.Random) -> Mapping[int, Cell]:
    """Run this search from the default settings."""
    return product.this_search(session, draw, default_cell(session.grid))


def from_anywhere(session: Session, draw: random.Random) -> Mapping[int, Cell]:
    """Run this search from a random cell."""
    return product.this_search(session, draw, draw.choice(session.grid.cells))


SEARCHES: dict[str, Competitor] = {THIS: from_defaults, FROM_ANYWHERE: from_anywhere, **COMPETITORS}


def main() -> int:
    """Replay all searches for the full run and for three durations, and print the tables."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--grid", type=Path, required=True, help="the recorded grid")
    options.add_argument("--repeats", type=int, default=20, help="repetitions of each search")
    options.add_argument("--out", type=Path, help="write the scores to this JSON file")
    chosen = options.parse_args()
    recorded = from_json(Grid, json.loads(chosen.grid.read_text(encoding="utf-8")), chosen.grid)
    grid = recorded.complete_part()
    if recorded.is_partial:
        console.print(
            f"The grid is partial: {len(recorded.runs)} of {recorded.planned_runs} runs, of which {len(grid.runs)} "
            "are a complete part."
        )
    if not recorded.speeds_provenance:
        console.print("The speeds have not been measured. All cells have the same one.")
    if len(grid.runs) < MIN_CELLS:
        console.print("Too few runs to replay. Record more of the grid.")
        return 0
    last = len(grid.rungs) - 1
    record: dict[str, list[Score]] = {}
    for title, durations in {"the full run": [last], "three durations": [last - 2, last - 1, last]}.items():
        repeats = [(name, repeat) for name in SEARCHES for repeat in range(1 if name == "grid" else chosen.repeats)]
        record[title] = [s for name, n in repeats for s in scores(grid, name, SEARCHES[name], durations, n)]
        console.print(summary_table(title, record[title]))
    is_met = is_goal_met([score for score in record["the full run"] if score.competitor == THIS])
    console.print(f"the goal is {'met' if is_met else 'missed'} by {THIS}")
    from_quarter = {f"{count} seeds": extrapolate(grid, grid.seeds[:count]) for count in sorted({1, len(grid.seeds)})}
    for seeds, result in from_quarter.items():
        console.print(f"extrapolation from a quarter of the time, {seeds}: held {result.held:.0%}, "
                      f"width {result.median_width:.3f}, error {result.median_error:.3f} nats")  # fmt: skip
    if chosen.out:
        write_json(chosen.out, {
            "runs": len(grid.runs), "planned_runs": recorded.planned_runs, "is_goal_met": is_met,
            "scores": {title: [to_json(score) for score in judged] for title, judged in record.items()},
            "extrapolation": {seeds: to_json(result) for seeds, result in from_quarter.items()},
        })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
