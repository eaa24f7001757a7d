"""What there is to learn with: each method's options, its storage measured on a real network, and tables of both.

All that experiments know of a method besides training with it is asked for here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from confitune.analysis import kept_once
from confitune.errors import ConfituneError
from confitune.experiments.paper import Searched, searched
from confitune.methods import METHODS, Method, create_method, method_classes
from confitune.nn import ContinualNet, without_memory

NETWORK = "resnet18"
Value = float | bool | str

XCONV = ("means", "statistics")  # options of Xconv BN: a recipe says them once, for all methods that have them


def options_of(method: Method) -> dict[str, type[BaseModel]]:
    """The models of a method's options, by part; empty for one that has none."""
    return {type(hook).name: hook.Options for hook in method.hooks if set(hook.Options.model_fields) - {*XCONV}}


def options_set(method: Method, only_given: bool = False) -> dict[str, dict[str, Any]]:
    """The values of a method's options, by part, as JSON takes them; without those of Xconv BN.

    Args:
        only_given: without those that were left at their defaults.
    """
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
    """Of every method that comes along."""
    return [report_method(name) for name in METHODS]


def report_method(name: str) -> MethodReport:
    """Of one method, also a composed one such as 'ewc+confit' or 'mas-cpr'.

    Storage is measured without memory: the network is made on the meta device, and the method attached to it.
    """
    method = create_method(name)
    net = method.network(without_memory(NETWORK))
    for hook in method.hooks:
        hook.attach(net, 0)
    shared = sum(parameter.numel() for parameter in net.shared_parameters().values())
    once = kept_once(net, method)
    own = sum(parameter.numel() for parameter in net.backbone.parameters()) if method.separate else 0
    kinds = [kind for kind in METHODS.values() if kind in method_classes(name)] or method_classes(name)
    return MethodReport(
        name=name,
        summary="; ".join(kind.summary for kind in kinds),
        shares="nothing" if method.separate else _shares(method, net),
        numbers_per_task=net.numbers_per_task + own,
        numbers_once=once,
        once_per_weight=once // shared,
        in_addition="; ".join(kind.cost for kind in kinds),
        reference="; ".join(kind.reference for kind in kinds if kind.reference),
        options=tuple(method_options(name)),
        examples=_examples(name),
    )


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


def methods_table(reports: Sequence[MethodReport]) -> Table:
    """Methods as rows."""
    table = Table(
        caption=f"a task, once: numbers kept, {NETWORK}, without heads. in addition: what runs besides plain "
        "fine-tuning. Methods can be combined by '+', e.g. ewc+confit. More of one: confitune methods NAME",
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("tasks share", max_width=13)
    table.add_column("a task", justify="right")
    table.add_column("once", justify="right")
    table.add_column("in addition", ratio=3)
    for report in reports:
        does = escape(report.summary) + (f"\n[dim]{escape(report.reference)}[/dim]" if report.reference else "")
        numbers = (f"{report.numbers_per_task:,}", _once(report))
        table.add_row(report.name, does, report.shares, *numbers, report.in_addition)
    return table


def method_page(report: MethodReport) -> Group:
    """All of one method: what it takes, its options, and how it is called."""
    lines = [Text(report.name, style="bold") + Text(f": {report.summary}", style="not bold")]
    kinds = method_classes(report.name)
    settings = [name for name in XCONV if any(name in kind.Options.model_fields for kind in kinds)]
    facts = {
        "reference": report.reference,
        "tasks share": report.shares,
        "numbers a task": f"{report.numbers_per_task:,} ({NETWORK}, without its head)",
        "numbers once": _once(report).replace("\n", ", "),
        "in addition": report.in_addition,
        "settings of the network that matter to it": ", ".join(settings),
    }
    lines += [Text(f"  {name}: {fact}") for name, fact in facts.items() if fact]
    examples = [Text(f"  {example}", style="cyan") for example in report.examples]
    options = [_options_table(report.options)] if report.options else [Text("  It has no options.")]
    return Group(*lines, *options, *examples)


def _options_table(options: Sequence[OptionReport]) -> Table:
    datasets = list(dict.fromkeys(dataset for option in options for dataset in option.paper))
    table = Table(caption="datasets: the paper's values, used there by default" if datasets else None)
    table.caption_justify = "left"
    table.add_column("option", no_wrap=True)
    for column in ("default", *datasets):
        table.add_column(column, justify="right")
    table.add_column("what it is")
    for option in options:
        known = [value_text(option.paper[name]) if name in option.paper else "" for name in datasets]
        table.add_row(option.name, value_text(option.default), *known, escape(option.description))
    return table


def _shares(method: Method, net: ContinualNet) -> str:
    what = "convolutions" if net.numbers_per_task else "the backbone"
    trained = any("weights" in stage.trains for task in (0, 1) for stage in method.stages(10, task))
    return what if trained else f"{what}, frozen"


def _examples(name: str) -> tuple[str, ...]:
    run, options = f"confitune run --method {name}", method_options(name)
    if not options:
        return (run,)
    with_option = f"{run} --set {options[0].name}={value_text(options[0].default)}"
    return (with_option, f"confitune tune {name}") if paper_search(name) else (with_option,)


def _once(report: MethodReport) -> str:
    per_weight = f"\n{report.once_per_weight} per shared weight" if report.once_per_weight else ""
    return f"{report.numbers_once:,}{per_weight}"
