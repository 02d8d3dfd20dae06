"""A data set of another tokenizer than GPT-2's: the model follows it, and the checkpoint carries it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from trainers import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.errors import UserError
from infra.storage.files import write_json
from pipeline import tokenize, vocabulary
from pipeline.config import TokenizeConfig
from pipeline.encoding.tokenizer import gpt2
from pipeline.shards import TOKENIZER_FILE, read_manifest
from pipeline.vocabulary import VocabularyConfig
from train.config import Cycle, TrainConfig
from train.generate import GenerateConfig, generate
from train.launch.job import RunPlan
from train.loop.sampling import closing_sample, load_model
from train.model_config import PRESETS, ModelConfig, parse_model
from train.reporting.hugging_face import write_model
from train.resolved import prepare, resolve_local
from train.run_files.run_folder import RunFolder


@pytest.fixture(scope="module", params=["last", "first"])
def own(request: pytest.FixtureRequest, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run on a data set whose tokenizer has the end of text as its last id, or as its first."""
    folder = tmp_path_factory.mktemp("own")
    file = folder / "own.json"
    vocabulary.main(VocabularyConfig(size=600, sample=500_000, out=str(file)))
    if request.param == "first":
        values = json.loads(file.read_bytes())
        values["added_tokens"][0]["id"] = 0
        everything = [values["added_tokens"][0]["content"], *values["model"]["vocab"]]
        values["model"]["vocab"] = {token: number for number, token in enumerate(everything)}
        file.write_text(json.dumps(values))
    store = f"sqlite:///{shutil.copy(empty_store, folder)}"
    tokenize.main(TokenizeConfig(out=str(folder / "tokens"), tokenizer=str(file), tracking_uri=store))
    model = ModelConfig(layers=1, heads=2, width=16, context_length=32)
    return TrainConfig.of(
        data=str(folder / "tokens"), model=model, global_batch=2, micro_batch=2, steps=2, cycle=Cycle(2, 1),
        precision="fp32", device="cpu", mask_books=True,
    )  # fmt: skip


def test_it_is_trained_generated_from_and_exported_without_its_data(
    own: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(own.dataset.data, tmp_path / "tokens"))
    trainer = make_trainer(resolve_local(own.replace(data=str(data))), checkpoints=tmp_path / "run" / "checkpoints")
    result = trainer.run()
    assert closing_sample(trainer, replace(result, val_loss=0.0)).sample
    assert result.val_bits_per_byte
    assert result.checkpoint
    shutil.rmtree(data)

    saved = Path(result.checkpoint)
    model, actual = load_model(saved)
    assert actual
    assert (model.config.vocab_size, model.config.padded_vocab_size) == (len(actual), 640) == (600, 640)
    assert model.config.end_of_text % 600 == actual.end_of_text
    assert generate(GenerateConfig(checkpoint=str(saved), prompt="In the", tokens=5)) == 0
    assert "In the" in capsys.readouterr().out
    write_model(saved, tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "In the beginning God created the heaven <|endoftext|>"
    assert tokenizer.encode(text.split("<")[0]) == actual.encode(text.split("<")[0].encode()).tolist()
    assert tokenizer.encode(text)[-1] == tokenizer.eos_token_id == actual.end_of_text
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config
    assert (hf_model.vocab_size, hf_model.eos_token_id) == (600, actual.end_of_text)
    other = Path(shutil.copytree(saved, tmp_path / "other"))
    (other / TOKENIZER_FILE).write_bytes(gpt2().content)
    with pytest.raises(UserError, match=TOKENIZER_FILE):
        load_model(other)


def test_the_models_vocabulary_follows_the_data_and_any_other_is_refused(own: TrainConfig, tmp_path: Path) -> None:
    manifest = read_manifest(own.dataset.data)
    plan = RunPlan.new(own, RunFolder(tmp_path))
    assert (plan.requested.model.vocab_size, cast(ModelConfig, plan.requested.model).padded_vocab_size) == (600, 640)
    assert prepare(plan.requested, manifest) == plan.requested
    unpadded = own.replace(model=replace(own.model, padded_vocab_size=50257))
    assert cast(ModelConfig, prepare(unpadded, manifest).model).padded_vocab_size == 600
    for words in ("edu-3m", "tiny,vocab_size=599", "tiny,vocab_size=601"):
        with pytest.raises(UserError, match=r"600 token ids.*vocab_size=600,padded_vocab_size=640"):
            RunPlan.new(own.replace(model=parse_model(words)), RunFolder(tmp_path))


def test_the_size_of_the_small_model_with_its_own_vocabulary() -> None:
    """Its blocks alone have 3.16 million parameters: 4 x (12 x 256^2 + 13 x 256)."""
    model = PRESETS["edu-3m"]
    blocks = 4 * (12 * 256**2 + 13 * 256)
    assert model.parameters == blocks + 2 * 256 + (512 + 512) * 256 == 3_421_696


def test_a_run_on_it_is_resumed(own: TrainConfig, tmp_path: Path) -> None:
    """The run's settings name no tokenizer, and its checkpoint holds the model that followed from the data."""
    home = RunFolder(tmp_path / "one")
    straight = make_trainer(resolve_local(own.replace(steps=3)))
    whole = straight.run()
    home.path.mkdir()
    write_json(home.config, own.to_json())
    assert (
        make_trainer(resolve_local(own.replace(steps=3)), checkpoints=home.checkpoints, should_stop=lambda: True)
        .run()
        .steps
        == 1
    )
    plan = RunPlan.continued(own.replace(steps=3), "one", str(tmp_path))
    assert plan.progress
    assert plan.progress.step == 1
    assert plan.requested.model.vocab_size == 600
    resumed_trainer = make_trainer(
        resolve_local(plan.requested), checkpoints=home.checkpoints, resume=plan.run_folder.newest_checkpoint()[0]
    )
    result = resumed_trainer.run()
    assert (result.outcome, result.steps) == ("finished", 3)
    losses = [loss for report in straight.times.reports for loss in report.step_losses]
    assert [loss for report in resumed_trainer.times.reports for loss in report.step_losses] == losses
    assert (result.val_loss, result.val_bits_per_byte) == (whole.val_loss, whole.val_bits_per_byte)
