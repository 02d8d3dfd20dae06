"""After training: the exported model is the trained one, and it writes text."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import save_file
from trainers import make_trainer
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from infra.errors import UserError
from infra.tracking.store import create_run
from infra.tracking.tracker import DESCRIPTION_TAG, Tracker
from pipeline.encoding.tokenizer import GPT2_SHA256, gpt2
from pipeline.shards import checksum
from train.config import Cycle, ResolvedConfig, config_from_json
from train.data.tokenizer import tokenizer_files
from train.export import ExportConfig, export
from train.generate import GenerateConfig, generate
from train.loop.sampling import SamplingParams, load_model, sample
from train.model_config import ModelConfig
from train.models.gpt2 import GPT
from train.reporting import hugging_face
from train.reporting.hugging_face import model_card, write_model
from train.run_files.lookup import find_checkpoint
from train.run_files.progress import read_progress
from train.run_files.run_folder import RunFolder


def trained(data: Path, model: ModelConfig, folder: Path) -> Path:
    config = ResolvedConfig.of(
        data=str(data), model=model, global_batch=4, micro_batch=4, steps=5, cycle=Cycle(5, 1), precision="fp32",
        device="cpu", learning_rate=1e-2,
    )  # fmt: skip
    saved = make_trainer(config, checkpoints=folder / "checkpoints").run().checkpoint
    assert saved
    return Path(saved)


@pytest.fixture(scope="module")
def once(small_shards: Path, small_model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run, trained once."""
    return trained(small_shards, small_model, tmp_path_factory.mktemp("once"))


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    """A copy of it, in the run ``one``."""
    checkpoints = tmp_path / "runs" / "one" / "checkpoints"
    return Path(shutil.copytree(once.parent, checkpoints)) / once.name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_transformers_gives_the_same_logits(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path, tied: bool, bias: bool
) -> None:
    saved = trained(small_shards, dataclasses.replace(small_model, tied=tied, bias=bias), tmp_path)
    write_model(saved, tmp_path / "exported")
    ours = load_model(saved)[0].cpu()
    hf_model = GPT2LMHeadModel.from_pretrained(tmp_path / "exported").eval()
    tokens = torch.randint(0, 257, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(hf_model(tokens).logits, ours(tokens)[..., :257], atol=1e-5, rtol=1e-5)
    loss = hf_model(tokens, labels=tokens).loss  # it trains on
    loss.backward()
    card = (tmp_path / "exported" / "README.md").read_text()
    assert read_progress(saved).data_fingerprint in card


def test_a_registered_model_has_a_signature_and_the_same_logits(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    requested = ExportConfig(checkpoint=str(saved), to=tmp_path / "exported", register="books")
    with pytest.raises(UserError, match=r"MLflow run of .* is unknown"):
        export(requested)
    key = create_run("train", "one", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    RunFolder(tmp_path / "runs" / "one").save_run_ref(key)
    with Tracker(key) as tracker:
        tracker.finish("KILLED")
    capfd.readouterr()
    assert export(requested) == 0
    printed = capfd.readouterr().err.splitlines()
    assert not [line for line in printed if not line.startswith("... ")], "the libraries' messages are not printed"
    run = MlflowClient(key.store).get_run(key.run_id)
    assert run.info.status == "KILLED"
    assert run.outputs is not None
    assert len(run.outputs.model_outputs) == 1
    (version,) = MlflowClient(key.store).search_model_versions("name='books'")
    assert version.run_id == key.run_id
    assert f"runs/{key.run_id}" in str(version.description)
    assert "#/models/books/versions/1" in run.data.tags[DESCRIPTION_TAG]
    mlflow.set_tracking_uri(key.store)
    loaded = mlflow.pyfunc.load_model("models:/books/1")
    assert str(loaded.metadata.signature.inputs.inputs[0].type) == "int64"
    ours = load_model(saved)[0].cpu()
    tokens = torch.randint(0, 257, (2, 20))
    with torch.no_grad():
        expected = ours(tokens)[..., :257]
    torch.testing.assert_close(torch.tensor(loaded.predict(tokens.numpy())), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("working_folder")
def test_an_exported_model_and_its_run_name_each_other(saved: Path, tmp_path: Path) -> None:
    key = create_run("train", "one")
    with Tracker(key) as tracker:
        tracker.set_description("**What:** tiny\n\n| a table |")
    RunFolder(tmp_path / "runs" / "one").save_run_ref(key)
    assert export(ExportConfig(checkpoint=str(saved), to=Path("exported"))) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert key.run_id in card
    assert str(tmp_path) not in card
    tags = MlflowClient(key.store).get_run(key.run_id).data.tags
    assert tags["exported.to"] == str(tmp_path / "exported")
    assert f"`{tmp_path}/exported`" in tags[DESCRIPTION_TAG].split("\n\n")[1], "above the table"
    (tmp_path / "mlflow.db").unlink()
    assert export(ExportConfig(checkpoint=str(saved), to=tmp_path / "again")) == 0, "also without the store"


def as_gpt2s(saved: Path, folder: Path) -> Path:
    """The checkpoint as if its model knew GPT-2's ids, without training at that size."""
    progress = read_progress(saved)
    model = ModelConfig(layers=1, heads=1, width=16, context_length=32)
    (folder / "checkpoints").mkdir(parents=True)
    changed = folder / "checkpoints" / saved.name
    changed.mkdir()
    weights = {name: value for name, value in GPT(model).state_dict().items() if name != "head.weight"}
    save_file(weights, changed / "model.safetensors")
    config = config_from_json(progress.config, "test")
    changed_progress = dataclasses.replace(
        progress, config=config.replace(model=model).to_json(), tokenizer_sha256=GPT2_SHA256,
        files={"model.safetensors": checksum(changed / "model.safetensors")},
    )  # fmt: skip
    (changed / "progress.json").write_text(json.dumps(dataclasses.asdict(changed_progress)))
    return changed


def test_the_card_tells_what_the_model_is_and_nothing_of_who_trained_it(saved: Path, small_shards: Path) -> None:
    for steps, has_result in ((5, True), (9, False)):
        (saved.parents[1] / "result.json").write_text(json.dumps({"steps": steps, "val_loss": 4.321, "device": "cpu"}))
        card = model_card(read_progress(saved), saved)
        assert ("4.321" in card) is has_result, "of the step that is exported alone"
        assert ("| cpu |" in card) is has_result
    assert "| 5 |" in card
    assert f"| {5 * 4 * 32} |" in card
    assert str(small_shards) not in card
    assert small_shards.name in card
    assert "from random weights" in card


def test_the_card_names_what_a_model_was_trained_from_and_not_where_that_was(saved: Path) -> None:
    progress = read_progress(saved)
    model = progress.config["model"] | {"init_from": "/home/me/published"}
    changes = {"model": model, "stream": ["/home/me/books"], "reading": {"tokenizer": "/home/me/own.json"}, "steps": 5}
    card = model_card(dataclasses.replace(progress, config=progress.config | changes), saved)
    assert "/home/me" not in card
    assert "from the weights of published" in card
    assert "hf:published" in card


def test_a_model_of_gpt2s_ids_has_its_tokenizer_and_writes(
    once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = as_gpt2s(once, tmp_path / "gpt2")
    write_model(saved, tmp_path / "exported")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "exported")
    assert tokenizer.encode("It was") == gpt2().tiktoken.encode_ordinary("It was")
    write_model(once, tmp_path / "foreign")
    assert not (tmp_path / "foreign" / "tokenizer.json").exists()
    with pytest.raises(UserError, match="ids without a tokenizer"):
        generate(GenerateConfig(checkpoint=str(once)))

    model = load_model(saved)[0]
    requested = GenerateConfig(checkpoint=str(saved), prompt="It was", tokens=12, seed=3)
    assert generate(requested) == 0
    beginning = [gpt2().end_of_text, *gpt2().tiktoken.encode_ordinary("It was")]
    expected = gpt2().decode(sample(model, model.config, beginning, 12, SamplingParams(seed=3)))
    assert "".join(capsys.readouterr().out.split()) == "".join(f"It was{expected}".split())
    assert expected != gpt2().decode(sample(model, model.config, beginning, 12, SamplingParams(seed=0)))
    assert expected != gpt2().decode(sample(model, model.config, beginning[1:], 12, SamplingParams(seed=3)))


def test_an_export_that_cannot_be_written_is_named_and_leaves_nothing(
    once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").touch()
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match=r"--to .*exported"):
        export(ExportConfig(checkpoint=str(once), to=tmp_path / "file" / "exported"))
    with pytest.raises(UserError, match=r"--to .* already exists\. Choose"):
        export(ExportConfig(checkpoint="any", to=tmp_path))
    monkeypatch.setattr(hugging_face, "write_json", full)
    with pytest.raises(UserError, match=r"--to .*No space left on device.*another folder"):
        write_model(once, tmp_path / "models" / "one")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_all_files_of_an_export_have_the_mode_of_the_umask(saved: Path, umask: int, mode: int, tmp_path: Path) -> None:
    umask_before = os.umask(umask)
    try:
        write_model(saved, tmp_path / "exported")
    finally:
        os.umask(umask_before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "exported").iterdir()}
    assert {"model.safetensors", "config.json", "README.md"} <= modes.keys()
    assert set(modes.values()) == {mode}


def test_a_missing_and_a_damaged_checkpoint_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--checkpoint nothing: there is no run"):
        find_checkpoint("nothing", tmp_path)
    (saved / "state.pt").unlink()
    load_model(saved)  # needs the weights alone
    (saved / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"step-00000005 is damaged: model\.safetensors"):
        export(ExportConfig(checkpoint=str(saved), to=tmp_path / "exported"))


def test_a_sampling_that_cannot_be_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"tokens": 0}, {"temperature": float("inf")}, {"temperature": 1e-320}, {"top_k": -1}]
    for setting in (*wrong, {"seed": 2**63}):
        (name,) = setting
        with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} "):
            GenerateConfig(checkpoint="any", **setting)


def test_the_tokenizer_is_gpt2s(tmp_path: Path) -> None:
    for name, content in tokenizer_files(gpt2(), 128).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("In the beginning God created the heaven and the earth.", " naïve\n\n  日本 don't 1234", "Ġ"):
        assert tokenizer.encode(text) == gpt2().tiktoken.encode_ordinary(text)
        assert gpt2().decode(gpt2().tiktoken.encode_ordinary(text)) == text
    assert len(tokenizer("In the beginning God created. " * 100, truncation=True)["input_ids"]) == 128


def test_bytes_are_counted_by_token() -> None:
    lengths = gpt2().lengths
    text = "naïve 日本 and so on"
    assert lengths[gpt2().tiktoken.encode_ordinary(text)].sum() == len(text.encode())
    assert len(lengths) == gpt2().end_of_text + 1
    assert lengths[gpt2().end_of_text] == 0, "the end of a book is no text"


def test_a_gpus_checkpoint_is_asked_on_any_machine(saved: Path) -> None:
    tokens = torch.randint(0, 257, (2, 20))
    expected = load_model(saved)[0].cpu()(tokens)
    progress = json.loads((saved / "progress.json").read_text())
    gpus = {"device": "cuda", "precision": "fp16", "attention": "cudnn", "compile": "max-autotune", "loss": "fused"}
    progress["config"] |= gpus
    (saved / "progress.json").write_text(json.dumps(progress))
    torch.testing.assert_close(load_model(saved)[0].cpu()(tokens), expected)
