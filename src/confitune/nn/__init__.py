"""What adapts: networks whose tasks own parts of them, and how batch norm's means are recovered."""

from confitune.nn.backbones import (
    Backbone as Backbone,
    build_model as build_model,
    create_backbone as create_backbone,
    headless as headless,
    model_names as model_names,
    state_sha256 as state_sha256,
    without_memory as without_memory,
)
from confitune.nn.continual import ContinualNet as ContinualNet
from confitune.nn.pairing import Flow as Flow, guess_input as guess_input, trace_flow as trace_flow
from confitune.nn.parts.deltas import Deltas as Deltas
from confitune.nn.parts.head import Head as Head
from confitune.nn.parts.input_means import InputMeans as InputMeans
from confitune.nn.parts.norms import Moments as Moments, Norms as Norms
from confitune.nn.parts.part import Part as Part
from confitune.nn.parts.xconv import NoBatchNormError as NoBatchNormError, XconvNorms as XconvNorms
from confitune.nn.scales import two_scales as two_scales
