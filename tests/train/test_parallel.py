"""Several workers compute what one does: the same losses at the same global batch, copied or sharded, also resumed."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.config import Cycle, ModelConfig, TrainConfig
from train.loop import Trainer
from train.result import CycleReport

WORKER = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from train.config import config_from_json
from train.loop import Trainer

dist.init_process_group("gloo")
job = json.loads(sys.argv[1])
reports = []
path = lambda name: Path(job[name]) if job[name] else None
calls = iter(range(10**9))
trainer = Trainer(
    config_from_json(job["config"], "test"), on_cycle=reports.append, checkpoints=path("checkpoints"),
    resume=path("resume"), should_stop=lambda: next(calls) + 1 >= job["stop"],
)
result = trainer.run()
if dist.get_rank() == 0:
    losses = [[r.step, r.step_losses, r.val_loss] for r in reports]
    print(json.dumps([result.outcome, result.steps, result.checkpoint, losses]))
else:
    assert not reports, "only the first worker reports"
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's thread may still hold a tensor and abort while Python ends (pytorch/pytorch, issue 190489)
"""


def train_together(config: TrainConfig, **options: Any) -> tuple[str, int, str | None, list[Any]]:
    """Outcome, steps, checkpoint and losses of ``config`` run by its number of processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"config": config.to_json(), "checkpoints": None, "resume": None, "stop": 10**9} | options
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(config.workers),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(job)], env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(config.workers)
    ]  # fmt: skip
    ended = [worker.communicate(timeout=120) for worker in workers]
    for worker, (_, errors) in zip(workers, ended, strict=True):
        assert worker.returncode == 0, errors
    return json.loads(ended[0][0].strip().splitlines()[-1])


def train_alone(config: TrainConfig) -> list[Any]:
    reports: list[CycleReport] = []
    Trainer(config, on_cycle=reports.append).run()
    return [[r.step, r.step_losses, r.val_loss] for r in reports]


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(
        data=small_shards, model=small_model, global_batch=8, micro_batch=2, steps=14, cycle=Cycle(5, 2),
        precision="fp32", device="cpu", learning_rate=3e-3, warmup_steps=5, optimizer="adamw",
    )  # fmt: skip


def same(found: list[Any], expected: list[Any]) -> None:
    assert [step for step, _, _ in found] == [step for step, _, _ in expected]
    for (_, losses, val), (_, wanted, wanted_val) in zip(found, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert val == pytest.approx(wanted_val, rel=1e-4)


@pytest.mark.parametrize("shard", [False, True])
def test_two_workers_compute_what_one_does(config: TrainConfig, shard: bool) -> None:
    outcome, steps, _, losses = train_together(dataclasses.replace(config, workers=2, shard=shard, loss_chunks=2))
    assert (outcome, steps) == ("finished", 14)
    same(losses, train_alone(config))


def test_dropout_goes_on_where_it_was_on_every_worker(config: TrainConfig, tmp_path: Path) -> None:
    together = dataclasses.replace(config, workers=2, model=dataclasses.replace(config.model, dropout=0.2))
    *_, straight = train_together(together)
    _, steps, saved, before = train_together(together, checkpoints=str(tmp_path), stop=7)
    assert steps == 7
    *_, after = train_together(together, checkpoints=str(tmp_path), resume=saved)
    assert [*before, *after] == straight


def test_sharded_and_alone_continue_each_other(config: TrainConfig, tmp_path: Path) -> None:
    together = dataclasses.replace(config, workers=2, shard=True)
    outcome, steps, saved, before = train_together(together, checkpoints=str(tmp_path), stop=7)
    assert (outcome, steps) == ("interrupted", 7)
    assert saved
    reports: list[CycleReport] = []
    alone = Trainer(
        dataclasses.replace(config, micro_batch=4), on_cycle=reports.append, checkpoints=tmp_path, resume=Path(saved),
        should_stop=lambda: len(reports) > 0,
    )  # fmt: skip
    middle = alone.run()
    assert middle.checkpoint
    _, _, _, after = train_together(together, checkpoints=str(tmp_path), resume=middle.checkpoint)
    same([*before, *([r.step, r.step_losses, r.val_loss] for r in reports), *after], train_alone(config))
