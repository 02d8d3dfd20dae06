"""What a search says before it is paid for: sizes that should fit, trials, and the time with compilation."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from infra.device.hardware import A100, cpu_info
from infra.errors import UserError
from infra.tracking.run_ref import RunRef
from pipeline.encoding.tokenizer import read_tokenizer
from pipeline.shards import TOKENIZER_FILE
from pipeline.vocabulary import VocabularyConfig
from pipeline.vocabulary import main as train_tokenizer
from train.config import Compile, TrainConfig
from train.estimate.gpu_rates import load_gpu_rates
from train.launch.job import RunPlan
from train.model_config import PRESETS, parse_model
from train.resolved import resolve
from train.run_files.run_folder import RunFolder
from tune.config import LadderConfig, SearchConfig
from tune.experiment.folder import write_record
from tune.experiment.machines import Machine
from tune.experiment.search_plan import Search, make_search
from tune.reporting.report import predicted_speeds_table, print_plan
from tune.space import Candidate, make_space
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.optuna_tpe import optuna_trials
from tune.suite.plan import make_ladder


@pytest.mark.parametrize(
    ("compiled", "knobs", "seconds"), [("off", (), 0), ("whole", (), 40), ("off", ("compile=blocks,whole",), 40)]
)
def test_the_time_counts_each_trials_start_compilation_and_steps(
    small_shards: Path, capfd: pytest.CaptureFixture[str], compiled: Compile, knobs: tuple[str, ...], seconds: int
) -> None:
    training = TrainConfig.of(data=str(small_shards), device="cpu", global_batch=8, micro_batch=8, compile=compiled)
    search = make_search(SearchConfig(training=training, knobs=knobs, trial_time=90.0, dry_run=True))
    memory = MemorySearcher(search.space, lambda candidate: 1e9 * candidate.micro_batch, 5e9)
    print_plan(replace(search, memory=memory, strategy=memory))
    printed = capfd.readouterr().out
    assert "3 of 4 micro-batches are predicted to fit: 1, 2, 4 (4.00 GB at 4)" in printed
    match = re.search(r"about (\d+) trials of .* 1m30s each, at most (\d+)m(\d*)s? in total", printed)
    assert match
    trials, minutes, left = match.groups()
    assert 60 * int(minutes) + int(left or 0) == int(trials) * (10 + seconds + 90)


def test_a_gpu_that_is_not_here_is_planned_for(small_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its candidates are listed with the memory and the speed that are predicted, the fastest first."""
    training = TrainConfig.of(data=str(small_shards), model=replace(PRESETS["gpt2-124m"], context_length=32))
    config = SearchConfig(training=training, gpu="A100", knobs=("compile=off",), dry_run=True, out="none")
    search = make_search(config)
    assert (search.device, search.limit) == ("cuda", 40 * 2**30)
    table = predicted_speeds_table(search, search.space.combinations, load_gpu_rates("A100"))
    speeds = [line[2] for line in table.rows]
    predicted_speeds = [float(speed.split()[0].replace(",", "")) for speed in speeds if speed != "-"]
    assert predicted_speeds == sorted(predicted_speeds, reverse=True)
    whole, off = search.space.combinations
    for knobs, count in ((whole, len(predicted_speeds)), (off, speeds.count("-"))):
        fitting = [Candidate(size, knobs) for size in search.space.micro_batches_for(knobs)]
        assert count == sum(map(search.memory.curves([]).fits, fitting)) > 0, "eager execution has no prediction"
    print_plan(search)
    assert "not measured" in capfd.readouterr().out


def test_a_gpu_to_plan_for_is_no_gpu_to_search_on() -> None:
    with pytest.raises(UserError, match="--dry-run"):
        SearchConfig(gpu="A100")


def test_the_limit_holds_on_every_machine(small_shards: Path) -> None:
    """Without --memory-limit it is what the smallest one has."""
    training = TrainConfig.of(data=str(small_shards), device="cpu", global_batch=8, micro_batch=8)
    machines = tuple(Machine(f"w{size}", cpu_info(), size * 10**9) for size in (8, 4, 16))
    config = SearchConfig(training=training, dry_run=True)
    assert make_search(config, machines).limit == make_search(config, machines[1:2]).limit <= 4 * 10**9


def test_a_search_that_is_continued_keeps_its_limit(small_shards: Path, tmp_path: Path) -> None:
    """On machines with more memory it would be another search."""
    training = TrainConfig.of(data=str(small_shards), device="cpu", global_batch=8, micro_batch=8)
    config = SearchConfig(training=training, name="one", out=str(tmp_path))

    def search_on(size: int, config: SearchConfig) -> Search:
        return make_search(config, (Machine("w1", cpu_info(), size * 10**9),))

    initial_search = search_on(4, config)
    initial_search.folder.mkdir()
    write_record(initial_search.workspace, initial_search.record(RunRef("", "", "")))
    assert search_on(16, replace(config, name=None, resume="one")).limit == initial_search.limit


def test_a_split_without_a_window_is_refused_before_anything_is_made(small_shards: Path, tmp_path: Path) -> None:
    """The trials of a search do not validate, so that a short validation split is no reason to refuse one."""
    longer, longest = (parse_model(f"tiny,context_length={n},vocab_size=257") for n in (5_000, 90_000))
    run = TrainConfig.of(data=str(small_shards), device="cpu", model=longer, global_batch=1, steps=1)
    for plan in (
        lambda: RunPlan.new(run, RunFolder(tmp_path)),
        lambda: make_ladder(LadderConfig(suite="loop", model=longer, data=str(small_shards), device="cpu")),
    ):
        with pytest.raises(UserError, match="val split has 4,001 tokens, but a window needs 5,001"):
            plan()
    assert make_search(SearchConfig(training=run, dry_run=True))
    with pytest.raises(UserError, match="train split has 24,006 tokens, but a window needs 90,001"):
        make_search(SearchConfig(training=run.replace(model=longest)))


def test_a_search_and_a_ladder_follow_the_vocabulary_of_the_data(small_shards: Path, tmp_path: Path) -> None:
    """What they predict and compare is the model that their trials train."""
    data, tokenizer = shutil.copytree(small_shards, tmp_path / "data"), tmp_path / "own.json"
    train_tokenizer(VocabularyConfig(size=300, sample=100_000, out=str(tokenizer)))
    shutil.copy(tokenizer, data / TOKENIZER_FILE)
    manifest = json.loads((data / "manifest.json").read_bytes())
    (data / "manifest.json").write_text(
        json.dumps(manifest | {"tokenizer_sha256": read_tokenizer(str(tokenizer)).sha256})
    )
    training = TrainConfig.of(data=str(data), device="cpu", global_batch=8, micro_batch=8)
    search = make_search(SearchConfig(training=training, dry_run=True))
    assert search.space.base.model.vocab_size == 300
    ladder = make_ladder(LadderConfig(suite="loop", data=str(data), dry_run=True))
    request = ladder.request("here", 1, [], [])
    assert request
    assert request.config.model.vocab_size == 300


def test_optunas_budget_grows_with_the_grid_within_bounds() -> None:
    space = make_space(resolve(TrainConfig.of(global_batch=2, micro_batch=2), cpu_info()), ())
    assert optuna_trials(space) == 8
    assert optuna_trials(replace(space, micro_batches=tuple(range(1, 2)) * 120)) == 30
    assert optuna_trials(replace(space, micro_batches=(1, 2) * 200)) == 50


@pytest.mark.parametrize("limit", [None, 12 * 10**9])
def test_a_search_begins_with_what_the_run_itself_would_be_under_the_limit(
    small_shards: Path, limit: int | None
) -> None:
    """The control's micro-batch and loss are decided for the memory that is asked for, not for all that there is."""
    training = TrainConfig.of(data=str(small_shards), model=PRESETS["gpt2-124m"], global_batch=40)
    search = make_search(SearchConfig(training=training, gpu="A100", memory_limit=limit, dry_run=True, out="none"))
    run = resolve(training.replace(device="cuda"), A100.with_memory_limit(limit))
    control = search.space.config(search.space.control)
    assert (control.batch.micro_batch, control.execution.loss) == (run.batch.micro_batch, run.execution.loss)
    assert (search.limit, search.memory.limit) == (limit or A100.memory, limit or A100.memory)
    assert run.batch.micro_batch == (40 if limit is None else 20)


def test_optuna_is_seeded_as_the_training_is(small_shards: Path) -> None:
    def first(seed: int) -> Candidate:
        training = TrainConfig.of(data=str(small_shards), device="cpu", global_batch=240, micro_batch=8, seed=seed)
        training = training.replace(model=replace(PRESETS["tiny"], context_length=32))
        proposal = make_search(SearchConfig(training=training, searcher="optuna", dry_run=True)).strategy.propose([])
        assert proposal
        return proposal.candidate

    assert first(1) == first(1)
    assert len({first(seed) for seed in range(4)}) > 1
