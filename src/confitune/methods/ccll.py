"""CCLL (Singh et al.: Calibrating CNNs for Lifelong Learning, NeurIPS 2020).

The first task trains the backbone, which then stays as it is; every task learns small convolutions that calibrate each
layer's output in space (sec. 3.2) and by channel (sec. 3.3), a batch norm and a head. Nothing that moves is shared, so
nothing is forgotten.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from pydantic import Field

from confitune.methods.method import Method, Options
from confitune.methods.stages import Stage
from confitune.nn import Calibrations, Head, Norms, Part


class CcllOptions(Options):
    """Choices of CCLL."""

    start: Literal["random", "identity"] = Field(
        "random", description="of the calibrations: as layers usually start, or so that the network is unchanged"
    )
    group: int = Field(1, ge=1, description="channels of a group (Singh et al.: 1; what ConFiT counts fits 4)")
    frozen: Literal["after-first", "always"] = Field(
        "after-first", description="the backbone: once the first task has trained it (Singh et al.), or as pre-trained"
    )


class CCLL(Method):
    """Every task starts from the pre-trained batch norms."""

    name = "ccll"
    summary = "backbone frozen after the first task, small calibrating convolutions per task; forgets nothing"
    cost = "two small convolutions after each; 150 epochs a task in its paper"
    reference = "Singh et al., NeurIPS 2020"
    settings = MappingProxyType({"epochs": 150, "lr_schedule": "step"})  # lr times 0.1 at 50, 100 and 125 of 150 epochs
    Options = CcllOptions

    def parts(self) -> list[Part]:
        return [Norms(start="pretrained"), Calibrations(self.options.start, self.options.group), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        calibrate = Stage("calibrate", epochs, frozenset({"head", "norms", "calibrations"}))
        if index == 0 and self.options.frozen == "after-first":
            return (Stage("all", epochs, calibrate.trains | {"weights"}),)
        return (calibrate,)
