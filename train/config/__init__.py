"""The settings of a run: the model, the mathematics of its steps, and how they are executed.

A :class:`TrainConfig` is made of parts, one file for each, with their defaults and checks. Flags, files, suites and
searches know the settings by their names alone: the flat view of :class:`TrainConfig`.
"""

from train.config.batch import AUTO, BatchConfig, divisors
from train.config.checkpoints import CheckpointConfig
from train.config.dataset import DatasetConfig
from train.config.duration import Cycle, CycleText, DurationConfig
from train.config.execution import (
    CUDA_GRAPHS,
    GPU_KERNELS,
    HALF_PRECISIONS,
    WHOLE_GRAPH,
    Attention,
    Checkpointing,
    Compile,
    Device,
    ExecutionConfig,
    Loss,
    Precision,
)
from train.config.optimization import TORCHAO_OPTIMIZERS, OptimizationConfig, Optimizer, Schedule
from train.config.train_config import CHOICES, SETTING_TYPES, TrainConfig, config_from_json, load_config

__all__ = [
    "AUTO",
    "CHOICES",
    "CUDA_GRAPHS",
    "GPU_KERNELS",
    "HALF_PRECISIONS",
    "SETTING_TYPES",
    "TORCHAO_OPTIMIZERS",
    "WHOLE_GRAPH",
    "Attention",
    "BatchConfig",
    "CheckpointConfig",
    "Checkpointing",
    "Compile",
    "Cycle",
    "CycleText",
    "DatasetConfig",
    "Device",
    "DurationConfig",
    "ExecutionConfig",
    "Loss",
    "OptimizationConfig",
    "Optimizer",
    "Precision",
    "Schedule",
    "TrainConfig",
    "config_from_json",
    "divisors",
    "load_config",
]
