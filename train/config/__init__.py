"""The settings of a run: the model, the mathematics of its steps, and how they are executed.

A :class:`TrainConfig` has one section per concern, each in a file of its own with its defaults and checks. The sections
that determine the memory and the time of an optimizer step form its :class:`StepConfig`. Flags, files, suites and
searches use the flat view, which has every setting by its name.
"""

from train.config.batch import AUTO, Batch, BatchConfig, divisors
from train.config.checkpoints import CheckpointConfig
from train.config.dataset import DatasetConfig
from train.config.duration import Cycle, CycleText, DurationConfig
from train.config.execution import (
    ACTIVATION_BUDGETS,
    CUDA_GRAPHS,
    EAGER_BACKENDS,
    GPU_KERNELS,
    HALF_PRECISIONS,
    WHOLE_GRAPH,
    Attention,
    Checkpointing,
    Compile,
    Device,
    Execution,
    ExecutionConfig,
    Loss,
    Precision,
)
from train.config.optimization import TORCHAO_OPTIMIZERS, OptimizationConfig, Optimizer, Schedule
from train.config.planning import ALL_GPUS, PlannedGpu, PlanOptions, Prices, parse_prices
from train.config.resolved_config import ResolvedConfig
from train.config.step import Step, StepConfig
from train.config.train_config import CHOICES, SETTING_TYPES, TrainConfig, config_from_json, load_config

__all__ = [
    "ACTIVATION_BUDGETS",
    "ALL_GPUS",
    "AUTO",
    "CHOICES",
    "CUDA_GRAPHS",
    "EAGER_BACKENDS",
    "GPU_KERNELS",
    "HALF_PRECISIONS",
    "SETTING_TYPES",
    "TORCHAO_OPTIMIZERS",
    "WHOLE_GRAPH",
    "Attention",
    "Batch",
    "BatchConfig",
    "CheckpointConfig",
    "Checkpointing",
    "Compile",
    "Cycle",
    "CycleText",
    "DatasetConfig",
    "Device",
    "DurationConfig",
    "Execution",
    "ExecutionConfig",
    "Loss",
    "OptimizationConfig",
    "Optimizer",
    "PlanOptions",
    "PlannedGpu",
    "Precision",
    "Prices",
    "ResolvedConfig",
    "Schedule",
    "Step",
    "StepConfig",
    "TrainConfig",
    "config_from_json",
    "divisors",
    "load_config",
    "parse_prices",
]
