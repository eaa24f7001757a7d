"""Commands that look at what there is: models, methods, settings, and folders this program wrote."""

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from confitune.cli.app import Option, app, importing, say
from confitune.cli.options import GROUPS, default_of
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
    from confitune.experiments.catalog import MOST, matching_models, models_table

    console = Console()
    names = matching_models(pattern)
    if not names:
        raise ConfituneError(f"no model matches {pattern!r}; try part of a name, e.g. 'resnet'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of their own models is not what was asked for
        table = models_table(track(names[:MOST], "converting", console=console, transient=True))
    console.print(table)
    if len(names) > MOST:
        say(f"{MOST} of {len(names)} that match; give more of a name for others, e.g. '{names[MOST]}'", "yellow")


@app.command(name="methods")
def methods_command(
    name: Annotated[
        str | None, typer.Argument(help="one method, also composed: confit, ewc, mas-cpr, ewc+confit; default: all")
    ] = None,
) -> None:
    """List the methods, what each stores and what it does besides plain fine-tuning; with a name, its options.

    Numbers are those of a ResNet18: "a task" for every task, its head of 10 classes included; "once" however many there
    are. Methods that add to a step (ewc, si, rwalk, mas, cpr, afec) combine with another method and with one another by
    '+'; alone they join finetune. mas-cpr and mas-afec are the paper's names of mas+cpr and mas+afec. A method of your
    own is FILE.py:CLASS.

    [bold]Examples[/bold]

      confitune methods
      confitune methods ewc
      confitune methods mas+cpr+confit
    """
    with importing():
        from confitune.experiments.catalog import method_page, methods_table

        page = method_page(name) if name else methods_table()
    Console().print(page)


@app.command(name="options")
def options_command() -> None:
    """List every setting of data, network and training, and every option of the methods.

    All of them can stand in a recipe, and be given to `run`, `tune` and `reproduce` as --set NAME=VALUE.

    [bold]Examples[/bold]

      confitune options
      confitune run --method ewc --set weight_decay=1e-4 --set ewc.strength=3000
    """
    from confitune.experiments.catalog import method_options
    from confitune.experiments.reporting.table import terminal_table

    rows = [
        [name, default_of(name), field.description or ""]
        for group in GROUPS.values()
        for name, field in group.model_fields.items()
    ]
    rows += [[option.name, str(option.default), option.description] for option in method_options()]
    head = ["name", "default", "what it is"]
    Console().print(terminal_table(head, rows, caption="Give them as --set NAME=VALUE, or in a recipe."))


@app.command(name="doctor")
def doctor_command(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `confitune learn` made")],
    repair: Annotated[
        bool, Option("--repair", help="mend what can be mended; a damaged bundle goes back to before its last change")
    ] = False,
) -> None:
    """Say what is in a bundle, compare every file with its checksum, and mend what can be mended.

    The exit code is 1 if something is wrong that --repair has not mended.

    [bold]Examples[/bold]

      confitune doctor model
      confitune doctor model --repair
    """
    from confitune.deploy import examine

    found = examine(folder, repair)
    say("\n  ".join([f"{folder}:", *found.contents]))
    left = 0
    for finding in found.findings:
        mended = repair and finding.remedy is not None
        left += not mended
        todo = f"--repair: {finding.remedy}" if finding.remedy else "cannot be mended here"
        say(f"{finding.problem}: {finding.remedy if mended else todo}", "green" if mended else "red")
    if not found.findings:
        say("no damage found", "green")
    if left:
        raise typer.Exit(1)
