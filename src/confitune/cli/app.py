"""What all commands share, and the entry point."""

import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from confitune.cli.options import CommandGroup
from confitune.errors import ConfituneError

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
Option = typer.Option

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, or choose a folder on another disk"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "choose a folder that you may read and write"),
}


def main() -> None:
    """Entry point: errors a user can act on are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and arrows on a terminal that has no such letters
    if "OMP_WAIT_POLICY" not in os.environ:
        # torch's threads spin while they wait for one another. Where other programs are at work, too, that takes the
        # processor from those that are waited for, and training may take twenty times as long: sleep sooner.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        app()
    except (ConfituneError, OSError) as error:
        message = str(error) if isinstance(error, ConfituneError) else _in_words(error)
        text = escape(shown(message))  # paths may hold brackets
        Console(stderr=True).print(f"[bold red]error:[/bold red] {text}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _in_words(error: OSError) -> str:
    """What the operating system refused, and what to do about it where that is known."""
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return "; ".join(filter(None, [what, _REMEDIES.get(error.errno or 0)]))


def _say_version(asked: bool) -> None:
    if asked:
        from confitune import __version__

        typer.echo(f"confitune {__version__}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, Option("--version", callback=_say_version, is_eager=True, help="say which version this is")
    ] = False,
) -> None:
    """Fine-tune one pre-trained CNN on task after task without forgetting (ConFiT)."""


@contextmanager
def importing() -> Iterator[None]:
    """Within, imports are a fifth faster: what they make stays, so nobody need look through it for what is unused."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # some libraries want to be taken down in order


@contextmanager
def stoppable(how_to_go_on: str) -> Iterator[None]:
    """Say how to go on after Ctrl-C; here, because typer ends the program without a word."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"stopped; {how_to_go_on}", style="yellow")
        raise typer.Exit(130) from None


def say(text: str, style: str = "", console: Console | None = None) -> None:
    """Print a text as it is: nothing in it is markup, and a long line stays one."""
    (console or Console()).print(shown(text), style=style, markup=False, highlight=False, soft_wrap=True)


def shown(text: str) -> str:
    """A text whose names, of files or from a bundle, cannot move the cursor or ring the bell.

    >>> shown("a\\x1b[2J\\tb")
    'a\\\\x1b[2J\\\\tb'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
