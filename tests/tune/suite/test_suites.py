"""Suites: every rung is a config, users add their own, and a wrong name is answered with the nearest right ones."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from infra.device.hardware import A100 as CARD
from infra.errors import UserError
from train.config import Cycle, TrainConfig
from train.estimate.memory import predict_peak
from train.model_config import PRESETS, ModelConfig
from train.resolved import resolve
from tune.suite.catalog import A100, SUITES, check_applicable, find_suite
from tune.suite.suites import Rung, Suite, apply_changes, choose, search_result_rung, shorten_for_cpu

START = TrainConfig.of(device="cuda", micro_batch=32, compile="off", loss="plain", steps=10)


def test_the_short_form_is_an_eighth_on_a_tiny_model() -> None:
    state = apply_changes(START, shorten_for_cpu(A100).base)
    assert (cast(ModelConfig, state.model).layers, state.batch.micro_batch, state.batch.global_batch) == (2, 4, 4)
    assert state.model.context_length == PRESETS["tiny"].context_length, "not the study's"
    for rung in shorten_for_cpu(A100).rungs:
        state = apply_changes(state, rung.changes)
    assert state.batch.global_batch == 8
    batches = [rung.changes["batch"] for rung in shorten_for_cpu(SUITES["sizes"]).rungs if "batch" in rung.changes]
    assert batches == [1, 1, 2, 4, 5, 8, 8, 9], "of 7, 8, 9, 31, 33, 63, 64 and 65, rounded up"


def test_the_short_form_of_a_suite_without_a_model_or_batch_is_short_too() -> None:
    state = apply_changes(START, shorten_for_cpu(Suite("mine", "Mine", {"attention": "manual"}, ())).base)
    assert (state.model, state.batch.micro_batch, state.batch.global_batch) == (PRESETS["tiny"], 4, 60)
    larger = shorten_for_cpu(Suite("mine", "Mine", {}, (Rung("larger", {"model": "gpt2-355m"}),)))
    assert apply_changes(state, larger.rungs[0].changes).model == PRESETS["tiny"]


def test_the_study_is_repeated_as_it_was() -> None:
    state = apply_changes(START, A100.base)
    batches = {"baseline": state.batch.micro_batch}
    for rung in A100.rungs:
        state = apply_changes(state, rung.changes)
        batches[rung.name] = state.batch.micro_batch
    assert batches["baseline"] == batches["tensor cores"] == 28
    assert (batches["mixed precision fp16"], batches["compile"], batches["flash attention"]) == (32, 48, 64)
    assert state.model == replace(PRESETS["gpt2-124m"], context_length=512)
    assert cast(ModelConfig, apply_changes(START, A100.base).model).padded_vocab_size == 50257
    execution = state.execution
    assert (execution.attention, execution.compile, execution.ablate) == ("auto", "max-autotune", ())
    assert state.optimization.optimizer == "adamw-fused"


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_every_rung_is_another_config_and_fits_the_card_that_the_suites_are_for(suite: Suite) -> None:
    """One with 40 GB, by prediction."""
    state = apply_changes(START.replace(device="cuda"), suite.base)
    peaks = {"baseline": predict_peak(resolve(state, CARD).step).total}
    for rung in suite.rungs:
        config = apply_changes(state, rung.changes)
        peaks[rung.name] = predict_peak(resolve(config, CARD).step).total
        assert config != state or suite.name == "aa", f"{rung.name} changes nothing"
        state = config if suite.cumulative else state
    assert max(peaks.values()) < 38e9, peaks


def test_an_unknown_suite_is_answered_with_the_nearest() -> None:
    for wrong, offered in {"memroy": "memory", "MEMORY": r"mean memory\?", "xyz": "a100, loop"}.items():
        with pytest.raises(UserError, match=offered):
            find_suite(wrong)


def test_an_unknown_rung_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="flash attention"):
        choose(A100, ["flash atention"])
    assert [rung.name for rung in choose(A100, ["compile", "tensor cores"]).rungs] == ["tensor cores", "compile"]


def test_a_suite_from_python(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from tune.suite.suites import Rung, Suite\n"
        "SUITE = Suite('mine', 'Mine', {'batch': 8}, tuple(Rung(f'{n}', {'batch': n}) for n in (2, 4)))\n"
    )
    suite = find_suite(str(path))
    assert [apply_changes(START, rung.changes).batch.micro_batch for rung in suite.rungs] == [2, 4]
    path.write_text("from tune.suite.suites import Rung\nSUITE = [Rung(f'{n}', {'batch': n}) for n in (2, 4)]\n")
    assert find_suite(str(path)) == replace(suite, title="mine", base={})


def from_file(path: Path, text: str, start: TrainConfig = START) -> Suite:
    """The suite of a Python file with ``text``."""
    path.write_text(f"from tune.suite.suites import Rung, Suite\nSUITE = {text}\n")
    suite = find_suite(str(path))
    check_applicable(suite, start, str(path))
    return suite


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[Rung('a', {'precison': 'bf16'})]", "rung 'a' .*Did you mean precision"),
        ("[Rung('a', {'model.head': 3})]", r"rung 'a' .*model\.heads"),
        ("Suite('s', 'S', {'model': 'tyni'}, (Rung('a'),))", "the base: .*'tyni'"),
        ("Suite('s', 'S', {'steps': 'many'}, (Rung('a'),))", "steps is 'many'"),
        ("[Rung('a', {'optimizer': 'adamx'})]", "bad.py, rung 'a': optimizer is 'adamx'"),
        ("[Rung('a', {'batch': '8'})]", "batch is '8'"), ("[Rung('a', {'vocabulary_multiple': 0})]", "at least 1"),
        ("[Rung('a', {'model.heads': '3'})]", "heads is '3'"), ("[Rung('a', {'cycle': 20})]", r"rung 'a': .*20.20"),
        ("[Rung('a', {'model.heads': 7})]", "rung 'a': .*heads=7"), ("[Rung('a', {'data': 'elsewhere'})]", "'data'"),
        ("[Rung('a', {'attention': 'flash', 'precision': 'fp32'})]", "rung 'a': .*cannot be combined"),
        ("[Rung('a', {'tokens': 1000000})]", "rung 'a': --steps and --tokens"),
        (
            "Suite('s', 'S', {}, (Rung('a', {'checkpointing': 'selective'}), Rung('b', {'compile': 'blocks'})), True)",
            "rung 'b': --checkpointing selective and --compile blocks",
        ),
        ("3", "SUITE"), ("[]", "has no rung"), ("[('a', {'batch': 8})]", "is not a rung"),
        ("1 / 0", "ZeroDivisionError"), ("exit()", "SystemExit"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_fault(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_file(tmp_path / "bad.py", text)


def test_what_only_this_machine_cannot_run_is_not_an_error(tmp_path: Path) -> None:
    changes = [{"precision": "fp16"}, {"fp8": True}, {"attention": "cudnn"}, {"loss_chunks": 2}, {"loss": "fused"}]
    text = f"[Rung(str(number), changes) for number, changes in enumerate({changes})]"
    suite = from_file(tmp_path / "mine.py", text, START.replace(device="cpu"))
    assert [rung.changes for rung in suite.rungs] == changes


def test_a_suite_without_a_model_is_read_with_the_ladders(tmp_path: Path) -> None:
    path, text = tmp_path / "mine.py", "[Rung('a', {'model.heads': 5})]"
    with pytest.raises(UserError, match="multiple of heads=5"):
        from_file(path, text)
    assert from_file(path, text, START.replace(model=replace(START.model, width=100, heads=10))).rungs


def test_a_rung_may_have_its_own_cycle() -> None:
    assert apply_changes(START, {"cycle": "20+0"}).duration.cycle == Cycle(20, 0)


def test_what_a_search_found_is_a_rung() -> None:
    best = TrainConfig.of(
        micro_batch=5, global_batch=10, attention="flash", loss_chunks=5, precision="bf16", compile="whole",
        checkpointing="full", optimizer="adamw", loader_threads=1,
    )  # fmt: skip
    assert apply_changes(TrainConfig(), search_result_rung(best.flat()).changes) == best
    assert (
        apply_changes(
            TrainConfig(), search_result_rung(best.replace(loss="fused", loss_chunks=1).flat()).changes
        ).execution.loss
        == "fused"
    )
    assert search_result_rung(best.flat()).changes_numerics
