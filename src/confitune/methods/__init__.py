"""How tasks are learned: one file a method, each readable beside its paper."""

from confitune.methods.afec import AFEC
from confitune.methods.averaging import Averaging
from confitune.methods.baselines import BN_ONLY, FINETUNE, JOINT, LINEAR_PROBE, SINGLE_TASK, TASK_BN
from confitune.methods.best import BEST
from confitune.methods.ccll import ccll
from confitune.methods.confit import CONFIT, FINETUNE_XCONV, HIERARCHICAL
from confitune.methods.conv_step import ConvStep
from confitune.methods.cpr import CPR
from confitune.methods.ewc import EWC
from confitune.methods.mas import MAS
from confitune.methods.method import Method, MethodOptions, compose
from confitune.methods.penalty import Penalty, TaskContext, shared_parameters
from confitune.methods.probe import Probe
from confitune.methods.rwalk import RWalk
from confitune.methods.schedule import Part, Schedule, Stage, head_and_norm, head_only, hierarchical, plain
from confitune.methods.si import SI

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        FINETUNE,
        CONFIT,
        BEST,
        HIERARCHICAL,
        FINETUNE_XCONV,
        TASK_BN,
        BN_ONLY,
        LINEAR_PROBE,
        SINGLE_TASK,
        JOINT,
        ccll(),
    )
}
PENALTIES: dict[str, type[Penalty]] = {
    penalty.name: penalty for penalty in (EWC, SI, RWalk, MAS, CPR, AFEC, Averaging, ConvStep, Probe)
}


def create_method(name: str, options: MethodOptions | None = None) -> Method:
    """A method by name: 'confit', 'finetune', ..., or a composition of a base and penalties joined by '+'.

    Args:
        options: by part, see `confitune methods`.

    >>> create_method("confit").norm
    'xconv'
    >>> create_method("ewc+cpr", {"ewc": {"strength": 300}}).penalties[0].options.strength
    300.0
    """
    return compose(name, METHODS, PENALTIES, "finetune", options)


__all__ = [
    "METHODS",
    "PENALTIES",
    "Method",
    "MethodOptions",
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
