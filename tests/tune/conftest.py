"""What tests of the search share: one thread for steps of a millisecond, the benchmarks' simulations, and trials in
this process."""

import importlib
import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread would only wait for its neighbor."""
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(thread_count)


@pytest.fixture(scope="session")
def benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """A module of ``tests/benchmarks/search`` by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks" / "search")
        yield importlib.import_module


class InThisProcess:
    """What Ray Tune does for an experiment, in this process, whose memory is not the trial's alone."""

    def __init__(self) -> None:
        self.run_trial: Callable[[Any], Any] = lambda request: [*request.rows()][-1]

    def __call__(self, experiment: Any, rows: Any, on_started: Any, on_ended: Any, on_part: Any) -> None:
        from tune.experiment.ray_tune import ExperimentSearcher

        nodes = {socket.gethostname(): "its id"}
        searcher = ExperimentSearcher(experiment, rows, lambda: nodes, on_started, on_ended, on_part)
        for number in itertools.count():
            parameters = searcher.suggest(str(number))
            if searcher.failure:
                raise searcher.failure
            if parameters is None or parameters == searcher.FINISHED:
                return
            row, traceback = self.run_trial(parameters["request"])
            searcher.on_trial_complete(str(number), {"row": row, "traceback": traceback})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> InThisProcess:
    """A trial runs in this process. Only Ray is left out; tests/tune/test_search.py has trials through Ray."""
    from tune.experiment import session  # which imports Ray and MLflow, for which other tests need not wait

    runner = InThisProcess()
    monkeypatch.setattr(session, "run_trials", runner)
    return runner
