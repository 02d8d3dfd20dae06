"""llm.c as a peer: the data that it reads, what it prints, and what is said where it cannot be built."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FILE = Path(__file__).with_name("llm_c.py")
PRINTED = """| num_parameters        | 124475904     |
step    1/3 | loss 11.009863 (+nanz)| norm 15.2 (+nanz)| lr 1.00e-04 | 2700.25 ms | 40.1% bf16 MFU | 6067 tok/s
step    2/3 | loss 10.500000 (+nanz)| norm 9.1 (+nanz)| lr 1.00e-04 | 100.00 ms | 50.0% bf16 MFU | 163840 tok/s
step    3/3 | loss 10.250000 (+nanz)| norm 7.0 (+nanz)| lr 1.00e-04 | 102.00 ms | 50.0% bf16 MFU | 162000 tok/s
"""


@pytest.fixture(scope="module")
def llm_c() -> Any:
    spec = importlib.util.spec_from_file_location("llm_c", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_steps_are_read(llm_c: Any) -> None:
    row = llm_c.parse(PRINTED, 16 * 1024)
    assert row["losses"] == [11.009863, 10.5, 10.25]
    assert row["tokens_per_second"] == pytest.approx(16 * 1024 / 0.101)
    assert llm_c.parse("no step", 1)["outcome"] == "failed"


def test_its_file_of_tokens(llm_c: Any, small_shards: Path, tmp_path: Path) -> None:
    count = llm_c.write_tokens(small_shards, tmp_path / "tokens.bin", 1000)
    content = (tmp_path / "tokens.bin").read_bytes()
    assert np.frombuffer(content[:12], np.int32).tolist() == [20240520, 1, 1000]
    assert len(content) == 256 * 4 + 2 * count


def test_it_is_built_and_run_for_the_steps_of_a_micro_batch(llm_c: Any, small_shards: Path, tmp_path: Path) -> None:
    program = tmp_path / "train_gpt2cu"
    (tmp_path / "train_gpt2.cu").touch()
    (tmp_path / "steps.txt").write_text(PRINTED)
    program.write_text('#!/bin/sh\necho "$@" > arguments.txt\ncat steps.txt\n')
    program.chmod(0o755)
    row = llm_c.measure(tmp_path, small_shards, 4, 3, context=64)
    assert (row["outcome"], row["micro_batch"]) == ("ok", 4)
    words = (tmp_path / "arguments.txt").read_text().split()
    assert words[words.index("-b") + 1 :][0] == "4"
    assert words[words.index("-d") + 1 :][0] == "256"
    program.write_text("#!/bin/sh\necho 'CUDA error: out of memory' >&2; exit 1\n")
    assert llm_c.measure(tmp_path, small_shards, 4, 3, context=64)["outcome"] == "out of memory"


def test_what_is_missing_is_named(llm_c: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "train_gpt2.cu" in llm_c.obstacle(tmp_path)
    (tmp_path / "train_gpt2.cu").touch()
    monkeypatch.setenv("PATH", "")
    assert "nvcc" in llm_c.measure(tmp_path, tmp_path, 4, 3)["reason"]
