"""A search from its config to its files: plan, run, and say what was found."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from infra.cluster import connected
from infra.command import INTERRUPTED
from infra.console import console
from infra.progress import doing
from infra.tracking.store import open_store
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from infra.units import format_size
from train.checkpoint.run_folder import resume_command
from train.model_config import format_model
from tune import folder as folders
from tune import report
from tune.config import SearchConfig
from tune.device import trial_nodes
from tune.plan import Search, make_search
from tune.ray_tune import Listener, Proposals, drive
from tune.strategy.nodes import comparable
from tune.strategy.ranking import rank
from tune.tracking import Evidence, open_parent, publish
from tune.trial.row import TrialRow, read_rows
from tune.trial.run import Request


def search(config: SearchConfig) -> int:
    """Run the command; returns its exit code. Raises ``UserError``."""
    with connected(config.address) if config.cluster else nullcontext():
        planned = make_search(config)
        if config.cluster:
            planned.resources()  # of a cluster without any, before anything is made
        limit = format_size(planned.limit) if config.memory_limit else f"{planned.limit / 1e9:.1f} GB (all there is)"
        console.print(
            f"[bold]{format_model(config.training.model)}[/bold]: {len(planned.space.candidates())} candidates for "
            f"{planned.space.batch_label}, limit {limit} per process, on {planned.device}{_where(planned)}"
        )
        if config.dry_run:
            report.print_plan(planned)
            return 0
        open_store(config.tracking_uri)  # one that cannot be used is refused before anything is made
        with folders.locked(planned.place) as copy:
            return Session(replace(planned, copy=copy)).run()


def _where(planned: Search) -> str:
    """`` of w1, w2``: the machines of a cluster on which trials may run."""
    return f" of {', '.join(machine.name for machine in planned.machines)}" if planned.config.cluster else ""


@dataclass(frozen=True)
class Session:
    """A search that is run, in its folder, which this process has locked."""

    search: Search

    def run(self) -> int:
        """Run trials until the strategy has no more, and publish what was found; returns the exit code."""
        search = self.search
        kept = read_rows(search.trials)  # damaged ones are refused before MLflow hears of the search
        resumed = search.config.resume
        parent = folders.resumed_parent(search.place, search.identity()) if resumed else open_parent(search)
        evidence = Evidence(search, parent)
        with Tracker(parent) as tracker:
            evidence.describe(tracker)
            try:
                evidence.catch_up(kept)
                self._drive(evidence)
                rows = read_rows(search.trials)
                evidence.catch_up(rows)
            finally:
                evidence.close()
            if search.strategy.propose(comparable(rows)) is not None:
                console.print(f"stopped; continue with: {resume_command('tune.search', search.place)}", markup=False)
                tracker.status = "KILLED"
                return INTERRUPTED
            publish(search, rows, tracker)
            won = bool(rank(comparable(rows)))
            tracker.status = "FINISHED" if won else "FAILED"
        report.print_end(search, rows)
        console.print(ui_link(parent, children=True), markup=False)
        return 0 if won else 1

    def _drive(self, evidence: Evidence) -> None:
        """Run trials until the strategy has no more, or until Ctrl-C: Tune takes it between two of its events."""
        search = self.search

        def started(request: Request) -> None:
            evidence.start(request)
            candidate = search.space.name(request.proposal.candidate)
            running[request.key] = f"trial {request.number}, {request.proposal.stage}: {candidate}"
            shown.now("; ".join(running.values()))

        def ended(row: TrialRow, rows: Sequence[TrialRow]) -> None:
            running.pop(row.key, None)
            shown.now("; ".join(running.values()) or "deciding on the next trial")
            evidence.catch_up(rows)
            console.print(report.row_text(search, row), markup=False)
            console.print(report.progress_text(search, rows), markup=False)

        running: dict[str, str] = {}
        # Where Ctrl-C falls elsewhere, the rows say as well where to continue.
        with suppress(KeyboardInterrupt), connected(search.config.address):
            resources = search.resources()
            with doing("starting trials") as shown:
                drive(Proposals(search, Listener(started, ended), partial(trial_nodes, resources)), resources)
