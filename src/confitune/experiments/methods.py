"""What there is to learn with: each method's storage measured on a real network, its options and the paper's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from confitune.experiments.paper import searched
from confitune.experiments.search import options_of, paper_search, value_text
from confitune.methods import METHODS, PENALTIES, Method, create_method, shared_parameters
from confitune.nn import ContinualNet, without_memory

NETWORK = "resnet18"

# What a step costs depends on the network and the machine; what runs in addition to plain fine-tuning does not.
_IN_ADDITION: Mapping[str, str] = {
    "finetune": "nothing",
    "confit": "input means in a task's last steps, recovery before a test; convolutions rest in the first half",
    "best": "as confit; two linear classifiers before a task; a pass and a comparison of weights at its end",
    "hierarchical": "nothing; convolutions rest in the first half of the epochs",
    "finetune-xconv": "input means in a task's last steps, recovery before a test",
    "task-bn": "nothing",
    "bn-only": "nothing; convolutions get no gradients",
    "linear-probe": "nothing; nothing below the head gets gradients",
    "single-task": "nothing",
    "joint": "nothing; all tasks' images at once",
    "ccll": "two small convolutions after each; 150 epochs a task in its paper",
    "ewc": "the pull in a step, one more pass at a task's end",
    "si": "the pull and each weight's path in a step",
    "rwalk": "the pull, a Fisher and each weight's path in a step",
    "mas": "the pull in a step, one more pass at a task's end",
    "cpr": "the outputs' entropy in a step",
    "averaging": "a sum of all weights in a task's last steps; measure statistics in a pass",
    "conv-step": "nothing",
    "probe": "two linear classifiers before a task; for tasks that stay pre-trained nothing else",
    "afec": "a copy learns the task first, one more pass, then the pull in a step",
}


@dataclass(frozen=True)
class OptionReport:
    """An option of a part of a method."""

    name: str  # part.option
    default: Any
    description: str
    paper: dict[str, float]  # by dataset


@dataclass(frozen=True)
class MethodReport:
    """What a method does and takes; numbers are those of `NETWORK`, without heads.

    Attributes:
        shares: what all tasks use together.
        numbers_per_task: kept for each task.
        numbers_once: kept once, however many tasks there are.
        once_per_weight: the same as a multiple of the shared weights.
        in_addition: what runs besides plain fine-tuning.
    """

    name: str
    summary: str
    shares: str
    numbers_per_task: int
    numbers_once: int
    once_per_weight: int
    in_addition: str
    reference: str
    options: tuple[OptionReport, ...]
    examples: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`, with the network that the numbers are of."""
        return {**asdict(self), "network": NETWORK}


def report_methods() -> list[MethodReport]:
    """Of every base method and every penalty."""
    return [report_method(name) for name in (*METHODS, *PENALTIES)]


def report_method(name: str) -> MethodReport:
    """Of one method, also a composed one such as 'ewc+confit' or 'mas-cpr'.

    Storage is measured without memory: the network is built and converted on the meta device, penalties are attached.
    """
    method = create_method(name)
    net = ContinualNet(without_memory(NETWORK), norm=method.norm, **method.network)
    for penalty in method.penalties:
        penalty.attach(net)
    shared = sum(parameter.numel() for parameter in shared_parameters(net).values())
    once = sum(penalty.storage() for penalty in method.penalties)
    own = sum(parameter.numel() for parameter in net.backbone.parameters()) if method.separate else 0
    parts = [part for part in (*METHODS, *PENALTIES) if part in _parts(method)]
    return MethodReport(
        name=name,
        summary="; ".join(_summary(part) for part in parts),
        shares=_shares(method),
        numbers_per_task=net.numbers_per_task + own,
        numbers_once=once,
        once_per_weight=once // shared,
        in_addition="; ".join(_IN_ADDITION[part] for part in parts),
        reference="; ".join(filter(None, map(_reference, parts))),
        options=tuple(_options(method)),
        examples=_examples(name, method),
    )


def _parts(method: Method) -> set[str]:
    bases = {part for part in method.name.split("+") if part in METHODS}
    included = {penalty.name for base in bases for penalty in METHODS[base].penalties}
    return bases | ({penalty.name for penalty in method.penalties} - included)


def _summary(part: str) -> str:
    return METHODS[part].summary if part in METHODS else PENALTIES[part].summary


def _reference(part: str) -> str:
    return METHODS[part].reference if part in METHODS else PENALTIES[part].reference


def _shares(method: Method) -> str:
    if method.separate:
        return "nothing"
    what = "convolutions" if method.norm in ("task", "xconv") else "the backbone"
    trained = any("conv" in stage.trains for task in (0, 1) for stage in method.stages(10, task))
    return what if trained else f"{what}, frozen"


def _options(method: Method) -> list[OptionReport]:
    chosen = {(row.part, row.option): row.chosen for row in searched()}
    return [
        OptionReport(f"{part}.{name}", field.default, field.description or "", chosen.get((part, name), {}))
        for part, options in options_of(method).items()
        for name, field in options.model_fields.items()
    ]


def _examples(name: str, method: Method) -> tuple[str, ...]:
    run = f"confitune run --method {name}"
    options = _options(method)
    if not options:
        return (run,)
    with_option = f"{run} --set {options[0].name}={value_text(options[0].default)}"
    return (with_option, f"confitune tune {name}") if paper_search(name) else (with_option,)
