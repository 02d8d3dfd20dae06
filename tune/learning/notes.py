"""Notes on the results of a search for the lowest loss: how they were made, and what could be better."""

from collections.abc import Sequence

from infra.cli.units import format_count, format_duration
from train.loop.epochs import MANY_EPOCHS
from tune.learning.plan import LearningSearch
from tune.learning.results import CandidateResult, LearningResults
from tune.learning.space import format_value
from tune.learning.text import format_time
from tune.trial.row import TrialRow

NOISE_RATIO = 4.0
"""Ratio to the gradient noise scale above which a global batch is wasteful. At this ratio, a run needs five times the
tokens of small batches, and twice the batch would save only a tenth of the steps."""

MAX_USEFUL_EXTRAPOLATION = 4.0
"""Ratio of the full time to the longest rung above which the note on extrapolation asks for a longer search."""


def notes_on(search: LearningSearch, rows: Sequence[TrialRow], results: LearningResults) -> list[str]:
    """Return all notes, each a sentence without a capital letter and a period."""
    notes = [
        f"losses are held-out losses in nats/token, on the same {format_count(search.val_windows, 'window')} for all "
        "candidates; times are of a run with the settings, at the measured speed"
    ]
    if results.candidates:
        notes += method_notes(results)
    winner = results.winner
    if winner is None:
        return notes
    if not any(rung.has_learned for row in rows for rung in row.rungs):
        notes.append(
            "no candidate has learned more than the frequencies of tokens, so their losses say little about the "
            f"settings: use a longer --train-time than {format_duration(search.train_time)}"
        )
    notes += edge_notes(search, winner)
    notes += noise_notes(search, rows)
    notes += epoch_notes(search, results, winner)
    learned = {result.candidate for result in results.candidates}
    tried = learned | {row.candidate for row in rows if row.stage == "learn"}
    if untried := [candidate for candidate in search.space.candidates if candidate not in tried]:
        reason = "because those near the best one were not better"
        if search.config.search_time is not None:
            reason = "because those near the best one were not better, or --search-time had passed"
        notes.append(f"{len(untried)} of {format_count(len(search.space.candidates), 'candidate')} not tried, {reason}")
    return notes


def method_notes(results: LearningResults) -> list[str]:
    """Return the notes on predictions and brackets."""
    notes = [
        '"vs control" is the loss minus the control\'s, from pairs with the same seed, in brackets if it is not '
        "significant"
    ]
    if any(results.is_tied(result) for result in results.candidates):
        notes.append("candidates marked as tie may be as good as the winner")
    if any(result.is_stopped for result in results.candidates):
        notes.append("candidates marked as stopped were above the median of the losses at a rung")
    winner = results.winner
    ratio = winner.law.extrapolation(results.train_time) if winner else 1.0
    if winner and ratio > 1:
        note = (
            f"losses after {format_time(winner.longest_rung)} are extrapolated by the law E + A t^-a. The 95% interval "
            "of a single run is that of all laws that are compatible with the rungs, and of another change of the "
            "slope as large as the last one. It cannot hold a phase of learning that begins later"
        )
        if ratio > MAX_USEFUL_EXTRAPOLATION:
            note += f". A factor of {ratio:.3g} is far: a longer --search-time makes the interval narrower"
        notes.append(note)
    return notes


def edge_notes(search: LearningSearch, winner: CandidateResult) -> list[str]:
    """Return a note for each knob whose best value is the smallest or largest of its values."""
    notes = []
    for name, value in search.space.edges(winner.candidate):
        is_smallest = value == search.space.values[name][0]
        extreme, other = ("smallest", "smaller") if is_smallest else ("largest", "larger")
        notes.append(
            f"the best {name}, {format_value(value)}, is the {extreme} of its values. Add {other} values to --knobs "
            f"{name}=..., because they may be better"
        )
    return notes


def noise_notes(search: LearningSearch, rows: Sequence[TrialRow]) -> list[str]:
    """Return the note on the gradient noise scale, which names the global batches far above it."""
    scale = next((row.noise_scale for row in rows if row.noise_scale), None)
    if scale is None:
        return []
    text = (
        f"the control's gradient noise scale is {scale.middle:,.0f} sequences (95% CI {scale.low:,.0f} to "
        f"{scale.high:,.0f})"
    )
    batches = sorted({search.space.config(candidate).batch.global_batch for candidate in search.space.candidates})
    wasteful = next((batch for batch in batches if batch > NOISE_RATIO * scale.middle), None)
    if wasteful is None:
        return [text]
    or_more = " or more" if wasteful < batches[-1] else ""
    return [
        f"{text}. A global batch of {wasteful:,}{or_more} is more than {NOISE_RATIO:g} times as large, so that it "
        "needs far more tokens for the same loss (arXiv 1812.06162)"
    ]


def epoch_notes(search: LearningSearch, results: LearningResults, winner: CandidateResult) -> list[str]:
    """Return the note on a final run that reads its data more than once."""
    tokens = search.manifest.splits["train"]["tokens"]
    epochs = winner.speed.middle * results.train_time / tokens
    if epochs <= 1:
        return []
    note = (
        f"{format_duration(results.train_time)} of training at {winner.speed.middle:,.0f} tokens/s is {epochs:.1f} "
        f"epochs of the data, {tokens:,} tokens"
    )
    longest = winner.longest_rung * winner.speed.middle / tokens
    if longest <= 1:
        note += "; the rungs saw less than one, so that the predicted loss may be too low"
    if epochs > MANY_EPOCHS:
        note += f". More than {MANY_EPOCHS} epochs improve a model less and less (arXiv 2305.16264): use more books"
    return [note]
