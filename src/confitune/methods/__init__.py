"""How tasks are learned: one file a method, each readable beside its paper."""

from confitune.methods import baselines, confit, best, ewc, si, rwalk, mas, cpr, afec, ccll  # isort: skip
from confitune.methods.method import METHODS, Method, Options, Step, TaskContext
from confitune.methods.registry import MethodOptions, create_method, method_classes
from confitune.methods.stages import Stage, everything, head_only, head_then_norms, hierarchical

__all__ = [
    "METHODS",
    "Method",
    "MethodOptions",
    "Options",
    "Stage",
    "Step",
    "TaskContext",
    "afec",
    "baselines",
    "best",
    "ccll",
    "confit",
    "cpr",
    "create_method",
    "everything",
    "ewc",
    "head_only",
    "head_then_norms",
    "hierarchical",
    "mas",
    "method_classes",
    "rwalk",
    "si",
]
