"""What tests of the search share: one thread for steps of a millisecond, the benchmarks' simulations, and trials in
this process."""

import importlib
import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread would only wait for its neighbour."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """A module of ``tests/benchmarks/search`` by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks" / "search")
        yield importlib.import_module


def _drive(proposals: Any, resources: object) -> None:
    """What Ray Tune does for an experiment, in this process, whose memory is not the trial's alone."""
    from tune.experiment.ray_tune import run_trial

    for number in itertools.count():
        given = proposals.suggest(str(number))
        if proposals.failure:
            raise proposals.failure
        if given == proposals.FINISHED or given is None:
            return
        proposals.on_trial_complete(str(number), run_trial(given["request"]))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial runs in this process. Only Ray is left out; tests/tune/test_search.py has trials through Ray."""
    from tune.experiment import session  # which imports Ray and MLflow, for which other tests need not wait
    from tune.experiment.trials import Experiment

    monkeypatch.setattr(session, "run_tuner", _drive)
    monkeypatch.setattr(session, "ray_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(session, "trial_nodes", lambda _: {socket.gethostname(): "its id"})
    monkeypatch.setattr(Experiment, "resources", lambda _: {})
