"""What there is to learn with: methods, their options and their storage, and which networks convert; with tables."""

import fnmatch
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

from rich.console import Group
from rich.table import Table
from rich.text import Text

from confitune.analysis.storage import measure_storage
from confitune.errors import ConfituneError
from confitune.experiments.paper.numbers import Searched, searched
from confitune.experiments.reporting.table import terminal_table
from confitune.experiments.runs.identity import XCONV, options_of, value_text
from confitune.methods import METHODS, create_method, method_classes
from confitune.nn import ContinualNet, Head, NoBatchNormError, XconvNorms, model_names, without_memory
from confitune.nn.geometry import Means

NETWORK = "resnet18"
CLASSES = 10  # of a task, for the size of its head
MOST = 12  # networks in a table; each is converted for it


class OptionReport(NamedTuple):
    """An option of a part of a method."""

    name: str  # part.option
    default: Any
    description: str
    paper: dict[str, float]  # by dataset


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


def method_row(name: str, made: dict[tuple[str, ...], ContinualNet]) -> list[str]:
    """What one method does and takes, also a composed one such as 'ewc+confit' or 'mas-cpr'.

    Networks are made on the meta device, and kept in `made` by what they are made of: that is what takes time.
    """
    method = create_method(name)
    parts = (*(part.kind for part in method.parts()), str(method.two_scales))
    net = made[parts] = made.get(parts) or method.network(without_memory(NETWORK))
    storage = measure_storage(method, net)
    kinds = [kind for kind in METHODS.values() if kind in method_classes(name)] or method_classes(name)
    does = "; ".join(kind.summary for kind in kinds)
    references = "; ".join(kind.reference for kind in kinds if kind.reference)
    shares = "convolutions" if net.numbers_per_task else "the backbone"
    if not any("weights" in stage.trains for task in (0, 1) for stage in method.stages(10, task)):
        shares += ", frozen"
    return [
        name,
        f"{does}\n{references}" if references else does,
        "nothing" if method.separate else shares,
        f"{storage.per_task + _head_numbers(net):,}",
        f"{storage.once:,}",
        "; ".join(kind.cost for kind in kinds),
    ]


def _head_numbers(net: ContinualNet) -> int:
    return CLASSES * (net.head.features + 1)


def methods_table(*names: str) -> Table:
    """Methods as rows; without names, all that come along."""
    made: dict[tuple[str, ...], ContinualNet] = {}
    return terminal_table(
        ["method", "what it does", "tasks share", "a task", "once", "in addition"],
        [method_row(name, made) for name in names or METHODS],
        caption=f"a task, once: numbers kept with {NETWORK}; a task has {CLASSES} classes, and its head is included. "
        "in addition: what runs besides plain fine-tuning. Methods can be combined by '+', e.g. ewc+confit. More of "
        "one: confitune methods NAME",
    )


def method_page(name: str) -> Group:
    """All of one method: what it takes, its options, and how it is called."""
    options = method_options(name)
    run = f"confitune run --method {name}"
    page: list[Table | Text] = [methods_table(name)]
    if options:
        run += f" --set {options[0].name}={value_text(options[0].default)}"
        datasets = list(dict.fromkeys(dataset for option in options for dataset in option.paper))
        rows = [
            [o.name, value_text(o.default), *(value_text(o.paper.get(d, "")) for d in datasets), o.description]
            for o in options
        ]
        caption = "datasets: the paper's values, used there by default" if datasets else ""
        page.append(terminal_table(["option", "default", *datasets, "what it is"], rows, caption=caption))
    kinds = method_classes(name)
    if settings := [field for field in XCONV if any(field in kind.Options.model_fields for kind in kinds)]:
        page.append(Text(f"settings of the network that matter to it: {', '.join(settings)}"))
    if own := create_method(name).training(False, {}):
        page.append(Text("trains with, unless you say otherwise: " + ", ".join(f"{k}={v}" for k, v in own.items())))
    examples = [run, f"confitune tune {name}"] if paper_search(name) else [run]
    return Group(*page, *(Text(example, style="cyan") for example in examples))


# One or two of each family that people fine-tune; any other name or pattern can be asked for.
WELL_KNOWN = (
    *("tf_efficientnet_lite0", "efficientnet_b0", "resnet18", "resnet50", "resnext50_32x4d", "seresnet50"),
    *("regnety_004", "mobilenetv3_large_100", "densenet121", "vgg11_bn", "inception_v3", "torchvision:resnet18"),
)


def matching_models(pattern: str | None) -> list[str]:
    """Names that match a pattern such as '*resnet*' (a pre-training tag is ignored), short ones first.

    Without a pattern, the well-known ones.
    """
    if pattern is None:
        return list(WELL_KNOWN)
    wild = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    found = fnmatch.filter(model_names(), wild) or fnmatch.filter(model_names(), pattern.split(".")[0])
    return sorted(found, key=lambda name: (len(name), name))


def model_row(name: str) -> list[str]:
    """Parameters, batch norms, those recovered, and numbers a task by input means; or why a network does not convert.

    It is converted without weights, on the meta device: nothing is computed or downloaded.
    """
    try:
        numbers = []
        for means in sorted(get_args(Means)):
            norms = XconvNorms(means)
            net = ContinualNet(without_memory(name), [norms, Head()])
            numbers.append(net.numbers_per_task + _head_numbers(net))
        parameters = sum(p.numel() for p in net.backbone.parameters())
        counts = (len(norms.pairs) + len(norms.fallbacks), len(norms.pairs), *numbers)
        return [name, f"{parameters / 1e6:.1f}M", *(f"{count:,}" for count in counts)]
    except NoBatchNormError:
        return [name, "has no batch norm"]
    except (ConfituneError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return [name, str(error).splitlines()[0]]


def models_table(names: Iterable[str]) -> Table:
    """Networks as rows."""
    caption = f"phase, window: numbers a task with these input means, its head of {CLASSES} classes included"
    head = ["model", "weights", "BNs", "recovered", *sorted(get_args(Means))]
    return terminal_table(head, [model_row(name) for name in names], caption=caption)
