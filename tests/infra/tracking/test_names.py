"""The names of metrics and params, by which a run's page begins with what people look for."""

from infra.tracking.names import group_under_detail, non_default_params


def test_the_metrics_that_a_run_names_come_first_and_the_others_under_detail() -> None:
    found = group_under_detail({"memory/b": 1, "loss/train": 2, "time/x": 3}, ["loss/train"])
    assert list(found.items()) == [("loss/train", 2), ("detail/memory/b", 1), ("detail/time/x", 3)]


def test_params_are_the_settings_that_are_not_the_default() -> None:
    usual = {"steps": 10, "model": {"width": 64, "layers": 2}, "seed": 0}
    now = {"steps": 20, "model": {"width": 64, "layers": 3}, "seed": 0, "unknown before": None}
    assert non_default_params(now, usual) == {
        "changed.steps": 20,
        "changed.model.layers": 3,
        "changed.unknown before": None,
    }
    assert non_default_params(usual, usual) == {}
