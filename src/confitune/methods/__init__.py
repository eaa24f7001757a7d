"""How tasks are learned: one file a method, each readable beside its paper."""

from confitune.methods.baselines import BN_ONLY, FINETUNE, JOINT, LINEAR_PROBE, SINGLE_TASK, TASK_BN
from confitune.methods.confit import CONFIT, FINETUNE_XCONV, HIERARCHICAL
from confitune.methods.method import Makers, Method, compose
from confitune.methods.penalty import Penalty, TaskContext, shared_parameters
from confitune.methods.schedule import Part, Schedule, Stage, head_and_norm, head_only, hierarchical, plain

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        FINETUNE,
        CONFIT,
        HIERARCHICAL,
        FINETUNE_XCONV,
        TASK_BN,
        BN_ONLY,
        LINEAR_PROBE,
        SINGLE_TASK,
        JOINT,
    )
}
PENALTIES: Makers = {}


def create_method(name: str) -> Method:
    """A method by name: 'confit', 'finetune', ..., or a composition of a base and penalties joined by '+'.

    >>> create_method("confit").norm
    'xconv'
    """
    return compose(name, METHODS, PENALTIES, default="finetune")


__all__ = [
    "METHODS",
    "PENALTIES",
    "Method",
    "Part",
    "Penalty",
    "Schedule",
    "Stage",
    "TaskContext",
    "compose",
    "create_method",
    "head_and_norm",
    "head_only",
    "hierarchical",
    "plain",
    "shared_parameters",
]
