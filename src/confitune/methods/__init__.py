"""How tasks are learned: one file a method, each readable beside its paper."""

from importlib import import_module

from confitune.methods.method import (
    METHODS as METHODS,
    Method as Method,
    Options as Options,
    Step as Step,
    TaskContext as TaskContext,
)
from confitune.methods.registry import create_method as create_method, method_classes as method_classes
from confitune.methods.stages import Stage as Stage, hierarchical as hierarchical

# A method is known once its file is imported; they are listed in this order.
for _file in ("baselines", "confit", "best", "ewc", "si", "rwalk", "mas", "cpr", "afec", "ccll"):
    import_module(f"confitune.methods.{_file}")
