"""CCLL (Singh et al.: Calibrating CNNs for Lifelong Learning, NeurIPS 2020).

The backbone stays as it is; every task learns small convolutions that calibrate each layer's output in space (sec. 3.2)
and by channel (sec. 3.3), a batch norm and a head. Nothing is shared, so nothing is forgotten.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from confitune.methods.method import Method
from confitune.methods.penalty import PartOptions, checked_options
from confitune.methods.schedule import Stage


class CcllOptions(PartOptions):
    """Choices of CCLL."""

    start: Literal["random", "identity"] = Field(
        "random", description="of the calibrations: as layers usually start, or so that the network is unchanged"
    )
    base: Literal["pretrained", "first-task"] = Field(
        "pretrained", description="frozen throughout, or trained with the first task and then frozen (Singh et al.)"
    )


def calibrations(epochs: int) -> tuple[Stage, ...]:
    """Calibrations, batch norms and head."""
    return (Stage("calibrate", epochs, frozenset({"head", "norm", "calibration"})),)


def with_backbone(epochs: int) -> tuple[Stage, ...]:
    """The same along with the backbone."""
    return (Stage("all", epochs, frozenset({"head", "norm", "calibration", "conv"})),)


def ccll(**options: Any) -> Method:
    """CCLL with these options."""
    chosen = checked_options(CcllOptions, "ccll", options)
    return Method(
        "ccll",
        calibrations,
        "calibrated",
        "frozen backbone, small calibrating convolutions per task; forgets nothing",
        first_schedule=with_backbone if chosen.base == "first-task" else None,
        net_options={"start": chosen.start},
        settings={"epochs": 150, "lr_schedule": "step"},  # lr times 0.1 at 50, 100 and 125 of 150 epochs
        configure=ccll,
        options=CcllOptions,
        chosen=chosen.model_dump(),
        reference="Singh et al., NeurIPS 2020",
    )
