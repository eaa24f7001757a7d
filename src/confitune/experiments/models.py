"""Which networks convert, and what a task of each takes; found out by converting them."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import get_args

from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Head, NoBatchNormError, XconvNorms, model_names, without_memory
from confitune.nn.geometry import Means

# One or two of each family that people fine-tune; any other name or pattern can be asked for.
WELL_KNOWN = (
    *("tf_efficientnet_lite0", "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "seresnet50", "regnety_004"),
    *("regnety_032", "mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv4_conv_small", "efficientnet_b0"),
    *("tf_efficientnetv2_s", "mnasnet_100", "ghostnet_100", "densenet121", "vgg11_bn", "dla34", "hrnet_w18_small"),
    *("res2net50_26w_4s", "inception_v3", "repvgg_a0", "cspdarknet53"),
    *("torchvision:resnet18", "torchvision:shufflenet_v2_x1_0", "torchvision:googlenet"),
)


@dataclass(frozen=True)
class ModelReport:
    """What conversion makes of a network; numbers per task without the head."""

    name: str
    parameters: int = 0
    norms: int = 0
    recovered: int = 0
    phase_numbers: int = 0
    window_numbers: int = 0
    problem: str = ""


def matching_models(pattern: str | None) -> list[str]:
    """Names that match a pattern such as '*resnet*' (a pre-training tag is ignored); without one, the well-known."""
    if pattern is None:
        return list(WELL_KNOWN)
    wild = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return fnmatch.filter(model_names(), wild) or fnmatch.filter(model_names(), pattern.split(".")[0])


def report_model(name: str) -> ModelReport:
    """Convert a network without weights, on the meta device: nothing is computed or downloaded."""
    try:
        numbers = {}
        for means in get_args(Means):
            norms = XconvNorms(means)
            net = ContinualNet(without_memory(name), [norms, Head()])
            numbers[means] = net.numbers_per_task
        return ModelReport(
            name=name,
            parameters=sum(p.numel() for p in net.backbone.parameters()),
            norms=len(norms.pairs) + len(norms.fallbacks),
            recovered=len(norms.pairs),
            phase_numbers=numbers["phase"],
            window_numbers=numbers["window"],
        )
    except NoBatchNormError:
        return ModelReport(name, problem="has no batch norm")
    except (ConfituneError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return ModelReport(name, problem=str(error).splitlines()[0])
