"""Commands that look at what there is: models, methods, settings, and folders this program wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from confitune.cli.app import Option, app
from confitune.cli.options import DATASETS_OWN, FIELDS, GROUPS, default_of
from confitune.errors import ConfituneError


@app.command(name="models")
def models_command(
    pattern: Annotated[
        str | None, typer.Argument(help="part of a name, or with * and ?; default: well-known ones")
    ] = None,
) -> None:
    """List networks that convert to ConFiT, and how many numbers a task of each takes.

    Every timm and torchvision network with batch norm does; each one shown was converted for this table (without
    weights). "recovered" counts the batch norms that directly follow a convolution, whose mean is recovered through
    it; the others keep all their moments per task.
    """
    from confitune.experiments import matching_models, report_model

    console = Console()
    names = matching_models(pattern)
    if not names:
        raise ConfituneError(f"no model matches {pattern!r}; try part of a name, e.g. 'resnet'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of their own models is not what was asked for
        reports = [report_model(n) for n in track(names, "converting", console=console, transient=True)]
    table = Table(
        caption="phase, window: numbers a task with these input means, without its head", caption_justify="left"
    )
    table.add_column("model", no_wrap=True)
    for column in ("weights", "BNs", "recovered", "phase", "window"):
        table.add_column(column, justify="right")
    for r in reports:
        if r.problem:
            table.add_row(r.name, f"[dim]{escape(r.problem)}[/dim]")
        else:
            counts = (r.norms, r.recovered, r.phase_numbers, r.window_numbers)
            table.add_row(r.name, f"{r.parameters / 1e6:.1f}M", *(f"{count:,}" for count in counts))
    console.print(table)


@app.command(name="methods")
def methods_command(
    name: Annotated[
        str | None, typer.Argument(help="one method, also composed: confit, ewc, mas-cpr, ewc+confit; default: all")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """List the methods, what each stores and what it does besides plain fine-tuning; with a name, its options.

    Numbers are those of a ResNet18, measured from the network that each method trains, without heads: "a task" for
    every task, "once" however many there are. Those that add to a step (ewc, si, rwalk, mas, cpr, afec) join another
    method and one another by '+'; alone they join finetune. mas-cpr and mas-afec are the paper's names of mas+cpr and
    mas+afec. A method of your own is FILE.py:CLASS.

    [bold]Examples[/bold]

      confitune methods

      confitune methods ewc

      confitune methods mas+cpr+confit --json
    """
    from confitune.experiments import method_page, methods_table, report_method, report_methods

    reports = [report_method(name)] if name else report_methods()
    if as_json:
        found = [report.as_json() for report in reports]
        typer.echo(json.dumps(found[0] if name else found, indent=1))
    else:
        Console().print(method_page(reports[0]) if name else methods_table(reports))


@app.command(name="options")
def options_command(
    as_json: Annotated[bool, Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """List every setting of data, network and training, and every option of the methods.

    All of them can stand in a recipe, and be given to `run`, `tune` and `reproduce` as --set NAME=VALUE.

    [bold]Examples[/bold]

      confitune options

      confitune run --method ewc --set weight_decay=1e-4 --set ewc.strength=3000
    """
    from confitune.experiments import method_options

    groups: dict[str, list[tuple[str, Any, str]]] = {
        title: [
            (name, None if name in DATASETS_OWN else field.default, field.description or "")
            for name, field in group.model_fields.items()
        ]
        for title, group in GROUPS.items()
    }
    groups["Methods"] = [(option.name, option.default, option.description) for option in method_options()]
    if as_json:
        columns = ("name", "default", "description")
        found = [dict(zip(columns, row, strict=True), group=title) for title, rows in groups.items() for row in rows]
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table(caption="Give them as --set NAME=VALUE, or in a recipe.", caption_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("default", max_width=22)
    table.add_column("what it is", ratio=1)
    for title, rows in groups.items():
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for name, default, description in rows:
            shown = default_of(name) if name in FIELDS else str(default)
            table.add_row(name, escape(shown), escape(description))
    Console().print(table)


@app.command(name="doctor")
def doctor_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a bundle, or a folder of runs")],
    repair: Annotated[
        bool, Option("--repair", help="mend what can be mended; a damaged bundle goes back to before its last change")
    ] = False,
) -> None:
    """Say what is in a folder, compare every file with its checksum, and mend what can be mended.

    The exit code is 1 if something is wrong that --repair has not mended.

    [bold]Examples[/bold]

      confitune doctor model

      confitune doctor confitune-run --repair
    """
    from confitune.experiments import examine

    console = Console()
    found = examine(folder, repair)
    console.print(f"{folder}: {found.kind}", markup=False, highlight=False, soft_wrap=True)
    for line in found.contents:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    left = 0
    for finding in found.findings:
        mended = repair and finding.remedy is not None
        left += not mended
        done = (
            finding.remedy if mended else f"--repair: {finding.remedy}" if finding.remedy else "cannot be mended here"
        )
        style = "green" if mended else "red"
        console.print(f"{finding.problem}: {done}", style=style, markup=False, highlight=False, soft_wrap=True)
    if not found.findings:
        console.print("everything is whole", style="green")
    if left:
        raise typer.Exit(1)
