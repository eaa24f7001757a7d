"""What of a network a task may own, one file each."""

from confitune.nn.parts.calibrations import Calibrations
from confitune.nn.parts.deltas import Deltas
from confitune.nn.parts.head import Head
from confitune.nn.parts.input_means import InputMeans
from confitune.nn.parts.moments import Moments
from confitune.nn.parts.norms import NoBatchNormError, Norms, require_batch_norm
from confitune.nn.parts.part import Part
from confitune.nn.parts.xconv import XconvLayer, XconvNorms

__all__ = [
    "Calibrations",
    "Deltas",
    "Head",
    "InputMeans",
    "Moments",
    "NoBatchNormError",
    "Norms",
    "Part",
    "XconvLayer",
    "XconvNorms",
    "require_batch_norm",
]
