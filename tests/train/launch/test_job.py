"""A run as its command hands it on: whether this process trains it, and what it continues from."""

from dataclasses import replace
from pathlib import Path

import pytest
from trainers import make_trainer

from infra.errors import UserError
from infra.storage.files import write_json
from pipeline.shards import read_manifest
from train.config import TrainConfig
from train.launch.job import RunPlan
from train.model_config import ModelConfig
from train.resolved import resolve_local
from train.run_files.run_folder import RunFolder


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=6, checkpoint_every=4,
        device="cpu",
    )  # fmt: skip


def test_one_worker_on_shards_trains_in_this_process_unless_a_cluster_is_named(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = RunPlan(config, read_manifest(config.dataset.data), RunFolder(tmp_path))
    assert plan.is_local
    assert not replace(plan, requested=config.replace(workers=2, global_batch=8)).is_local
    assert not replace(plan, address="1.2.3.4:6379").is_local
    monkeypatch.setenv("RAY_ADDRESS", "1.2.3.4:6379")
    assert not plan.is_local


def test_a_run_continues_from_its_newest_checkpoint_as_it_is_asked_now(config: TrainConfig, tmp_path: Path) -> None:
    home = RunFolder(tmp_path / "one")
    make_trainer(resolve_local(config), checkpoints=home.checkpoints).run()
    write_json(home.config, config.to_json())
    longer = config.replace(steps=9, learning_rate=1e-3)
    plan = RunPlan.continued(longer, "one", str(tmp_path))
    assert plan.progress
    assert (plan.progress.step, plan.progress.windows_consumed) == (6, 6 * 4)
    assert (plan.requested.duration.steps, plan.requested.optimization.learning_rate, plan.run_folder) == (
        9,
        1e-3,
        home,
    )
    assert plan.manifest.fingerprint == read_manifest(config.dataset.data).fingerprint
    for changed in ({"seed": 1}, {"optimizer": "muon"}, {"global_batch": 8}, {"mask_books": True}):
        (name,) = changed
        with pytest.raises(UserError, match=f"trained with --{name.replace('_', '-')}"):
            RunPlan.continued(longer.replace(**changed), "one", str(tmp_path))
