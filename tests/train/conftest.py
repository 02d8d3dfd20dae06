"""Settings for tests that train: one thread, which is faster for models this small, above all on a busy machine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
