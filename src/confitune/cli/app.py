"""What all commands share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Fine-tune one pre-trained CNN on task after task without forgetting (ConFiT).",
)
Option = typer.Option


@app.callback()
def _root(context: typer.Context) -> None:
    """Fine-tune one pre-trained CNN on task after task without forgetting (ConFiT)."""
    if "LOCAL_RANK" in os.environ and context.invoked_subcommand != "run":
        from confitune.ranks import refuse_several

        refuse_several(f"confitune {context.invoked_subcommand}")


@contextmanager
def stoppable(how_to_go_on: str, says: bool = True) -> Iterator[None]:
    """Say how to go on after Ctrl-C; here, because typer ends the program without a word."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True, quiet=not says).print(f"stopped; {how_to_go_on}", style="yellow")
        raise typer.Exit(130) from None
