"""Everything that only a GPU can show, in steps that fit a bare machine lent by the quarter hour.

    python tests/benchmarks/gpu/campaign.py prepare     # at home: what to bring along, in campaign/bring
    python tests/benchmarks/gpu/campaign.py schedule    # at home: the steps in their order, with expected times
    python tests/benchmarks/gpu/campaign.py run --bring campaign/bring --out "$OUT" --minutes 9    # on the machine
    python tests/benchmarks/gpu/campaign.py summary     # at home: what the rows show
    python tests/benchmarks/gpu/campaign.py record      # at home: all rows and the GPU's report, as records

In: ``--bring``, a folder with packages, token shards and, from the second call on, the archive of the calls before.
Out: in ``--out`` the rows, a summary, the GPU's report, and one archive in parts that are small enough to take home.
Every step is a process of its own with a limit of time, and leaves one row, which is written when the step ends: a
step that fails or takes too long costs nothing else. The first is the five-minute test, ``infra.doctor --gpu``, and the
second the tests for a GPU; where one fails, the campaign ends, because what follows would mean nothing. The other steps
are in the order of their worth, so that a call may end anywhere: first the automatic settings and nanoGPT's model in
turns. Sizes follow the GPU's memory, and the global batch its speed. ``run`` ends within ``--minutes``, and goes on
where it ended when it is called again.

``run --rehearsal`` runs every step with a small model and few steps, also on the simulated GPU; its rows say so, and it
has folders of its own. This file needs nothing but Python, so that it runs before the packages are unpacked. Only the
last steps need Ray and MLflow: they wait for a machine to which ``prepare --site`` brought an archive with both.
"""

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from archive import REPOSITORY, ROWS, VERDICT, copy_results, pack, prepare, read_rows, restore
from card import FULL, REHEARSAL, Card, Extent, Row, Step
from pretended import PRETENDED_SIDES, pretend
from processes import Processes
from schedule import best, gate_failure, is_done, next_step, plan
from verdict import describe, record, summary

PACK_SECONDS = 15.0
"""Time that the archive takes at the end of a call."""

UNREAL = ("tokens_per_second", "step_seconds", "losses", "matmul", "model_matmul")
"""What a step on a simulated GPU has found without computing anything."""

Execute = Callable[[Step, float, Card], Row]
"""Run a step for at most so many seconds on a card: its outcome and what it measured."""


def print_now(line: str) -> None:
    """Print a line that is seen also when the process is killed."""
    print(line, flush=True)


@dataclass
class Campaign:
    """The rows so far in ``folder``, and where the archive of all of it goes."""

    folder: Path
    out: Path
    execute: Execute
    sides: tuple[str, ...] = ("ours", "nanogpt", "huggingface")
    extent: Extent = FULL
    ray: bool = False
    despite_failures: bool = False
    """Whether to measure on a GPU that has not passed the tests; the summary says so."""
    room: int = 32 * 2**20
    """Bytes that the archive may take of what can be brought along."""
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = print_now

    @property
    def rows(self) -> list[Row]:
        """Those of all calls, oldest first; one that a machine's end has cut in two is none."""
        return read_rows(self.folder)

    @property
    def planned(self) -> list[Row]:
        """The rows as the plan sees them."""
        rows = self.rows
        return (
            [row | {"outcome": "finished"} if row["step"] == "tests" else row for row in rows]
            if (self.despite_failures)
            else rows
        )

    def work(self, seconds: float) -> bool:
        """Do one step after the other until none is left, which is True, or none fits into ``seconds``."""
        until = self.clock() + seconds - PACK_SECONDS
        try:
            while True:
                left = until - self.clock()
                step = next_step(self.planned, self.sides, self.extent, ray=self.ray, seconds=left)
                if step is None:
                    return is_done(self.planned, self.sides, self.extent, ray=self.ray)
                self._do(step, left)
        finally:  # also after Ctrl-C
            self._pack()

    @property
    def missing(self) -> list[str]:
        """The steps that have not run, as far as the rows tell which there are."""
        rows = self.planned
        names = {row["step"] for row in rows}
        return [step.name for step in plan(rows, self.sides, self.extent) if step.name not in names]

    def _do(self, step: Step, left: float) -> None:
        """Run ``step`` and keep its row, however it ends."""
        began = self.clock()
        self.say(f"{step.name} ...")
        card = Card.of(self.rows)
        try:
            result = self.execute(step, min(step.limit, left) - step.grace, card)
        except Exception as failure:  # noqa: BLE001 whatever a step leaves must not end the campaign
            result = {"outcome": "failed", "reason": f"{type(failure).__name__}: {failure}"}
        if card.is_simulated:
            result = {name: value for name, value in result.items() if name not in UNREAL}
        row: Row = {"step": step.name, "kind": step.kind, "settings": step.settings, "group": step.group,
                    "rehearsal": self.extent.is_rehearsal, "seconds": round(self.clock() - began, 1)}  # fmt: skip
        self.keep(result | row)  # whatever a step calls what it found: its name tells that it is done
        if step.needs_ray:  # What it left, to continue it on another machine.
            self._pack()

    def keep(self, row: Row) -> None:
        """Add a row, and bring summary and results up to date."""
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows = self.rows
        runs = self.folder / "runs"
        if row["kind"] == "ceilings" and row.get("matmul"):  # where ladders look for it
            runs.mkdir(exist_ok=True)
            (runs / "doctor.json").write_text(json.dumps(row), encoding="utf-8")
        # The commands start from the best trainer; on a simulated GPU none has a speed, and the first is taken.
        finished = [row for row in rows if row["kind"] == "train" and row["outcome"] == "finished"]
        if chosen := best(rows) or next(iter(finished), None):
            (self.folder / "best.json").write_text(json.dumps(chosen["config"]), encoding="utf-8")
        self.say(f"  {row['seconds']:.0f} s: {describe(row)}")
        (self.folder / VERDICT).write_text("\n".join(summary(rows)) + "\n", encoding="utf-8")
        try:
            copy_results(self.folder, self.out)
        except OSError as failure:
            self.say(f"The results could not be copied to {self.out}: {failure}")

    def _pack(self) -> None:
        try:
            pack(self.folder, self.out, self.room)
        except OSError as failure:
            self.say(f"The archive could not be written to {self.out}: {failure}")


def schedule(machines: int = 12, minutes: float = 28) -> list[list[Row]]:
    """The rows that each machine of a pretended campaign leaves; its archive really is packed and unpacked."""
    now = [0.0]
    calls: list[list[Row]] = []
    with tempfile.TemporaryDirectory() as scratch:
        bring = Path(scratch, "bring")
        bring.mkdir()
        for number in range(machines):
            folder = Path(scratch, f"machine-{number}")
            restore(bring, folder)
            campaign = Campaign(
                folder, bring, partial(pretend, now, folder), PRETENDED_SIDES, ray=number > 0,
                clock=lambda: now[0], say=lambda line: None,
            )  # fmt: skip
            earlier = len(campaign.rows)
            is_finished = campaign.work(60 * minutes)
            calls.append(campaign.rows[earlier:])
            shutil.rmtree(folder)
            if is_finished and campaign.ray:
                break
    return calls


def sources(llm_c: Path | None, build_nanogpt: Path | None) -> dict[str, Path]:
    """The files of the peers whose checkouts are given, by their names in the folder of peers."""
    files = {}
    if llm_c:
        files["llm.c"] = llm_c
    if build_nanogpt:
        files["build-nanogpt/train_gpt2.py"] = build_nanogpt / "train_gpt2.py"
    return files


def run(options: argparse.Namespace) -> int:
    """Run steps until the time is over or none is left, print the summary, and return the exit code."""
    folder: Path = options.folder.resolve()
    restore(options.bring, folder)
    if not (folder / "tokens" / "manifest.json").exists():
        sys.exit(
            f"{folder / 'tokens'} has no token shards. Bring them with 'prepare', or run "
            f"'python -m pipeline.tokenize --out {folder / 'tokens'}'."
        )
    other = [row for row in read_rows(folder) if bool(row.get("rehearsal")) is not options.rehearsal]
    if other:
        kind = "a campaign" if options.rehearsal else "a rehearsal"
        sys.exit(f"{folder} has rows of {kind}. Use another --folder.")
    for name, source in sources(options.llm_c, options.build_nanogpt).items():
        (folder / "peers" / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, folder / "peers" / name, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder / "peers" / name)
    brought = [side for side in ("build-nanogpt", "llm.c") if (folder / "peers" / side).exists()]
    if "llm.c" in brought and not shutil.which("nvcc"):
        print("llm.c is left out: NVIDIA's compiler, nvcc, is missing.")
        brought.remove("llm.c")
    extent = REHEARSAL if options.rehearsal else FULL
    changes = {"model": options.model, "global_batch": options.global_batch}
    extent = replace(extent, **{name: value for name, value in changes.items() if value is not None})
    processes = Processes(folder, extent, options.memory_limit)

    def execute(step: Step, seconds: float, card: Card) -> Row:
        return processes.run(step, seconds, extent.global_batch or card.global_batch, card.memory)

    ray = (folder / "site" / "ray").exists() or importlib.util.find_spec("ray") is not None
    campaign = Campaign(
        folder, options.out.resolve(), execute, ("ours", "nanogpt", *brought, "huggingface"), extent, ray,
        options.despite_failed_tests, int(options.archive_mib * 2**20),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        is_finished = campaign.work(60 * options.minutes)
    except KeyboardInterrupt:
        print("Interrupted: the step that was running will run again.")
        is_finished = False
    rows = campaign.rows
    print("\n" + "\n".join(summary(rows, campaign.missing)) if rows else "There was no time for a step.")
    print(f"\nResults in {options.out}: {ROWS} and {VERDICT}")
    if gate_failure(campaign.planned):
        print("The campaign ends here, because speeds of a GPU that does not pass mean nothing.")
        return 1
    if is_finished and not ray:
        print("The other steps need Ray and MLflow: bring an archive of packages with both, by prepare --site.")
    elif not is_finished:
        print("Not finished: run the same command again.")
    return int(not is_finished)


def parse_options() -> argparse.Namespace:
    """The options, with the folders that they leave open."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["prepare", "schedule", "run", "summary", "record"])
    parser.add_argument("--rehearsal", action="store_true", help="run every step with a small model and few steps")
    parser.add_argument("--folder", type=Path, help="work folder (default: campaign, or campaign/rehearsal)")
    parser.add_argument("--bring", type=Path, help="what was brought along (default: bring in --folder)")
    parser.add_argument("--out", type=Path, help="where the results go (default: --bring)")
    parser.add_argument("--minutes", type=float, default=9.5, help="of a call of run, in which it ends")
    parser.add_argument("--model", help="model to train (default: gpt2-124m)")
    parser.add_argument("--global-batch", type=int, help="sequences per step (default: by the GPU's speed, up to 480)")
    parser.add_argument("--memory-limit", help="of every side of the peers (default: the GPU's free memory)")
    parser.add_argument(
        "--despite-failed-tests", action="store_true", help="measure although the tests failed; the summary says so"
    )
    parser.add_argument(
        "--archive-mib", type=float, default=32, help="maximum size of the archive; prepare says what is left"
    )
    parser.add_argument("--site", type=Path, help="packages with Ray and MLflow, instead of the few that come first")
    parser.add_argument("--records", type=Path, default=REPOSITORY / "tests/benchmarks/records")
    parser.add_argument("--reports", type=Path, default=REPOSITORY / "infra/device/reports")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--llm-c", type=Path, help="a checkout of llm.c, to bring along; it needs nvcc on the machine")
    parser.add_argument("--build-nanogpt", type=Path, help="a checkout of build-nanogpt, to bring along")
    options = parser.parse_args()
    options.folder = options.folder or Path("campaign", *(["rehearsal"] if options.rehearsal else []))
    options.bring = options.bring or options.folder / "bring"
    options.out = options.out or options.bring
    return options


def main() -> None:
    """Prepare, run, or show; ``run`` exits with 1 when another call is needed."""
    options = parse_options()
    if options.what == "prepare":
        peers = sources(options.llm_c, options.build_nanogpt)
        prepare(options.bring, options.folder, options.site, options.python, peers)
    elif options.what == "summary":
        print("\n".join(summary(read_rows(options.bring))))
    elif options.what == "record":
        print(*record(options.bring, read_rows(options.bring), options.records, options.reports), sep="\n")
    elif options.what == "schedule":
        for number, rows in enumerate(schedule(), 1):
            spent = 0.0
            for row in rows:
                print(f"{number}  {spent / 60:5.1f} min  {row['seconds']:4.0f} s  {row['step']}: {row['outcome']}")
                spent += row["seconds"]
    else:
        sys.exit(run(options))


if __name__ == "__main__":
    main()
