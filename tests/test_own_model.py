"""Models of transformers and torch, in the place of the GPT-2 here: run, resumed, compared, searched and exported."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainers import make_trainer
from transformers import GPT2Config, GPT2LMHeadModel

from infra.device.hardware import cpu_info
from infra.errors import UserError
from infra.ray.cluster import ray_session
from infra.storage.files import write_json
from pipeline.encoding.tokenizer import read_tokenizer
from pipeline.shards import MANIFEST_FILE, TOKENIZER_FILE
from pipeline.vocabulary import VocabularyConfig
from pipeline.vocabulary import main as train_tokenizer
from train import export, generate, plan, run
from train.config import Cycle, TrainConfig, load_config
from train.estimate.custom import measure_fit
from train.estimate.memory import predict_peak
from train.loop.execution import build_model
from train.loop.trainer import Trainer
from train.model_config import ModelConfig, parse_model
from train.model_config.custom import CustomModel
from train.models import custom
from train.models.hf_weights import to_hf_state_dict
from train.profile import __main__ as profile
from train.reporting.hugging_face import write_model
from train.resolved import resolve, resolve_local
from tune import ladder, search

MODELS = Path(__file__).parent / "models"
SIZES = "context_length=32,vocab_size=257"
NAMES = ("gpt2", "llama", "qwen", "Encoder")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODELS))


def config_of(data: Path, name: str, **changes: object) -> TrainConfig:
    config = TrainConfig.of(
        data=str(data), model=parse_model(f"own_models:{name},{SIZES}"), global_batch=8, micro_batch=4, steps=8,
        cycle=Cycle(4, 1), precision="fp32", device="cpu", learning_rate=3e-3, schedule="constant",
    )  # fmt: skip
    return config.replace(**changes)


def losses(trainer: Trainer) -> list[float]:
    trainer.run()
    return [loss for report in trainer.times.reports for loss in report.step_losses]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_others_trains_is_continued_and_is_recomputed(small_shards: Path, tmp_path: Path, name: str) -> None:
    config = config_of(small_shards, name)
    straight = losses(make_trainer(resolve_local(config)))
    assert straight[-1] < straight[0]
    first = make_trainer(resolve_local(config.replace(steps=4)), checkpoints=tmp_path / "checkpoints").run()
    assert first.checkpoint
    assert losses(make_trainer(resolve_local(config), resume=Path(first.checkpoint))) == straight[4:], "to the bit"
    for checkpointing in ("full", "alternate", "selective"):
        again = losses(make_trainer(resolve_local(config.replace(checkpointing=checkpointing))))
        assert again == pytest.approx(straight, rel=1e-5), "dropout is drawn again as it was"
    if name != "Encoder":  # whose dropout draws other numbers in another kernel
        assert losses(make_trainer(resolve_local(config.replace(attention="manual")))) == pytest.approx(
            straight, rel=1e-4
        )


def test_recomputation_saves_memory(small_shards: Path) -> None:
    """What the backward pass keeps, by torch's own count of saved tensors."""

    def kept(checkpointing: str) -> int:
        config = resolve(config_of(small_shards, "gpt2", checkpointing=checkpointing), cpu_info())
        model, sizes = (
            build_model(
                config.model, config.execution, config.optimization.optimizer, config.dataset.seed, torch.device("cpu")
            ),
            dict[int, int](),
        )
        tokens = torch.zeros(4, 32, dtype=torch.int64)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, tokens)
        return sum(sizes.values())

    assert kept("full") < kept("alternate") < kept("none")


@pytest.fixture
def doors(small_shards: Path) -> tuple[TrainConfig, TrainConfig]:
    """GPT-2 of one shape by our own code and by that of transformers."""
    reference = config_of(small_shards, "gpt2")
    shape = ModelConfig(
        layers=2, heads=2, width=64, context_length=32, vocab_size=257, padded_vocab_size=257, bias=True
    )
    return reference.replace(model=shape), reference


def test_gpt2_by_both_doors_is_one_model(doors: tuple[TrainConfig, TrainConfig]) -> None:
    ours, reference = (make_trainer(resolve_local(config)) for config in doors)
    reference.model.model.load_state_dict(to_hf_state_dict(ours.model), strict=False)
    assert losses(reference) == pytest.approx(losses(ours), rel=1e-4)
    assert reference.config.model.parameters == ours.config.model.parameters
    assert reference.config.model.flops_per_token == pytest.approx(ours.config.model.flops_per_token, rel=0.01)
    assert reference.config.model.flops_formulas()[0].name == "counted"


@pytest.mark.slow
def test_its_memory_is_measured_as_the_formulas_know_it(
    doors: tuple[TrainConfig, TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one a thousand times as large, where the code of transformers itself does not matter.

    The same probes measure the GPT-2 here. The C library keeps what it frees, which the formulas do not know: 5 to 16%
    of the peak, and another part in each measurement. A fixed threshold, above which a block is a mapping of its own
    (mallopt(3)), lets it return every tensor.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    shape = ModelConfig(layers=4, heads=4, width=256, context_length=256, vocab_size=8192, padded_vocab_size=8192)
    words = "own_models:gpt2,width=256,layers=4,heads=4,context_length=256,vocab_size=8192"
    ours = resolve(doors[0].replace(model=shape, global_batch=32), cpu_info())
    reference = resolve(ours.replace(model=parse_model(words)), cpu_info())
    for micro_batch in (16, 32):
        expected, breakdown = (
            predict_peak(config.replace(micro_batch=micro_batch).step) for config in (ours, reference)
        )
        measured = measure_fit(ours.replace(micro_batch=micro_batch).step).peak(micro_batch)
        assert breakdown.weights == expected.weights
        assert breakdown.total == pytest.approx(measured + expected.context, rel=0.03)
        assert breakdown.total == pytest.approx(expected.total, rel=0.03)


@pytest.fixture
def unimportable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that cannot be imported, each for one reason."""
    (tmp_path / "broken").mkdir()
    files = {
        "unclosed.py": "def model(:\n", "leaving.py": "exit()\n", "broken/__init__.py": "1 / 0\n",
        "broken/inside.py": "", "lacking.py": "import torch\nimport not_there\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "flags", "named"),
    [
        ("nowhere:model", [], "no module named nowhere"), ("wrong_models:absent", [], "no callable 'absent'"),
        ("wrong_models:nothing", [], "torch.nn.Module"), ("wrong_models:broken", [], "it cannot be built"),
        ("wrong_models:Bigram,depth=3", [], "depth"), ("wrong_models:Bigram,depth", [], "NAME=VALUE"),
        ("wrong_models:Unreduced", [], "a scalar"), ("wrong_models:Detached", [], "no gradient"),
        ("wrong_models:Raising", [], "of two"), ("wrong_models:few", [], "256 token ids"),
        ("wrong_models:sparse", [], "sparse"), ("wrong_models:double", [], "float64"),
        ("wrong_models:lazy", [], "late"), ("wrong_models:frozen", [], "no trainable parameters"),
        ("wrong_models:half", [], "float16"), ("wrong_models:turned", [], "complex64"),
        ("wrong_models:Empty", [], "no trainable parameters"), ("wrong_models:Imaginary", [], "complex64"),
        ("wrong_models:Pair", [], "tuple"), ("wrong_models:Inputs", [], "positional"),
        ("wrong_models:ByData", [], "head.weight and rows.weight"),
        ("wrong_models:Late", [], "more."), ("wrong_models:Noted", [], "a checkpoint"),
        ("wrong_models:positional", [], "positional"), ("wrong_models:leaving", [], "by itself"),
        ("wrong_models:model", [], "nn.Module instance"), ("wrong_models:again", [], "the same module"),
        ("wrong_models:OrderedDict", [], "signature"), ("wrong_models.py:Bigram", [], "wrong_models.py"),
        ("./wrong_models:Bigram", [], "./wrong_models"), ("unclosed:model", [], "SyntaxError"),
        ("leaving:model", [], "SystemExit"), ("broken.inside:model", [], "ZeroDivisionError"),
        ("lacking:model", [], "lacking.py, line 2"),
        ("wrong_models:Bigram", ["--checkpointing", "full"], "no nn.ModuleList"),
        ("wrong_models:Bigram", ["--attention", "manual"], "scaled_dot_product_attention"),
        ("wrong_models:Bigram", ["--loss", "fused"], "--loss fused"),
        ("wrong_models:Bigram", ["--loss-chunks", "2"], "--loss-chunks 2"),
        ("wrong_models:Bigram", ["--mask-books"], "--mask-books"),
        ("wrong_models:Bigram,context_length=100000", [], "100,001"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("working_folder", "unimportable")
def test_a_mistake_is_one_sentence_before_anything_is_made(
    refused: Callable[..., str], small_shards: Path, model: str, flags: list[str], named: str
) -> None:
    sizes = SIZES if "context_length" not in model else "vocab_size=257"
    flags = ["--model", f"{model},{sizes}", "--data", str(small_shards), "--device", "cpu", *flags]
    assert named in refused(run.main, *flags, "--global-batch", "2", "--micro-batch", "1", "--steps", "1")
    assert not list(Path().glob("runs/*"))


@pytest.mark.usefixtures("working_folder")
def test_where_a_model_fails_that_could_be_built_is_told_and_what_was_trained_is_kept(
    command: Callable[..., int], refused: Callable[..., str], small_shards: Path
) -> None:
    flags = ["--data", str(small_shards), "--device", "cpu", "--global-batch", "2", "--cycle", "3+1"]
    flags += ["--steps", "9", "--checkpoint-every", "5"]
    for name, stage in {
        "Short": "step 1", "Twice": "the backward pass of step 2", "Unseen": "the validation", "Tired": "step 7"
    }.items():  # fmt: skip
        message = refused(
            run.main, *flags, "--model", f"wrong_models:{name},{SIZES}", "--micro-batch", "2", "--name", name
        )
        assert stage in message
        assert f"wrong_models:{name}" in message
        assert ("wrong_models.py, line" in message) == (name != "Twice"), "of which the loss itself is right"
    assert [path.name for path in Path("runs").glob("*/checkpoints/*")] == ["step-00000005"]
    assert command(run.main, "--resume", "Tired") == 0
    message = refused(run.main, *flags, "--model", f"wrong_models:Short,{SIZES}", "--memory-limit", "500MB")
    assert re.search("wrong_models:Short .*memory.*wrong_models.py, line", message), "by a probe"


@pytest.mark.usefixtures("working_folder")
def test_a_loss_that_is_no_mean_and_an_evaluation_without_numbers_are_told(
    command: Callable[..., int], small_shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On data with a tokenizer, so that the model is asked for a text; its result is kept without one."""
    data = shutil.copytree(small_shards, tmp_path / "data")
    file = data / TOKENIZER_FILE
    train_tokenizer(VocabularyConfig(size=300, sample=100_000, out=str(file)))
    manifest = json.loads((data / MANIFEST_FILE).read_bytes())
    write_json(data / MANIFEST_FILE, manifest | {"tokenizer_sha256": read_tokenizer(str(file)).sha256})
    flags = ["--data", str(data), "--device", "cpu", "--global-batch", "2", "--micro-batch", "2", "--steps", "2"]
    flags += ["--cycle", "1+1", "--max-loss-spike", "0"]
    for name, part, said_at_once, text in (
        ("Summed", "first loss", "not a sum", "not a sum"),
        ("Spoiled", "evaluation", "evaluation mode", "eval()"),
    ):
        capfd.readouterr()
        assert command(run.main, *flags, "--model", f"wrong_models:{name},context_length=32", "--name", name) == 0
        assert said_at_once in " ".join(capfd.readouterr().out.split())
        summary = Path(f"runs/{name}/summary.md").read_text()
        assert part in summary
        assert text in summary
        result = json.loads(Path(f"runs/{name}/result.json").read_text())
        assert result["sample"] is None
        assert bool(result["no_sample_reason"]) == (name == "Summed"), "the other is described by its error"


@pytest.mark.usefixtures("working_folder")
def test_a_run_by_the_commands(
    command: Callable[..., int], refused: Callable[..., str], small_shards: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Its source stands in the working folder, as a user's does."""
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "mine.py"
    source.write_text((MODELS / "wrong_models.py").read_text())
    flags = ["--model", f"mine:Bigram,{SIZES}", "--data", str(small_shards), "--device", "cpu", "--cycle", "5+1"]
    assert command(plan.main, *flags, "--global-batch", "8", "--micro-batch", "4") == 0
    assert f"{257 * 257:,}" in capfd.readouterr().out
    flags += ["--global-batch", "8", "--micro-batch", "4"]
    assert command(run.main, *flags, "--name", "one", "--steps", "10") == 0, capfd.readouterr().err
    assert "66,049 parameters" in capfd.readouterr().out
    stored_json = json.loads(Path("runs/one/config.json").read_text())["model"]
    assert (stored_json["callable"], len(stored_json["source_sha256"])) == ("mine:Bigram", 64)
    assert command(run.main, "--resume", "one", "--steps", "12") == 0
    assert command(export.main, "--checkpoint", "one", "--to", "exported") == 0
    assert json.loads(Path("exported/config.json").read_text())["callable"] == "mine:Bigram"
    assert load_file("exported/model.safetensors")["rows.weight"].shape == (257, 257)
    source.write_text(source.read_text() + "\n# another\n")
    capfd.readouterr()
    assert "changed" in refused(run.main, "--resume", "one", "--steps", "14")
    assert "source_sha256" in refused(run.main, "--resume", "one", "--steps", "14", "--model", f"mine:Bigram,{SIZES}")


@pytest.fixture(scope="module")
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty working folder, and one Ray of one core for all searches and ladders of this module."""
    made = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setenv("PYTHONPATH", "")  # which Ray's workers inherit
        with ray_session(cpus=1, code=[str(MODELS / "own_models.py")]):
            yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_others_is_searched_profiled_and_climbs_a_ladder(
    command: Callable[..., int], ray_folder: Path, small_shards: Path, name: str
) -> None:
    flags = ["--data", str(small_shards), "--model", f"own_models:{name},{SIZES}", "--device", "cpu"]
    short = ["--trial-steps", "8", "--confirm-rounds", "0", "--searcher", "grid", "--global-batch", "2"]
    assert command(search.main, *flags, *short, "--memory-limit", "4GB", "--name", name) == 0
    best = load_config(f"runs/{name}/best.json")
    assert isinstance(best.model, CustomModel)
    assert best.model.callable == f"own_models:{name}"
    rows = [json.loads(path.read_text()) for path in Path(f"runs/{name}/trials").glob("m*.json")]
    assert {row["outcome"] for row in rows} == {"ok"}
    assert len(rows) == 2, "micro-batches 1 and 2"
    climbed = ["--suite", "loop", "--steps", "8", "--cycle", "8+1", "--rungs", "checkpointing"]
    assert command(ladder.main, *flags, *climbed, "--name", f"{name}-loop") == 0
    standings = json.loads(Path(f"runs/{name}-loop/rungs.json").read_text())["rows"]
    assert len(standings) == 2
    assert all(row["speed"] > 0 for row in standings)
    assert command(profile.main, *flags, "--global-batch", "4", "--micro-batch", "2", "--name", f"{name}-profile") == 0
    assert json.loads(Path(f"runs/{name}-profile/profile.json").read_text())


@pytest.mark.parametrize("name", ["own_models:Encoder", "wrong_models:Whole"])
def test_what_gives_no_logits_cannot_write(small_shards: Path, tmp_path: Path, name: str) -> None:
    folder, config = tmp_path / "runs" / "mute" / "checkpoints", config_of(small_shards, "gpt2", steps=4)
    config = config.replace(model=parse_model(f"{name},{SIZES}"))
    saved = make_trainer(resolve_local(config), checkpoints=folder).run().checkpoint
    with pytest.raises(UserError, match=rf"{name}.* cannot generate text.*logits"):
        generate.generate(generate.GenerateConfig(checkpoint=str(saved)))


def test_arguments_are_values_and_are_formatted_as_they_were_given() -> None:
    model = parse_model("own_models:gpt2,width=32,rate=0.5,name=x,tied=false,context_length=8")
    assert isinstance(model, CustomModel)
    assert model.values == {"width": 32, "rate": 0.5, "name": "x", "tied": False}
    assert re.fullmatch(r"own_models:gpt2,width=32,rate=0.5,name=x,tied=false,context_length=8", model.text)
    assert parse_model(model.text) == model


def test_a_model_that_needs_values_is_looked_at_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(
        "from wrong_models import Bigram\n\n"
        "class Asking(Bigram):\n"
        "    def forward(self, inputs, targets):\n"
        "        assert inputs.max().item() >= 0\n"
        "        return super().forward(inputs, targets)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model_info = custom.inspect_model(
        dataclasses.replace(parse_model("asking:Asking"), vocab_size=20, context_length=4)
    )
    assert (model_info.parameters, model_info.logits) == (400, True)


def test_a_model_may_print_and_is_trained_whatever_mode_it_comes_in(
    small_shards: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loud.py").write_text(
        "import atexit\nfrom wrong_models import Bigram\n\nprint('imported')\natexit.register(print, 'leaving')\n\n"
        "class Loud(Bigram):\n"
        "    def forward(self, inputs, targets):\n"
        "        print('called')\n"
        "        return super().forward(inputs, targets)\n\n"
        "def evaluated(vocab_size):\n    return Loud(vocab_size).eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of(small_shards, "gpt2").replace(model=parse_model(f"loud:evaluated,{SIZES}"))
    config = resolve(config, cpu_info())
    assert build_model(
        config.model, config.execution, config.optimization.optimizer, config.dataset.seed, torch.device("cpu")
    ).training
    assert measure_fit(config.step).weights == 4 * 257 * 257


@pytest.mark.parametrize("tied", [True, False])
def test_weights_go_to_hugging_faces_format_and_back_to_the_bit(
    small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Theirs by way of ours and, trained, ours by way of transformers."""
    monkeypatch.chdir(tmp_path)
    shape: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 257}
    GPT2LMHeadModel(GPT2Config(**shape, tie_word_embeddings=tied)).save_pretrained("theirs")
    config = config_of(small_shards, "gpt2", steps=2).replace(model=parse_model("hf:theirs"))
    trainer = make_trainer(resolve_local(config), checkpoints=tmp_path / "checkpoints")
    initial_weights, after = load_file("theirs/model.safetensors"), to_hf_state_dict(trainer.model)
    assert initial_weights.keys() == after.keys()
    assert all(torch.equal(initial_weights[name], after[name]) for name in initial_weights)
    hf_model = GPT2LMHeadModel.from_pretrained("theirs").eval()
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    torch.testing.assert_close(trainer.model.eval()(tokens)[..., :257], hf_model(tokens).logits, atol=1e-5, rtol=1e-5)

    write_model(Path(str(trainer.run().checkpoint)), Path("ours"))
    trained = to_hf_state_dict(trainer.model)
    assert not any(torch.equal(trained[name], initial_weights[name]) for name in initial_weights)
    again = make_trainer(resolve_local(config.replace(model=parse_model("hf:ours"))))
    GPT2LMHeadModel.from_pretrained("ours").save_pretrained("once more")
    for actual in (
        load_file("ours/model.safetensors"), to_hf_state_dict(again.model), load_file("once more/model.safetensors")
    ):  # fmt: skip
        assert actual.keys() == trained.keys()
        assert all(torch.equal(actual[name], trained[name]) for name in trained)


def test_a_folder_that_holds_no_gpt2_is_refused(
    refused: Callable[..., str], small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=9)).save_pretrained("theirs")
    model = parse_model("hf:theirs,dropout=0.5")
    assert parse_model(model.text) == model
    data, out = str(small_shards), ["--global-batch", "8", "--micro-batch", "4", "--device", "cpu", "--steps", "1"]
    for model, named in (("hf:nowhere", "hf:nowhere"), ("hf:theirs,layers=3", "layers=3"), ("hf:llama", "llama")):
        Path("llama").mkdir(exist_ok=True)
        Path("llama/config.json").write_text('{"model_type": "llama"}')
        assert named in refused(run.main, "--model", model, "--data", data, *out)
