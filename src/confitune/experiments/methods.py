"""What there is to learn with: each method's options, its storage measured on a real network, and tables of both.

All that experiments know of a method besides training with it is asked for here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from rich.console import Group
from rich.table import Table
from rich.text import Text

from confitune.analysis import measure_storage
from confitune.errors import ConfituneError
from confitune.experiments.paper import Searched, searched
from confitune.experiments.tables import terminal_table
from confitune.methods import METHODS, Method, create_method, method_classes
from confitune.nn import ContinualNet, without_memory

NETWORK = "resnet18"
Value = float | bool | str

XCONV = ("means", "statistics")  # options of Xconv BN: a recipe says them once, for all methods that have them


def options_of(method: Method) -> dict[str, type[BaseModel]]:
    """The models of a method's options, by part; empty for one that has none."""
    return {type(hook).name: hook.Options for hook in method.hooks if set(hook.Options.model_fields) - {*XCONV}}


def options_set(method: Method, only_given: bool = False) -> dict[str, dict[str, Any]]:
    """The values of a method's options (or only the given ones), by part, as JSON takes them; without Xconv BN's."""
    return {
        type(hook).name: hook.options.model_dump(mode="json", exclude_unset=only_given, exclude={*XCONV})
        for hook in method.hooks
        if type(hook).name in options_of(method)
    }


def defaults_of(method: Method) -> dict[str, dict[str, Any]]:
    """Defaults of a method's options, by part, as JSON takes them."""
    return {part: options().model_dump(mode="json") for part, options in options_of(method).items()}


@cache
def option_defaults(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The same of a method by its name; none for a method that is not here any more.

    Results of other people name methods, too: a file or module that a name refers to is not executed for them.
    """
    if ":" in name:
        return {}
    try:
        return defaults_of(create_method(name))
    except ConfituneError:
        return {}


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


def value_text(value: Value) -> str:
    """As it is typed.

    >>> value_text(300000.0), value_text(0.005), value_text(True), value_text("exact")
    ('300000', '0.005', 'true', 'exact')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, int | float) else str(value)


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
