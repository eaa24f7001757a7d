"""What there is to learn with: methods, their options and their storage, and which networks convert; with tables."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rich.console import Group
from rich.table import Table
from rich.text import Text

from confitune.analysis import measure_storage
from confitune.errors import ConfituneError
from confitune.experiments.paper.numbers import Searched, searched
from confitune.experiments.reporting.render import terminal_table
from confitune.experiments.runs.identity import XCONV, options_of, value_text
from confitune.methods import METHODS, Method, create_method, method_classes
from confitune.nn import ContinualNet, Head, NoBatchNormError, XconvNorms, model_names, without_memory
from confitune.nn.geometry import Means

NETWORK = "resnet18"


@dataclass(frozen=True)
class OptionReport:
    """An option of a part of a method."""

    name: str  # part.option
    default: Any
    description: str
    paper: dict[str, float]  # by dataset


@dataclass(frozen=True)
class MethodReport:
    """What a method does and takes; numbers are those of `NETWORK`, without heads."""

    name: str
    summary: str
    shares: str  # what all tasks use together
    numbers_per_task: int
    numbers_once: int  # kept once, however many tasks there are
    in_addition: str  # what runs besides plain fine-tuning
    reference: str


def report_method(name: str, made: dict[tuple[str, ...], ContinualNet] | None = None) -> MethodReport:
    """Of one method, also a composed one such as 'ewc+confit' or 'mas-cpr'.

    Storage is measured without memory: the network is made on the meta device, and the method attached to it.

    Args:
        made: networks of other methods by the kinds of their parts: making them is what takes time.
    """
    method, made = create_method(name), {} if made is None else made
    parts = tuple(part.kind for part in method.parts())
    if parts not in made:
        made[parts] = method.network(without_memory(NETWORK))
    net = made[parts]
    storage = measure_storage(method, net)
    kinds = [kind for kind in METHODS.values() if kind in method_classes(name)] or method_classes(name)
    return MethodReport(
        name=name,
        summary="; ".join(kind.summary for kind in kinds),
        shares="nothing" if method.separate else _shares(method, net),
        numbers_per_task=storage.per_task,
        numbers_once=storage.once,
        in_addition="; ".join(kind.cost for kind in kinds),
        reference="; ".join(kind.reference for kind in kinds if kind.reference),
    )


def _shares(method: Method, net: ContinualNet) -> str:
    what = "convolutions" if net.numbers_per_task else "the backbone"
    trained = any("weights" in stage.trains for task in (0, 1) for stage in method.stages(10, task))
    return what if trained else f"{what}, frozen"


def method_options(*names: str) -> list[OptionReport]:
    """The options of these methods, each once; without names, of everything that comes along."""
    chosen = {(row.part, row.option): row.chosen for row in searched()}
    methods = map(create_method, names or METHODS)
    models = {part: options for method in methods for part, options in options_of(method).items()}
    return [
        OptionReport(f"{part}.{name}", field.default, field.description or "", chosen.get((part, name), {}))
        for part, options in models.items()
        for name, field in options.model_fields.items()
    ]


def paper_search(method: str) -> Searched | None:
    """What the paper searched for a method; 'ewc+confit' takes what it searched for 'ewc'."""
    added = {kind for kind in method_classes(method) if not kind.is_base()}
    return next((row for row in searched() if added and set(method_classes(row.method)) == added), None)


def methods_table(*names: str) -> Table:
    """Methods as rows; without names, all that come along."""
    rows, made = [], dict[tuple[str, ...], ContinualNet]()
    for report in (report_method(name, made) for name in names or METHODS):
        does = f"{report.summary}\n{report.reference}".strip()
        numbers = (f"{report.numbers_per_task:,}", f"{report.numbers_once:,}")
        rows.append([report.name, does, report.shares, *numbers, report.in_addition])
    return terminal_table(
        ["method", "what it does", "tasks share", "a task", "once", "in addition"],
        rows,
        caption=f"a task, once: numbers kept, {NETWORK}, without heads. in addition: what runs besides plain "
        "fine-tuning. Methods can be combined by '+', e.g. ewc+confit. More of one: confitune methods NAME",
    )


def method_page(name: str) -> Group:
    """All of one method: what it takes, its options, and how it is called."""
    options, run = method_options(name), f"confitune run --method {name}"
    below: list[Table | Text] = []
    if options:
        below = [_options_table(options)]
        run += f" --set {options[0].name}={value_text(options[0].default)}"
    kinds = method_classes(name)
    if settings := [field for field in XCONV if any(field in kind.Options.model_fields for kind in kinds)]:
        below.append(Text(f"settings of the network that matter to it: {', '.join(settings)}"))
    if own := create_method(name).training(False, {}):
        below.append(Text("trains with, unless you say otherwise: " + ", ".join(f"{k}={v}" for k, v in own.items())))
    examples = [run, f"confitune tune {name}"] if paper_search(name) else [run]
    return Group(methods_table(name), *below, *(Text(example, style="cyan") for example in examples))


def _options_table(options: Sequence[OptionReport]) -> Table:
    datasets = list(dict.fromkeys(dataset for option in options for dataset in option.paper))
    rows = []
    for option in options:
        known = [value_text(option.paper[name]) if name in option.paper else "" for name in datasets]
        rows.append([option.name, value_text(option.default), *known, option.description])
    caption = "datasets: the paper's values, used there by default" if datasets else ""
    return terminal_table(["option", "default", *datasets, "what it is"], rows, caption=caption)


# One or two of each family that people fine-tune; any other name or pattern can be asked for.
WELL_KNOWN = (
    *("tf_efficientnet_lite0", "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "seresnet50", "regnety_004"),
    *("regnety_032", "mobilenetv2_100", "mobilenetv3_large_100", "mobilenetv4_conv_small", "efficientnet_b0"),
    *("tf_efficientnetv2_s", "mnasnet_100", "ghostnet_100", "densenet121", "vgg11_bn", "dla34", "hrnet_w18_small"),
    *("res2net50_26w_4s", "inception_v3", "repvgg_a0", "cspdarknet53"),
    *("torchvision:resnet18", "torchvision:shufflenet_v2_x1_0", "torchvision:googlenet"),
)


def matching_models(pattern: str | None) -> list[str]:
    """Names that match a pattern such as '*resnet*' (a pre-training tag is ignored); without one, the well-known."""
    if pattern is None:
        return list(WELL_KNOWN)
    wild = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return fnmatch.filter(model_names(), wild) or fnmatch.filter(model_names(), pattern.split(".")[0])


def model_row(name: str) -> list[str]:
    """Parameters, batch norms, those recovered, and numbers a task by input means; or why a network does not convert.

    It is converted without weights, on the meta device: nothing is computed or downloaded.
    """
    try:
        numbers = []
        for means in sorted(get_args(Means)):
            norms = XconvNorms(means)
            net = ContinualNet(without_memory(name), [norms, Head()])
            numbers.append(net.numbers_per_task)
        parameters = sum(p.numel() for p in net.backbone.parameters())
        counts = (len(norms.pairs) + len(norms.fallbacks), len(norms.pairs), *numbers)
        return [name, f"{parameters / 1e6:.1f}M", *(f"{count:,}" for count in counts)]
    except NoBatchNormError:
        return [name, "has no batch norm"]
    except (ConfituneError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return [name, str(error).splitlines()[0]]


def models_table(names: Iterable[str]) -> Table:
    """Networks as rows."""
    caption = "phase, window: numbers a task with these input means, without its head"
    head = ["model", "weights", "BNs", "recovered", *sorted(get_args(Means))]
    return terminal_table(head, [model_row(name) for name in names], caption=caption)
