"""The command line: parses, calls, prints."""

from confitune.cli import deploy, listing, training  # noqa: F401  # each adds its commands to the app
from confitune.cli.app import app as app, main as main
