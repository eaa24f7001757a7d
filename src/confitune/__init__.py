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
    "ConfituneError": "errors",
    "ContinualNet": "nn",
    "TaskSequence": "tasks",
    "TrainSettings": "engine",
    "create_backbone": "nn",
    "create_method": "methods",
    "evaluate": "engine",
    "fit": "engine",
    "load_tasks": "tasks",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and timm take seconds, and `confitune --help` needs neither."""
    if name in _HOMES:
        return getattr(import_module(f"confitune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'confitune' has no attribute {name!r}")
