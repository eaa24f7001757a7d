"""What adapts: networks whose tasks own parts of them, and how batch norm's means are recovered."""

from confitune.nn.backbones import (
    Backbone,
    build_model,
    create_backbone,
    headless,
    model_names,
    state_sha256,
    without_memory,
)
from confitune.nn.continual import ContinualNet
from confitune.nn.geometry import ConvGeometry
from confitune.nn.observer import Observer
from confitune.nn.pairing import guess_input, trace_flow
from confitune.nn.parts import (
    Calibrations,
    Deltas,
    Head,
    InputMeans,
    Moments,
    NoBatchNormError,
    Norms,
    Part,
    XconvNorms,
    require_batch_norm,
)
from confitune.nn.recovery import recover_output_mean, window_means_from_phases
from confitune.nn.task_bank import TaskStorage

__all__ = [
    "Backbone",
    "Calibrations",
    "ContinualNet",
    "ConvGeometry",
    "Deltas",
    "Head",
    "InputMeans",
    "Moments",
    "NoBatchNormError",
    "Norms",
    "Observer",
    "Part",
    "TaskStorage",
    "XconvNorms",
    "build_model",
    "create_backbone",
    "guess_input",
    "headless",
    "model_names",
    "recover_output_mean",
    "require_batch_norm",
    "state_sha256",
    "trace_flow",
    "window_means_from_phases",
    "without_memory",
]
