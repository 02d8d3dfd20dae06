"""What a search says before it is paid for: sizes that should fit, trials, and the time with compilation."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.device.hardware import A100, cpu_info
from infra.errors import UserError
from infra.tracking.run_ref import RunRef
from pipeline.encoding.tokenizer import read_tokenizer
from pipeline.shards import TOKENIZER_FILE
from pipeline.vocabulary import VocabularyConfig
from pipeline.vocabulary import main as train_tokenizer
from train import plan as train_plan
from train.config import Compile, TrainConfig
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.memory import predict_peak
from train.launch.job import RunPlan
from train.model_config import PRESETS, parse_model
from train.plan import PlanOptions
from train.resolved import resolve
from train.run_files.run_folder import RunFolder
from tune.config import LadderConfig, SearchConfig
from tune.experiment.folder import write_record
from tune.experiment.machines import Machine
from tune.experiment.search_plan import Search, make_search
from tune.reporting.report import predict_candidates, print_plan
from tune.space import Candidate, make_space
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.optuna_tpe import optuna_trials
from tune.suite.plan import make_ladder
from tune.suite.plan import print_plan as print_ladder_plan
from tune.suite.suites import Suite


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
    assert re.search(r"control +4 x 2 to 1 x 8 ", printed), "8 x 1 does not fit"
    match = re.search(r"about (\d+) trials of .* 1m30s each, at most (\d+)m(\d*)s? in total", printed)
    assert match
    trials, minutes, left = match.groups()
    assert 60 * int(minutes) + int(left or 0) == int(trials) * (10 + seconds + 90)


def test_a_gpu_that_is_not_here_is_planned_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Without data, with the memory and speed of its candidates; those with similar speeds are one row."""
    training = TrainConfig.of(data="nowhere", model=PRESETS["gpt2-124m"])
    knobs = ("compile=off,max-autotune", "precision=bf16", "loader_threads=1")
    search = make_search(SearchConfig(training=training, gpu="A100", knobs=knobs, dry_run=True, out="none"))
    assert (search.device, search.limit) == ("cuda", 40 * 2**30)
    control = search.space.control.knobs
    combinations = [control, *search.space.neighbors(control)]
    predictions, unpredicted = predict_candidates(search, combinations, load_gpu_rates("A100"))
    curves = search.memory.curves([])
    fitting = {k: [s for s in search.space.micro_batches_for(k) if curves.fits(Candidate(s, k))] for k in combinations}
    counts = Counter[str]()
    for prediction in predictions:
        counts[prediction.label] += len(prediction.batches)
        if prediction.speed:
            assert prediction.speed.high / prediction.speed.low < (0.81 / 0.72) ** 2, "two errors at most"
    assert counts["control"] == len(fitting[control])
    assert {*counts} == {"control", "compile=off", "precision=bf16*"}
    speeds = {p.label: p.speed for p in reversed(predictions)}
    assert speeds["compile=off"] is None, "eager execution has no prediction"
    faster, slower = speeds["control"], speeds["precision=bf16*"]
    assert faster
    assert slower
    assert faster.high > slower.high
    assert "loader_threads=1" in " ".join(unpredicted)
    assert "compile=max-autotune" in " ".join(unpredicted)
    print_plan(search)
    printed = capfd.readouterr().out
    assert "not measured" in printed
    assert "none in nowhere" in printed
    assert len(printed.splitlines()) <= 25


def test_the_three_planners_plan_the_same_model(capfd: pytest.CaptureFixture[str]) -> None:
    """With the same memory, for the same GPU and limit, and without data."""
    training = TrainConfig.of(
        data="nowhere",
        model=PRESETS["small"],
        micro_batch=32,
        global_batch=32,
        precision="bf16",
        compile="whole",
        loss="plain",
    )
    flags: dict[str, Any] = {"gpu": "A100", "memory_limit": 30 * 10**9, "price_per_hour": ("1",)}
    suite = LadderConfig(suite="kernels", data="nowhere", model=PRESETS["small"], dry_run=True, **flags)
    ladder = replace(
        make_ladder(suite), suite=Suite("one", "", {"batch": 32, "precision": "bf16", "compile": "whole"}, ())
    )
    peak = predict_peak(resolve(training.replace(device="cuda"), A100).step).total / 1e9
    for print_one in (
        lambda: train_plan.plan(PlanOptions(training, **flags)),
        lambda: print_plan(make_search(SearchConfig(training=training, dry_run=True, **flags))),
        lambda: print_ladder_plan(ladder),
    ):
        print_one()
        printed = capfd.readouterr().out
        assert re.search(rf" 32 x 1 .*\b{peak:.2f}\b", printed)
        assert "50,257 token ids" in printed
        assert "cost" in printed
        assert len(printed.splitlines()) <= 25


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


@pytest.mark.parametrize("suite", ["a100", "memory", "loop", "sizes", "kernels", "aa"])
def test_the_plan_of_every_suite_is_short(suite: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = LadderConfig(suite=suite, data="nowhere", gpu="A100", price_per_hour=("1",), dry_run=True)
    print_ladder_plan(make_ladder(config))
    assert len(capfd.readouterr().out.splitlines()) <= 23, "with its title and its last line at most 25"
