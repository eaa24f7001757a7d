"""Hooks of mkdocs: what the site has beside the pages of docs/.

The pages of commands and settings are what the program says of itself when the site is built. Files of the repository
that pages point at (results, examples, source) come along, so that every link works without a server or a network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^\s)#:]+)")
_MADE = "This page is made by the program when the site is built.\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the files outside docs/ that pages point at."""
    for uri, content in {"reference/commands.md": commands(), "reference/settings.md": settings()}.items():
        files.append(File.generated(config, uri, content=content))
    for path in pointed_at():
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """In the site, docs/ is the root, and the rest of the repository lies in it."""
    if (ROOT / "docs" / page.file.src_uri).exists():
        return re.sub(r"\]\(\.\./", "](", markdown)
    return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)


def pointed_at() -> list[Path]:
    """Files outside docs/ that a page points at, and what those of them that are pages point at."""
    found: set[Path] = set()
    waiting = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
    waiting.append(ROOT / "results/README.md")
    while waiting:
        page = waiting.pop()
        targets = [page, *((page.parent / target).resolve() for _, target in _LINK.findall(page.read_text("utf-8")))]
        new = {path for path in targets if path.is_file() and ROOT / "docs" not in path.parents} - found
        found |= new
        waiting += [path for path in new if path.suffix == ".md"]
    return sorted(found)


def commands() -> str:
    """The help of every command."""
    import typer

    from confitune.cli import app

    names = [command.name for command in typer.main.get_group(app).commands.values()]
    parts = [f"# Commands\n\n{_MADE}", *(f"## confitune {name}\n\n{_said(name, '--help')}" for name in names)]
    return "\n".join(parts)


def settings() -> str:
    """What `confitune options` lists."""
    return f"# Settings\n\n{_MADE}\nAll of them can stand in a [recipe](../recipes.md).\n\n{_said('options')}"


def _said(*arguments: str) -> str:
    from typer.testing import CliRunner

    from confitune.cli import app

    wide = {"COLUMNS": "124", "TERM": "dumb", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, arguments, prog_name="confitune", env=wide)
    if done.exit_code:
        raise RuntimeError(f"confitune {' '.join(arguments)}: {done.output}") from done.exception
    return "```text\n" + "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines()) + "\n```\n"
