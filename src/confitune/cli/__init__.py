"""The command line: parses, calls, prints."""

import errno
import io
import sys

from rich.console import Console
from rich.markup import escape

from confitune.cli import deploy, listing, training  # noqa: F401  # each adds its commands to the app
from confitune.cli.app import app, shown
from confitune.errors import ConfituneError


def main() -> None:
    """Entry point: errors a user can act on are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and arrows on a terminal that has no such letters
    try:
        app()
    except (ConfituneError, OSError) as error:
        message = str(error) if isinstance(error, ConfituneError) else _in_words(error)
        text = escape(shown(message))  # paths may hold brackets
        Console(stderr=True).print(f"[bold red]error:[/bold red] {text}", highlight=False, soft_wrap=True)
        sys.exit(2)


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, or choose a folder on another disk"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "choose a folder that you may read and write"),
}


def _in_words(error: OSError) -> str:
    """What the operating system refused, and what to do about it where that is known."""
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return "; ".join(filter(None, [what, _REMEDIES.get(error.errno or 0)]))
