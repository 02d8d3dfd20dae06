"""Entry: ``python -m train.plan`` predicts the memory, arithmetic, time and cost of a run."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from infra.cli import command
from infra.cli.console import console
from infra.cli.table import Report, Table
from infra.device.first_run import SAMPLE_SECONDS, NextCommand
from infra.device.hardware import KNOWN_GPUS, DeviceInfo, device_info
from infra.errors import UserError
from pipeline.next_command import next_command
from pipeline.shards import Manifest
from train.config import ALL_GPUS, AUTO, PlanOptions, ResolvedConfig, TrainConfig
from train.model_config import AnyModel, ModelConfig
from train.resolved import prepare_for_plan, resolve_for_plan

if TYPE_CHECKING:
    from train.reporting.scaling import MeasuredLaw


def main() -> None:
    command.run(plan, PlanOptions, module="train.plan")


def plan(options: PlanOptions) -> None:
    """Print the plan of a run, or of the run on every known GPU.

    torch is imported after the flags are checked, so that invalid flags are reported at once.
    """
    measured = read_runs(options)  # Runs without a law are rejected before anything is printed.
    if options.budget is not None or options.hours is not None:
        plan_budget(options, measured)
    elif options.gpu == ALL_GPUS:
        plan_all_gpus(options, measured)
    else:
        plan_run(options, measured)


def plan_run(options: PlanOptions, measured: "MeasuredLaw | None") -> None:
    """Print the plan of a run on one type of device: variants that save memory, and details of the run."""
    from train.data.assumed import describe_data
    from train.estimate import forecast, network
    from train.estimate.gpu_rates import load_gpu_rates
    from train.estimate.memory import predict_peak
    from train.estimate.prediction import Range, predict, prediction_table
    from train.reporting.report import print_device_lines

    requested = options.training
    is_absent = requested.execution.device == "cuda" and device_info().kind == "cpu"
    gpu = options.gpu or ("A100" if is_absent else None)  # An A100 stands in for a GPU that is not here.
    gpu_rates = load_gpu_rates(gpu).with_memory_limit(options.memory_limit) if gpu else None
    info = gpu_rates.device_info if gpu_rates else device_info().with_memory_limit(options.memory_limit)
    training, manifest = prepare_for_plan(requested.replace(device="cuda") if gpu_rates else requested)
    config = resolve_for_plan(training, info)
    model, workers = config.model, config.batch.workers
    print_model(model, config.describe_execution(), describe_data(manifest, model, requested.dataset.source))
    if config.execution.device == "cuda":
        print_device_lines(config, info)
    rows = [("memory", "unknown; the memory of a custom model is measured on the machine that trains")]
    if not (gpu_rates and model.user_code):
        peak = predict_peak(config.step)
        rows = [*forecast.memory_rows(config.step, peak), ("limit", forecast.limit_text(config, info.memory, peak))]
    variants = [("this run", config), *memory_saving_variants(training, config, info)]
    predictions = [predict(label, variant.step, gpu_rates, info.memory) for label, variant in variants]
    per_worker = f" per worker of {workers}" if workers > 1 else ""
    title = f"Predicted for {info.name}{per_worker}, not measured"
    prediction_table(title, "configuration", predictions).show()

    if workers > 1:  # The network's rows are more important.
        rows = [row for row in rows if row[0] != "published"]
    rows.append(("FLOPs", forecast.arithmetic_text(model)))
    if config.execution.device == "cuda":
        name = gpu_rates and gpu_rates.device_info.name
        rows += forecast.tile_rows(model, config.batch.micro_batch, config.execution.precision, name)
    if gpu_rates:
        rows.append(("speed", forecast.speed_text(predictions[0], gpu_rates)))
        rows += forecast.comparison_rows(model, predictions[0], gpu_rates)
    if workers > 1:
        rows += network.network_rows(model, config.batch, config.execution, options.doctor_file)
    speed, tokens = options.tokens_per_second, forecast.run_tokens(config, manifest)
    seconds = predictions[0].seconds(tokens) if workers == 1 else None
    if speed:
        seconds = Range(*[tokens / speed] * 2)
    price = options.prices.get(options.gpu or "")
    rows += [
        ("run", forecast.run_text(config, manifest)),
        ("time", forecast.time_text(seconds, price and price * workers)),
    ]
    rows += loss_rows(measured, [tokens * model.flops_per_token])
    Table("", ("", ""), rows).show()
    Report([("Next", next_step(requested.dataset.data, manifest))]).show()


def next_step(data: str, manifest: Manifest) -> str:
    """Format the next command that this machine can execute: a first run on the shards in ``data``, or their
    creation."""
    if not manifest.fingerprint:
        return str(NextCommand(f"python -m pipeline.tokenize sample --out {shlex.quote(data)}", SAMPLE_SECONDS))
    return next_command(data, manifest, device_info())


def memory_saving_variants(
    training: TrainConfig, config: ResolvedConfig, info: DeviceInfo
) -> list[tuple[str, ResolvedConfig]]:
    """Resolve variants of the run ``config`` that save memory, each with the largest micro-batch that should fit.

    Returns: (flag, config).
    """
    execution, model = config.execution, config.model
    if model.user_code:  # The memory of each variant would have to be measured.
        return []
    settings: dict[str, str] = {}
    if execution.checkpointing != "full":
        settings["checkpointing"] = "full"
    if execution.loss == "plain":
        settings["loss"] = "fused"
    variants = (
        (name, value, training.replace(**{name: value, "micro_batch": AUTO})) for name, value in settings.items()
    )
    return [(f"--{name} {value}", resolve_for_plan(variant, info)) for name, value, variant in variants]


def plan_all_gpus(options: PlanOptions, measured: "MeasuredLaw | None") -> None:
    """Print the plan of a run on each known GPU: the time and, with prices, the cost, the cheapest or fastest first."""
    from train.data.assumed import describe_data
    from train.estimate import forecast
    from train.estimate.gpu_rates import load_gpu_rates
    from train.estimate.prediction import predict, prediction_table
    from train.estimate.roofline import SOURCE

    training, manifest = prepare_for_plan(options.training.replace(device="cuda"))
    prices, configs, predictions = options.prices, [], []
    for name in KNOWN_GPUS:
        gpu_rates = load_gpu_rates(name)
        limit = gpu_rates.device_info.with_memory_limit(options.memory_limit).memory
        configs.append(resolve_for_plan(training, gpu_rates.device_info, limit))
        predictions.append(predict(name, configs[-1].step, gpu_rates, limit, prices.get(name)))
    config = configs[-1]  # Its model and length are those of all.
    print_model(config.model, describe_data(manifest, config.model, options.training.dataset.source))
    tokens = forecast.run_tokens(config, manifest)

    def order(prediction):
        seconds = prediction.seconds(tokens)
        hours = seconds.low if seconds else float("inf")
        return not prediction.price, hours * (prediction.price or 1)

    prediction_table("Predicted, not measured", "GPU", sorted(predictions, key=order), tokens=tokens).show()
    console.print_paragraph(f"run: {forecast.run_text(config, manifest)}")
    console.print_paragraph(f"speed: {SOURCE}")
    if not prices:
        console.print_paragraph("cost: set --price-per-hour A100=1.2 H100=2.5, with your prices")
    for name, text in loss_rows(measured, [tokens * config.model.flops_per_token]):
        console.print_paragraph(f"{name}: {text}")


def plan_budget(options: PlanOptions, measured: "MeasuredLaw | None") -> None:
    """Print the compute-optimal run for the budget on each planned GPU, the one with the most compute first."""
    from train.data.assumed import TOKENS_PER_PARAMETER
    from train.estimate.gpu_rates import load_gpu_rates
    from train.estimate.roofline import SOURCE
    from train.estimate.scaling import OptimalRun, find_optimal_run, model_of_depth, optimal_runs_table

    training, _ = prepare_for_plan(options.training.replace(device="cuda"))
    base = training.model
    assert isinstance(base, ModelConfig), "checked with the flags"
    runs: list[OptimalRun] = []
    for name in KNOWN_GPUS if options.gpu == ALL_GPUS else [options.gpu or ""]:
        price, gpu_rates = options.prices.get(name), load_gpu_rates(name)
        hours = options.hours or (price and (options.budget or 0) / price)
        if not hours:
            continue
        limit = options.memory_limit
        if options.gpu == ALL_GPUS and limit:
            limit = min(limit, gpu_rates.device_info.memory)
        gpu_rates = gpu_rates.with_memory_limit(limit)

        def resolve_model(depth: int, info: DeviceInfo = gpu_rates.device_info) -> ResolvedConfig:
            return resolve_for_plan(training.replace(model=model_of_depth(base, depth)), info)

        run = find_optimal_run(name, gpu_rates, hours, resolve_model)
        runs += [run] if run else []
    if not runs:
        raise UserError(
            "No step of the smallest model ends within the budget, or its speed is not predicted. Increase the budget, "
            "or remove settings such as --compile."
        )
    runs.sort(key=lambda run: -run.compute)
    best = runs[0]
    optimal_runs_table(runs, measured.law if measured else None, measured.unit if measured else "").show()
    lines = [
        f"size: about {TOKENS_PER_PARAMETER} tokens per parameter are optimal (Hoffmann et al. 2022, arXiv 2203.15556)",
        f"speed: at the lower end of {SOURCE}",
    ]
    lines += [f"{name}: {text}" for name, text in loss_rows(measured, [run.compute for run in runs])]
    if not measured:
        hours = best.tokens / best.prediction.speed.low / 3600 if best.prediction.speed else 0.0
        small = ", ".join(f"{hours * fraction:.2g}" for fraction in (0.001, 0.003, 0.01))
        lines.append(f"loss: unknown; train three small runs, planned with --hours {small}, and add --from-runs runs")
    model = best.config.model
    lines.append(f"next: python -m train.run --model {model.text} --tokens {best.tokens}")
    for line in lines:
        console.print_paragraph(line)


def read_runs(options: PlanOptions) -> "MeasuredLaw | None":
    """Read the law of --from-runs; None without the flag. Raises ``UserError`` for runs without a law."""
    if not options.from_runs:
        return None
    from train.reporting.scaling import read_law

    return read_law(options.from_runs)


def loss_rows(measured: "MeasuredLaw | None", compute: Sequence[float]) -> list[tuple[str, str]]:
    """Return the loss to expect of the first of the planned runs with this ``compute``, and draw all of them."""
    if measured is None:
        return []
    from train.reporting.scaling import draw_law

    warnings = [("warning", text) for text in measured.warnings]
    return [("loss", measured.loss_text(compute[0])), *warnings, ("chart", draw_law(measured, compute))]


def print_model(model: AnyModel, *lines: str) -> None:
    """Print the model, and ``lines`` about its settings and data."""
    parameters = f"{model.parameters:,} parameters, context length {model.context_length:,} tokens"
    console.print(f"[bold]{escape(model.text)}[/bold]: {parameters}")
    for line in lines:
        console.print_paragraph(line)


if __name__ == "__main__":
    main()
