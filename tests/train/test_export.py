"""After training: the exported model is the trained one, and it writes text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow.tracking import MlflowClient
from transformers import GPT2LMHeadModel, GPT2Tokenizer

from infra.command import UserError
from infra.tracking import Tracker, create_run
from pipeline.encoding import VOCABULARY_SHA256
from train.config import Cycle, ModelConfig, TrainConfig
from train.export import ExportConfig, export
from train.folder import RunFolder, find_checkpoint
from train.generate import GenerateConfig, generate
from train.hugging_face import write_model
from train.loop import Trainer
from train.progress import read_progress
from train.sampling import load_model, sample
from train.text import to_ids, to_text, token_bytes, tokenizer_files


def trained(data: Path, model: ModelConfig, folder: Path) -> Path:
    config = TrainConfig(
        data=data, model=model, global_batch=4, micro_batch=4, steps=5, cycle=Cycle(5, 1), precision="fp32",
        device="cpu", learning_rate=1e-2,
    )  # fmt: skip
    saved = Trainer(config, checkpoints=folder / "checkpoints").run().checkpoint
    assert saved
    return Path(saved)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_transformers_gives_the_same_logits(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path, tied: bool, bias: bool
) -> None:
    saved = trained(small_shards, dataclasses.replace(small_model, tied=tied, bias=bias), tmp_path)
    write_model(saved, tmp_path / "exported")
    ours = load_model(saved)[0].cpu()
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "exported").eval()
    tokens = torch.randint(0, 257, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[..., :257], atol=1e-5, rtol=1e-5)
    loss = theirs(tokens, labels=tokens).loss  # it trains on
    loss.backward()
    card = (tmp_path / "exported" / "README.md").read_text()
    assert read_progress(saved).data_fingerprint in card


def test_a_registered_model_has_a_signature_and_the_same_logits(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = trained(small_shards, small_model, tmp_path / "runs" / "one")
    asked = ExportConfig(checkpoint=str(saved), to=tmp_path / "exported", register="books")
    with pytest.raises(UserError, match="its MLflow run is not known"):
        export(asked)
    key = create_run("train", "one", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    RunFolder(tmp_path / "runs" / "one").keep_key(key)
    with Tracker(key) as tracker:
        tracker.finish("KILLED")
    assert export(asked) == 0
    run = MlflowClient(key.store).get_run(key.run_id)
    assert run.info.status == "KILLED"
    assert run.outputs is not None
    assert len(run.outputs.model_outputs) == 1
    (version,) = MlflowClient(key.store).search_model_versions("name='books'")
    assert version.run_id == key.run_id
    mlflow.set_tracking_uri(key.store)
    loaded = mlflow.pyfunc.load_model("models:/books/1")
    assert str(loaded.metadata.signature.inputs.inputs[0].type) == "int64"
    ours = load_model(saved)[0].cpu()
    tokens = torch.randint(0, 257, (2, 20))
    with torch.no_grad():
        expected = ours(tokens)[..., :257]
    torch.testing.assert_close(torch.tensor(loaded.predict(tokens.numpy())), expected, atol=1e-5, rtol=1e-5)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--to .* exists already"):
        export(ExportConfig(checkpoint="any", to=tmp_path))


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--checkpoint nothing: there is no run"):
        find_checkpoint("nothing", tmp_path)


def test_a_damaged_checkpoint_is_named(small_shards: Path, small_model: ModelConfig, tmp_path: Path) -> None:
    saved = trained(small_shards, small_model, tmp_path)
    (saved / "state.pt").unlink()
    load_model(saved)  # needs the weights alone
    (saved / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"step-00000005 is damaged: model\.safetensors is not what was written"):
        export(ExportConfig(checkpoint=str(saved), to=tmp_path / "exported"))


def test_a_folder_that_cannot_be_written_is_named(small_shards: Path, small_model: ModelConfig, tmp_path: Path) -> None:
    saved = trained(small_shards, small_model, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--to .*exported could not be written"):
        export(ExportConfig(checkpoint=str(saved), to=tmp_path / "file" / "exported"))


@pytest.mark.parametrize(
    "setting", [{"tokens": 0}, {"temperature": float("inf")}, {"temperature": 1e-320}, {"top_k": -1}, {"seed": 2**63}]
)
def test_a_sampling_that_cannot_be_is_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} "):
        GenerateConfig(checkpoint="any", **setting)


def test_the_tokenizer_is_gpt2s(tmp_path: Path) -> None:
    for name, content in tokenizer_files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    tokenizer = GPT2Tokenizer.from_pretrained(tmp_path)
    for text in ("In the beginning God created the heaven and the earth.", " naïve\n\n  日本 don't 1234", "Ġ"):
        assert tokenizer.encode(text) == to_ids(text)
        assert to_text(to_ids(text)) == text


def test_bytes_are_counted_by_token() -> None:
    lengths = token_bytes(VOCABULARY_SHA256)
    assert lengths is not None
    text = "naïve 日本 and so on"
    assert lengths[to_ids(text)].sum() == len(text.encode())
    assert token_bytes("another") is None


def test_a_gpus_checkpoint_is_asked_on_any_machine(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path
) -> None:
    saved = trained(small_shards, small_model, tmp_path)
    tokens = torch.randint(0, 257, (2, 20))
    expected = load_model(saved)[0].cpu()(tokens)
    progress = json.loads((saved / "progress.json").read_text())
    gpus = {"device": "cuda", "precision": "fp16", "attention": "cudnn", "compile": "max-autotune", "loss": "fused"}
    progress["config"] |= gpus
    (saved / "progress.json").write_text(json.dumps(progress))
    torch.testing.assert_close(load_model(saved)[0].cpu()(tokens), expected)


def test_sampling(small_shards: Path, small_model: ModelConfig, tmp_path: Path) -> None:
    saved = trained(small_shards, small_model, tmp_path)
    model, _ = load_model(saved)
    likeliest = sample(model, [256], 40, temperature=0)
    assert likeliest == sample(model, [256], 40, temperature=0, seed=5)
    assert likeliest == sample(model, [256], 40, top_k=1)
    assert sample(model, [256], 40, seed=1) == sample(model, [256], 40, seed=1) != sample(model, [256], 40, seed=2)
    with pytest.raises(UserError, match="ids that are not GPT-2's"):
        generate(GenerateConfig(checkpoint=str(saved)))
