"""The command line: parses, calls, prints."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from confitune.cli import deploy, listing, training  # noqa: F401  # each adds its commands to the app
from confitune.cli.app import app
from confitune.errors import ConfituneError, SaidElsewhereError


def main() -> None:
    """Entry point: errors a user can act on are printed without a traceback."""
    try:
        app()
    except SaidElsewhereError:  # by another process of this run
        sys.exit(2)
    except (ConfituneError, OSError) as error:  # a full disk, a folder that may not be written
        message = escape(str(error))  # paths may hold brackets
        Console(stderr=True).print(f"[bold red]error:[/bold red] {message}", highlight=False, soft_wrap=True)
        sys.exit(2)
