"""What adapts: Xconv BN, the pairing of convolutions and batch norms, networks with per-task state."""

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
from confitune.nn.convert import ConversionReport, LayerReport, NoBatchNormError, convert_xconv_bn, require_batch_norm
from confitune.nn.geometry import ConvGeometry
from confitune.nn.input_means import InputMeans
from confitune.nn.learning import Norm
from confitune.nn.measuring import InfiniteError
from confitune.nn.recovery import recover_output_mean, window_means_from_phases
from confitune.nn.slots import TaskStorage
from confitune.nn.xconv import TaskBatchNorm1d, TaskBatchNorm2d, XconvBatchNorm1d, XconvBatchNorm2d

__all__ = [
    "Backbone",
    "ContinualNet",
    "ConvGeometry",
    "ConversionReport",
    "InfiniteError",
    "InputMeans",
    "LayerReport",
    "NoBatchNormError",
    "Norm",
    "TaskBatchNorm1d",
    "TaskBatchNorm2d",
    "TaskStorage",
    "XconvBatchNorm1d",
    "XconvBatchNorm2d",
    "build_model",
    "convert_xconv_bn",
    "create_backbone",
    "headless",
    "model_names",
    "recover_output_mean",
    "require_batch_norm",
    "state_sha256",
    "window_means_from_phases",
    "without_memory",
]
