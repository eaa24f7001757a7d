"""The program, called in this process, and what it said."""

import re
import sys
from pathlib import Path

import pytest

from confitune import cli

SOURCE = Path(cli.__file__).parents[2]


def plain(text):
    """Without colours, which some CI machines force."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Said:
    """What a command said."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, plain(out), plain(err)


def exit_code(patch, arguments):
    """Calls the program; it prints as it does for a user."""
    patch.setattr(sys, "argv", ["/usr/bin/confitune", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0


@pytest.fixture
def confitune(monkeypatch, capsys, tmp_path):
    """Calls the program, which has its home in tmp_path and works in an empty folder."""
    monkeypatch.setenv("CONFITUNE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CONFITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for forced in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(forced, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *arguments: Said(exit_code(monkeypatch, arguments), *capsys.readouterr())


def refused(said):
    """The message of an error that a user can act on."""
    assert said.code == 2
    assert "Traceback" not in said.err + said.out
    assert said.err.startswith("error: ")
    return said.err.removeprefix("error: ").strip()


def rows(out):
    """The cells of a printed table."""
    lines = [line for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def cells(out, first):
    """Those of the row that begins with `first`."""
    (row,) = (row for row in rows(out) if row[0] == first)
    return row
