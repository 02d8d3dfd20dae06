"""What a search prints: every ratio to the control with what is known of both."""

from train.config import TrainConfig
from tune.ranking import fit_to_win
from tune.record import Row
from tune.report import leaderboard
from tune.space import Candidate, make_space


def test_a_ratio_to_the_control_is_in_brackets_where_no_difference_is_shown() -> None:
    def row(size: int, speed: float, width: float) -> Row:
        return Row(
            f"{size}", 1, "probe", 0, Candidate(size), 1, "ok", "", 10.0, tokens_per_second=speed,
            low=speed * (1 - width), high=speed * (1 + width), memory=1,
        )  # fmt: skip

    space = make_space(TrainConfig(global_batch=8, micro_batch=2), (), device="cpu")

    def ratios(*rows: Row) -> dict[str, str]:
        assert len(fit_to_win(rows)) == len(rows)
        return {cells[1]: cells[5] for cells in leaderboard(rows, space)}

    fast, close = row(8, 1500, 0.02), row(4, 1020, 0.02)
    assert ratios(fast, close, row(2, 1000, 0.02)) == {"m8": "1.500 x", "m4": "(1.020 x)", "m2": "1.000 x"}
    assert ratios(fast, row(2, 1000, 0.3)) == {"m8": "(1.500 x)", "m2": "1.000 x"}, "the control's own width counts"
    assert ratios(fast) == {"m8": "-"}, "the control has no speed"
