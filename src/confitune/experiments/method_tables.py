"""Methods on a terminal: one table of all, one page of each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from confitune.experiments.methods import NETWORK, MethodReport
from confitune.experiments.paper import searched
from confitune.experiments.search import value_text


def methods_table(reports: Sequence[MethodReport]) -> Table:
    """Methods as rows."""
    table = Table(
        caption=f"a task, once: numbers kept, {NETWORK}, without heads. in addition: what runs besides plain "
        "fine-tuning. Penalties join other methods by '+', e.g. ewc+confit. More of one: confitune methods NAME",
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("tasks share", max_width=12)
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
    facts = {
        "reference": report.reference,
        "tasks share": report.shares,
        "numbers a task": f"{report.numbers_per_task:,} ({NETWORK}, without its head)",
        "numbers once": _once(report).replace("\n", ", "),
        "in addition": report.in_addition,
    }
    lines += [Text(f"  {name}: {fact}") for name, fact in facts.items() if fact]
    examples = [Text(f"  {example}", style="cyan") for example in report.examples]
    options = [_options_table(report)] if report.options else [Text("  It has no options.")]
    return Group(*lines, *options, *examples)


def _options_table(report: MethodReport) -> Table:
    datasets = list(dict.fromkeys(dataset for row in searched() for dataset in row.chosen))
    of_paper = any(option.paper for option in report.options)
    table = Table(caption="datasets: the paper's values, used there by default" if of_paper else None)
    table.caption_justify = "left"
    table.add_column("option", no_wrap=True)
    table.add_column("default", justify="right")
    for dataset in datasets if of_paper else ():
        table.add_column(dataset, justify="right")
    table.add_column("what it is")
    for option in report.options:
        known = [value_text(option.paper[name]) if name in option.paper else "" for name in datasets if of_paper]
        table.add_row(option.name, value_text(option.default), *known, escape(option.description))
    return table


def _once(report: MethodReport) -> str:
    if not report.numbers_once:
        return "0"
    return f"{report.numbers_once:,}\n{report.once_per_weight} per shared weight"
