"""Continual fine-tuning of pre-trained CNNs without forgetting."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confitune.engine import TrainSettings as TrainSettings, evaluate as evaluate, fit as fit
    from confitune.errors import ConfituneError as ConfituneError
    from confitune.methods import create_method as create_method
    from confitune.nn import ContinualNet as ContinualNet, create_backbone as create_backbone
    from confitune.tasks import TaskSequence as TaskSequence, load_tasks as load_tasks

__version__ = "0.2.0"
_HOMES = {
    "engine": ("TrainSettings", "evaluate", "fit"),
    "errors": ("ConfituneError",),
    "methods": ("create_method",),
    "nn": ("ContinualNet", "create_backbone"),
    "tasks": ("TaskSequence", "load_tasks"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and timm take seconds, and `confitune --help` needs neither."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"confitune.{home}"), name)
    raise AttributeError(f"module 'confitune' has no attribute {name!r}")
