"""When which parameters are trained: a task's epochs, cut into stages (ConFiT, sec. 3.3).

Groups of parameters have the names that `ContinualNet.groups` gives them: 'head', 'norms', 'weights' (all else of the
backbone), and parts such as 'calibrations'.
"""

from dataclasses import dataclass

HEAD = frozenset({"head"})
HEAD_AND_NORMS = frozenset({"head", "norms"})
EVERYTHING = frozenset({"head", "norms", "weights"})


@dataclass(frozen=True)
class Stage:
    """A run of epochs in which the same groups of parameters are trained."""

    name: str
    epochs: int
    trains: frozenset[str]


def everything(epochs: int) -> tuple[Stage, ...]:
    """Everything from the first epoch on."""
    return (Stage("all", epochs, EVERYTHING),)


def hierarchical(epochs: int) -> tuple[Stage, ...]:
    """Head, then head and norms, then everything: 20%, 30% and 50% of the epochs (the paper's shares).

    >>> [(stage.name, stage.epochs) for stage in hierarchical(10)]
    [('head', 2), ('head+norms', 3), ('all', 5)]
    >>> [(stage.name, stage.epochs) for stage in hierarchical(4)]  # too few for a stage of the head alone
    [('head+norms', 2), ('all', 2)]
    """
    head, norms = epochs // 5, epochs // 2
    return _without_empty(
        Stage("head", head, HEAD),
        Stage("head+norms", norms - head, HEAD_AND_NORMS),
        Stage("all", epochs - norms, EVERYTHING),
    )


def head_only(epochs: int) -> tuple[Stage, ...]:
    """The head alone."""
    return (Stage("head", epochs, HEAD),)


def head_then_norms(epochs: int) -> tuple[Stage, ...]:
    """Head, then head and norms to the end: hierarchical fine-tuning without its last stage.

    >>> [(stage.name, stage.epochs) for stage in head_then_norms(10)]
    [('head', 2), ('head+norms', 8)]
    """
    head = epochs // 5
    return _without_empty(Stage("head", head, HEAD), Stage("head+norms", epochs - head, HEAD_AND_NORMS))


def _without_empty(*stages: Stage) -> tuple[Stage, ...]:
    return tuple(stage for stage in stages if stage.epochs > 0)
