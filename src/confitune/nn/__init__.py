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
from confitune.nn.pairing import Flow, guess_input, trace_flow
from confitune.nn.parts.deltas import Deltas
from confitune.nn.parts.head import Head
from confitune.nn.parts.input_means import InputMeans
from confitune.nn.parts.norms import Moments, Norms
from confitune.nn.parts.part import Part
from confitune.nn.parts.xconv import NoBatchNormError, XconvNorms
from confitune.nn.scales import two_scales
