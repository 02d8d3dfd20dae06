"""What each kind of folder says in a report, from the files that are in it.

In: a folder. Out: a :class:`Page`. The files are read as plain JSON and CSV, because this package may not import those
that write them; a file that does not have what a report needs is refused as damaged.
"""

import csv
import io
import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from infra.errors import UserError
from infra.report import charts
from infra.report.charts import Bar, Point, Step
from infra.report.page import Page
from infra.units import GB

WIDEST_CONTROL = 0.25
"""Widest 95% interval of a ladder's control, as a fraction of its speed, from which a conclusion is drawn."""

UNITS = {"memory_limit": "B", "shard_size": "B", "time_budget": "s", "compile_time": "s", "trial_time": "s"}
"""Of settings that are numbers in files and need a unit on the command line."""

NOT_SETTINGS = ("name", "resume", "config", "dry_run", "out", "tracking_uri", "address")
"""Flags that say where a command ran and under which name, not what it did."""

MOST_ROWS = 200
"""Of a long table, such as that of dropped books; the file itself has them all."""


def page_of(folder: Path) -> Page:
    """The report on ``folder``, by its kind. Raises ``UserError`` for a folder of no known kind."""
    for file, (_, write) in KINDS.items():
        if (folder / file).is_file():
            return write(folder)
    kinds = "; ".join(f"{kind}: {file}" for file, (kind, _) in KINDS.items())
    raise UserError(
        f"{folder} has nothing to report, because the file that a finished command leaves is missing ({kinds}): give "
        "another folder, or finish what was begun there."
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Refuse ``path`` with a sentence where the block finds that it is missing or not as this program writes it."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as missing:
        raise UserError(f"{path} is missing: restore it, or run its command again.") from missing
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as damage:
        raise UserError(
            f"{path} is damaged ({type(damage).__name__}: {damage}): restore it, or run its command again."
        ) from damage


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _run(folder: Path) -> Page:
    page, path = Page("Training run", folder.name), folder / "result.json"
    with _reading(path):
        result = _json(path)
        speed, memory = result["throughput"], result["memory"]
        if speed:
            page.figures.append((f"{speed['tokens_per_second']:,.0f} tokens/s", _interval(speed)))
        page.figures.append((f"{memory['process'] / GB:.2f} GB", "peak memory of the process"))
        if result["val_loss"] is not None:
            page.figures.append((f"{result['val_loss']:.3f}", "validation loss"))
        if result["mfu"] is not None:
            page.figures.append((f"{result['mfu']:.1%}", "MFU"))
        if joules := result.get("joules_per_million_tokens"):
            page.figures.append((f"{joules / 1e3:,.3g} kJ", "energy of the GPU per million tokens"))
        page.figures.append((f"{result['train_tokens']:,}", f"training tokens in {result['steps']:,} steps"))
        page.figures.append((str(result["outcome"]), str(result["reason"])))
        if wrong := result.get("diagnosis"):
            page.section("What was wrong")
            page.table((), [(str(name), str(text)) for name, text in wrong["rows"]])
            if wrong["advice"]:
                page.text(str(wrong["advice"]))
            if wrong["command"]:
                page.code(str(wrong["command"]))
    if (folder / "cycles.jsonl").is_file():
        with _reading(folder / "cycles.jsonl"):
            _curves(page, folder / "cycles.jsonl")
    if result.get("sample"):
        page.section("What the model writes")
        page.code(str(result["sample"]))
    config = folder / "config.json"
    with _reading(config):
        settings = _json(config)
        command = (
            f"python -m train.run --config {shlex.quote(str(config))} --name {shlex.quote(folder.name + '-again')}"
        )
        data = {"data": settings["data"], "fingerprint of the data": result["data_fingerprint"]}
        _provenance(page, path, command, data | {"device": result["device"]})
        _settings(page, settings)
    return page


def _curves(page: Page, path: Path) -> None:
    """The losses and the speed of a run's cycles."""
    cycles = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    if not cycles:
        return
    page.section("Curves")
    losses = {"training": [(cycle["train_tokens"], cycle["train_loss"]) for cycle in cycles]}
    losses["validation"] = [(c["train_tokens"], c["val_loss"]) for c in cycles if c["val_loss"] is not None]
    shown = {name: line for name, line in losses.items() if line}
    page.parts.append(charts.lines("Loss", shown, "training tokens", "nats per token"))
    speeds = [(cycle["train_tokens"], cycle["cycle_tokens"] / cycle["seconds"]) for cycle in cycles]
    page.parts.append(charts.lines("Speed of each cycle", {"": speeds}, "training tokens", "tokens/s"))


def _ladder(folder: Path) -> Page:
    page, path = Page("Ladder", folder.name), folder / "standings.json"
    with _reading(path):
        found = _json(path)
        rows = found["rows"]
        page.kind = f"Ladder, suite {found['suite']}"
        ran = [row for row in rows if row["speed"] is not None]
        best = max(ran, key=lambda row: row["speed"])
        over = f", {_ratio(best['total'])} the baseline" if best["total"] else ""
        page.figures = [
            (f"{rows[0]['speed']:,.0f} tokens/s", "baseline"),
            (f"{best['speed']:,.0f} tokens/s", f"fastest: {best['name']}{over}"),
            (f"{len(ran) - 1} of {len(rows) - 1}", "rungs with a speed"),
        ]
        page.section("Speed of each rung")
        bars = [Bar(row["name"], row["speed"], row["low"], row["high"], f"{row['speed']:,.0f}") for row in ran]
        page.parts.append(charts.bars("Training tokens/s, with 95% interval", bars))
        if found.get("cumulative") and len(steps := list(_steps(ran))) > 1:
            page.parts.append(charts.waterfall("From the baseline to the last rung, tokens/s", steps))
            page.text("Relative to the runs of the baseline around each rung; in percent its share of the whole gain.")
        if kept := found.get("losses"):
            losses = {row["name"]: kept[row["name"]] for row in rows if row["name"] in kept}
            varied = ("control, all runs", found["control_losses"])
            title = "Training loss of each rung, beside the range of the control's runs"
            page.parts.append(charts.lines(title, losses, "training tokens", "nats per token", band=varied))
        cells = [
            (
                row["name"] + " *" * bool(row["changes_numerics"]),
                row["batch"],
                *(_gigabytes(row, name) for name in ("memory", "predicted_memory")),
                f"{row['speed']:,.0f}",
                f"{row['low']:,.0f} to {row['high']:,.0f}",
                _ratio(row["total"]),
                _number(row["mfu"], ".1%"),
                _number(row["loss"], ".3f"),
            )
            for row in ran
        ]
        page.table(
            ("rung", "batch", "GB", "predicted", "tokens/s", "95% interval", "over baseline", "MFU", "loss"), cells
        )
        page.text(
            "GB is the peak memory of the process. A ratio in brackets may be no difference. * marks a rung that "
            "changes the numerics, so that its loss may differ. The loss is at equal tokens."
        )
        page.points([f"{row['name']}: not run, {row['reason']}" for row in rows if row["reason"]])
        given = {"device": found["device"], "commit": found["commit"]}
    _pictures(page, folder, skip=("speed", *["loss"] * ("losses" in found)))
    options = folder / "ladder.json"
    with _reading(options):
        kept = _json(options)
        _provenance(page, path, _command("train.ladder", kept["options"], folder.name), given, kept["key"])
        _settings(page, kept["options"])
    return page


def _steps(ran: list[dict[str, Any]]) -> Iterator[Step]:
    """The steps of a cumulative ladder, each with its share of the gain of the last one over the baseline."""
    base = ran[0]["speed"]
    yield Step(ran[0]["name"], 0.0, base, f"{base:,.0f}")
    before, whole = base, base * (ran[-1]["total"]["ratio"] - 1) if ran[-1]["total"] else 0.0
    for row in ran[1:]:
        after = base * row["total"]["ratio"]
        share = f" ({(after - before) / whole:+.0%})" if whole > 0 else ""
        yield Step(row["name"], before, after, f"{after - before:+,.0f}{share}")
        before = after


def _ratio(difference: Mapping[str, float] | None) -> str:
    """``1.23x``, in brackets where it may be no difference: the interval includes 1, or the control varied too much."""
    if not difference:
        return "-"
    text = f"{difference['ratio']:.2f}x"
    unclear = difference["low"] <= 1 <= difference["high"] or difference["control_width"] > WIDEST_CONTROL
    return f"({text})" if unclear else text


def _search(folder: Path) -> Page:
    page, path = Page("Search for the fastest configuration", folder.name), folder / "trials.csv"
    with _reading(path):
        table = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8").strip()))
        rows = list(table)
        if "tokens_per_second" not in (table.fieldnames or ["tokens_per_second"]):
            raise ValueError("no column tokens_per_second")
        rows.sort(key=lambda row: float(row["tokens_per_second"] or 0), reverse=True)
        names = list(rows[0]) if rows else ["micro_batch", "key"]
        knobs = names[1 : names.index("key")]
        first = min(rows, key=lambda row: int(row["number"]), default={})
    with _reading(folder / "search.json"):
        kept = _json(folder / "search.json")
        limit, config = kept["identity"]["memory_limit"], dict(kept["config"])
        training = config.pop("training")
    bars: list[Bar] = []
    if (folder / "best.json").is_file():
        with _reading(folder / "best.json"):
            best = _json(folder / "best.json")
            winner, measured = best["config"], best["measured"]
            batch = f"{winner['micro_batch']} x {winner['global_batch'] // (winner['micro_batch'] * winner['workers'])}"
            speed = measured["tokens_per_second"]
            page.figures = [
                (f"{speed:,.0f} tokens/s", _interval(measured)),
                (batch, "micro-batch x accumulation"),
                (f"{measured['memory_bytes'] / GB:.2f} GB", f"peak memory, of {limit / GB:.2f} GB"),
            ]
            label = _label(f"winner: {batch}", winner, first, knobs)
            bars.append(Bar(label, speed, measured["low"], measured["high"], f"{speed:,.0f}"))
    else:
        page.figures = [("no winner", "no candidate ran within the limit")]
    with _reading(path):
        page.figures.append((f"{len(rows)}", "trials"))
        page.section("Trials")
        labels = {
            number: _label(f"{number}: {row['micro_batch']} x {row['accumulation']}", row, first, knobs)
            for row in rows if (number := row["number"])
        }  # fmt: skip
        bars += [
            Bar(
                labels[row["number"]], float(row["tokens_per_second"]), _float(row["low"]), _float(row["high"]),
                f"{float(row['tokens_per_second']):,.0f}",
            )
            for row in rows[:40] if row["tokens_per_second"]
        ]  # fmt: skip
        if bars:
            title = "Tokens/s with 95% interval, of the winner and of each trial"
            page.parts.append(charts.bars(title, bars))
        _memory(page, rows, labels, limit)
        _by_micro_batch(page, rows, knobs, limit)
        page.table(
            ("trial", "batch", *["knobs"] * bool(knobs), "tokens/s", "95% interval", "GB", "stage", "outcome"),
            [
                (
                    row["number"], f"{row['micro_batch']} x {row['accumulation']}",
                    *[_knobs(row, knobs)] * bool(knobs),
                    f"{float(row['tokens_per_second']):,.0f}" if row["tokens_per_second"] else "-",
                    f"{float(row['low']):,.0f} to {float(row['high']):,.0f}" if row["low"] else "-",
                    f"{float(row['memory']) / GB:.2f}" if row["memory"] else "-",
                    row["stage"], f"{row['outcome']}: {row['reason']}",
                )
                for row in rows
            ],
        )  # fmt: skip
        page.text("A batch is the micro-batch x how many are accumulated. GB is the peak memory of the process.")
        devices = sorted({row["device"] for row in rows if row["device"]})
    with _reading(folder / "search.json"):
        command = _command("tune.search", training | config, folder.name)
        given = {"device": ", ".join(devices), "fingerprint of the data": kept["identity"]["data"]}
        _provenance(page, path, command, given, kept["parent"])
        _settings(page, training | config)
    return page


def _memory(page: Page, rows: list[dict[str, str]], labels: Mapping[str, str], limit: int) -> None:
    """The memory of the trials: against their speed, with the limit and what nothing beats in both; and predicted."""
    shown = [(float(row["memory"]) / GB, row) for row in rows if row["memory"]]
    fast = [
        Point(x, float(row["tokens_per_second"]), labels[row["number"]]) for x, row in shown if row["tokens_per_second"]
    ]
    if fast:
        front: list[tuple[float, float]] = []
        for point in sorted(fast, key=lambda point: (point.x, -point.y)):
            if not front or point.y > front[-1][1]:
                front.append((point.x, point.y))
        title = "Speed against memory, with those that none beats in both"
        page.parts.append(charts.points(title, fast, "GB", "tokens/s", limit=limit / GB, front=front))
    known = [(x, float(row["predicted_memory"]) / GB, row) for x, row in shown if row.get("predicted_memory")]
    if known:
        compared = [Point(predicted, x, labels[row["number"]]) for x, predicted, row in known]
        title = "Peak memory, measured against predicted; on the line both are the same"
        page.parts.append(charts.points(title, compared, "predicted GB", "measured GB", equal=True))


def _by_micro_batch(page: Page, rows: list[dict[str, str]], knobs: list[str], limit: int) -> None:
    """What each combination of knobs holds and how fast it is, by micro-batch; the mean of trials that ran again."""
    for title, column, y, unit, most in (
        ("Peak memory by micro-batch", "memory", "GB", GB, limit / GB),
        ("Speed by micro-batch", "tokens_per_second", "tokens/s", 1, None),
    ):
        seen: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            if row[column]:
                sizes = seen.setdefault(_knobs(row, knobs), {})
                sizes.setdefault(int(row["micro_batch"]), []).append(float(row[column]) / unit)
        lines = {name: [(size, fmean(sizes[size])) for size in sorted(sizes)] for name, sizes in sorted(seen.items())}
        if lines:
            page.parts.append(charts.lines(title, lines, "micro-batch (sequences)", y, limit=most))


def _knobs(row: Mapping[str, str], knobs: list[str]) -> str:
    """``compile whole, precision bf16``."""
    return ", ".join(f"{knob} {row[knob]}" for knob in knobs)


def _label(what: str, values: Mapping[str, Any], first: Mapping[str, str], knobs: list[str]) -> str:
    """``what``, with the knobs in which ``values`` are not those of the ``first`` trial."""
    return ", ".join([what, *(f"{knob} {values[knob]}" for knob in knobs if str(values[knob]) != first[knob])])


def _data(folder: Path) -> Page:
    page, path = Page("Data set of token shards", folder.name), folder / "manifest.json"
    with _reading(path):
        manifest = _json(path)
        counts, splits = manifest["report"], manifest["splits"]
        page.figures = [
            (f"{counts['tokens']:,}", "tokens"),
            (f"{counts['books_kept']:,} of {counts['books_in']:,}", "books kept"),
            (f"{counts['chars'] / max(counts['tokens'], 1):.2f}", "characters per token"),
            (f"{sum(shard['bytes'] for shard in manifest['shards']) / 1e6:,.1f} MB", "of shards"),
        ]
        page.section("Splits")
        page.table(
            ("split", "books", "tokens", "characters", "shards"),
            [
                (name, *(f"{sums[of]:,}" for of in ("books", "tokens", "chars", "shards")))
                for name, sums in splits.items()
            ],
        )
        lengths = sorted(counts["tokens_a_book"].items(), key=lambda bin: (bin[0].startswith("over"), _bound(bin[0])))
        bars = [Bar(label, number, None, None, f"{number:,}") for label, number in lengths]
        page.section("Books")
        page.parts.append(charts.bars("Books by their number of tokens", bars))
        dropped = counts["books_dropped"]
        page.text("Dropped: " + (", ".join(f"{number:,} {reason}" for reason, number in dropped.items()) or "none"))
        config = dict(manifest["config"])
        given = {"fingerprint": manifest["fingerprint"], "files read": f"{manifest['inputs']['files']:,}"}
    quarantine = folder / "quarantine.jsonl"
    if quarantine.is_file():
        with _reading(quarantine):
            lines = quarantine.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines[:MOST_ROWS]]
            if rows:
                page.table(("dropped book", "reason", ""), [(r["book"], r["reason"], r["detail"]) for r in rows])
            if len(lines) > MOST_ROWS:
                page.text(f"The first {MOST_ROWS} of {len(lines):,}; {quarantine.name} lists all.")
    with _reading(path):
        sources = [str(source) for source in config.pop("sources")]
        command = _command("pipeline.tokenize", config, None, [*sources, "--out", f"{folder}-again"])
        _provenance(page, path, command, given)
        _settings(page, config)
    return page


def _bound(label: str) -> int:
    """The number of a label such as ``up to 1,000``."""
    return int(label.rsplit(" ", 1)[1].replace(",", ""))


def _profile(folder: Path) -> Page:
    page, path = Page("Profile of a training step", folder.name), folder / "profile.json"
    with _reading(path):
        found = _json(path)
        page.figures = [
            (f"{found['step']:.2f} ms", "per step"),
            (f"{found['forward']:.2f} ms", "forward"),
            (f"{found['backward']:.2f} ms", "backward"),
            (str(found["attention"]), "attention kernel"),
        ]
        page.section("Findings")
        page.points([str(line) for line in found["findings"]])
        page.section("Time by class")
        spent = {**found["by_class"], **{f"idle: {cause}": ms for cause, ms in found["gaps"].items()}}
        ranked = sorted(spent.items(), key=lambda item: -item[1])
        bars = [Bar(kind, ms, None, None, f"{ms:.2f} ms") for kind, ms in ranked]
        page.parts.append(charts.bars("Milliseconds per step", bars))
        page.section("Kernels")
        page.table(
            ("kernel", "class", "calls", "ms"),
            [(k["name"], k["kind"], f"{k['calls']:,}", f"{k['milliseconds']:.3f}") for k in found["kernels"][:30]],
        )
    _pictures(page, folder)
    _provenance(page, path, None, {})
    return page


def _pictures(page: Page, folder: Path, skip: tuple[str, ...] = ()) -> None:
    """Add the folder's pictures, but those that a chart replaces."""
    pictures = [path for path in sorted(folder.glob("*.png")) if path.stem not in skip]
    if pictures:
        page.section("Pictures")
    for path in pictures:
        page.picture(path, path.stem.replace("_", " "))


def _provenance(
    page: Page, path: Path, command: str | None, given: Mapping[str, Any], key: Mapping[str, Any] | None = None
) -> None:
    """Where the figures come from: what is ``given``, when ``path`` was written, the run in MLflow, the command."""
    page.section("Provenance")
    finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    rows = {"folder": str(path.parent.resolve()), "finished": finished} | dict(given)
    kept = path.parent / "tracking.json"
    if key or kept.is_file():
        with _reading(kept):
            key = key or dict(_json(kept))
            rows |= {"MLflow store": key["store"], "MLflow run": key["run_id"]}
    page.table((), [(name, str(value)) for name, value in rows.items() if value])
    if command:
        page.text("The command that repeats it:")
        page.code(command)


def _settings(page: Page, settings: Mapping[str, Any]) -> None:
    """Add all settings as a table."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    page.section("Settings")
    page.table((), [(name, json.dumps(value, ensure_ascii=False)) for name, value in flat.items() if value is not None])


def _command(module: str, settings: Mapping[str, Any], name: str | None, words: list[str] | None = None) -> str:
    """The command line of ``module`` with these settings as flags, under a ``name`` that is free."""
    words = list(words or [])
    for setting, value in settings.items():
        flag = "--" + setting.replace("_", "-")
        if setting in NOT_SETTINGS or value is None:
            continue
        if setting == "model" and isinstance(value, dict):
            words += [flag, ",".join(["gpt2-124m", *(f"{part}={str(v).lower()}" for part, v in value.items())])]
        elif isinstance(value, dict):  # of settings that are flags of their own
            words += shlex.split(_command("", value, None))[3:]
        elif isinstance(value, bool):
            words += [flag] * value
        elif isinstance(value, list):
            words += [flag, *map(str, value)] * bool(value)
        elif setting in UNITS:
            words += [flag, f"{value:.15g}{UNITS[setting]}"]
        else:
            words += [flag, str(value)]
    words += ["--name", f"{name}-again"] if name else []
    return shlex.join(["python", "-m", module, *words])


def _interval(speed: Mapping[str, float]) -> str:
    return f"95%: {speed['low']:,.0f} to {speed['high']:,.0f}"


def _gigabytes(row: Mapping[str, Any], name: str) -> str:
    """A size of a ladder's row in GB; earlier versions wrote GiB."""
    if name not in row:
        earlier = row["gib" if name == "memory" else "predicted_gib"]
        return _number(earlier and earlier * 2**30 / GB, ".2f")
    return _number(row[name] and row[name] / GB, ".2f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _float(text: str) -> float | None:
    return float(text) if text else None


KINDS = {
    "standings.json": ("a ladder", _ladder),
    "trials.csv": ("a search", _search),
    "profile.json": ("a profile", _profile),
    "manifest.json": ("a data set", _data),
    "result.json": ("a run", _run),
}
"""By the file that a finished command leaves: what it is called, and how its folder is reported."""
