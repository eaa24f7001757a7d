"""What adapts: Xconv BN, the pairing of convolutions and batch norms, networks with per-task state."""

from confitune.nn.backbones import Backbone, create_backbone, headless, model_names, state_sha256
from confitune.nn.continual import ContinualNet, Norm, TaskStorage
from confitune.nn.convert import ConversionReport, LayerReport, NoBatchNormError, convert_xconv_bn
from confitune.nn.geometry import ConvGeometry
from confitune.nn.input_means import InputMeans
from confitune.nn.recovery import recover_output_mean, window_means_from_phases
from confitune.nn.xconv import TaskBatchNorm1d, TaskBatchNorm2d, XconvBatchNorm1d, XconvBatchNorm2d

__all__ = [
    "Backbone",
    "ContinualNet",
    "TaskStorage",
    "create_backbone",
    "headless",
    "model_names",
    "ConversionReport",
    "ConvGeometry",
    "InputMeans",
    "LayerReport",
    "NoBatchNormError",
    "Norm",
    "TaskBatchNorm1d",
    "TaskBatchNorm2d",
    "XconvBatchNorm1d",
    "XconvBatchNorm2d",
    "convert_xconv_bn",
    "recover_output_mean",
    "state_sha256",
    "window_means_from_phases",
]
