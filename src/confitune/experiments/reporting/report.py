"""What is written about the runs in a folder: README.md, table.md, a picture, and a page that loads nothing.

A content security policy forbids the page every request and every script, so that a name which got past the escaping
could not run.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.reporting.figures import matrices, overview_figure, png_of, save_figure
from confitune.experiments.reporting.table import COLUMNS, Section, html_table, scenario_words, sections_of, shown
from confitune.experiments.runs.identity import RUNS, WORK, file_name, filled, finished_runs
from confitune.files import write_whole
from confitune.metrics import average_accuracy_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPLAINED = (
    "ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. When learned: accuracy of "
    "each task right after it was learned. BWT: how later tasks changed earlier ones. All in percent. Numbers a task: "
    "what a task added to what is stored, its head included, at most (joint has one task, all of them). Mean ± 95% "
    "interval over seeds; of one or two seeds the values."
)
_OURS = "<!-- Written by confitune. Take this line out to keep the page as it is. -->\n"


def write_text(path: Path, text: str) -> None:
    """Write a page, whole or not at all; a name in it may hold bytes that are no text."""
    write_whole(path, lambda file: file.write(text.encode(errors="replace")))


def write_pages(out: Path) -> None:
    """Write `table.md` and `README.md` about the runs in `runs.jsonl`."""
    results = list(finished_runs(out).values())
    sections = sections_of(results)
    write_text(out / "table.md", "\n".join(section.markdown() for section in sections))
    methods = ", ".join(dict.fromkeys(name for section in sections for name in section.names))
    datasets = ", ".join(dict.fromkeys(section.dataset for section in sections))
    write_readme(
        out,
        f"{len(results)} runs on {datasets}: {methods}. [table.md](table.md) compares them, `runs.jsonl` has a line of "
        "each: accuracy after every task, configuration, versions, device and command.",
        [result.command for result in results],
    )


def write_readme(out: Path, text: str, commands: Iterable[str]) -> None:
    """Write `README.md`: what is here, and the commands that make it again; a page of the user's own is kept."""
    path = out / "README.md"
    if path.exists() and not path.read_text(errors="replace").startswith(_OURS):
        return
    pictures = "".join(f"\n![{path.stem}]({path.name})\n" for path in sorted(out.glob("*.png")))
    made = "\n".join(dict.fromkeys(commands))
    write_text(path, f"{_OURS}# {out.resolve().name}\n\n{text}\n\nMade by\n\n```sh\n{made}\n```\n{pictures}")


def draw_overview(out: Path, result: RunResult) -> Path | None:
    """A picture of the table that a finished run stands in; none where no method learned task after task."""
    sections = sections_of(finished_runs(out).values())
    section = next(section for section in sections if any(result in row.runs for row in section.rows))
    if (figure := _overview(section)) is None:
        return None
    path = out / f"overview-{file_name(section.dataset)}.png"
    save_figure(figure, path)
    return path


def _overview(section: Section) -> Figure | None:
    sequential = matrices({name: row.runs for name, row in zip(section.names, section.rows, strict=True)})
    config = section.rows[0].config
    title = ", ".join([section.dataset, *scenario_words(config), config["model"]])
    return overview_figure(sequential, title=title) if sequential else None


def write_report(folder: Path, out: Path | None = None, title: str | None = None) -> Path:
    """Write a page about every result in `folder`, and return its path.

    The page is one file: it loads nothing and can be sent as it is. The same results give the same bytes.

    Args:
        folder: what `confitune run` wrote, finished or not.
        out: the page, `*.html`; default `report.html` in `folder`.
        title: its heading; default: the folder's name.
    """
    out = out or folder / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfituneError(f"{out} must be an HTML file: choose a name that ends in .html")
    found = finished_runs(folder)
    if not found:
        elsewhere = next(iter(sorted(folder.rglob(RUNS))), None)
        hint = f"but there is {elsewhere}" if elsewhere else f"`confitune run --out {folder}` writes some"
        raise ConfituneError(f"no results in {folder}: {hint}")
    started = (path for path in sorted((folder / WORK).glob("*/*/seed-*")) if path.is_dir())
    known = {key[:8] for key in found}
    unfinished = ["/".join(path.parts[-3:]) for path in started if path.name.rpartition("-")[2] not in known]
    parts = [_tag("p", f"Not finished, and not counted: {', '.join(unfinished)}.")] if unfinished else []
    parts += [part for section in sections_of(found.values()) for part in _section(section)]
    page = Template(files("confitune.experiments.reporting").joinpath("report.html").read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page.substitute(title=escape(title or folder.resolve().name), body="\n".join(parts)))
    return out


def _section(section: Section) -> Iterator[str]:
    """All that is said of one section, the best method first."""
    methods = {name: row.runs for name, row in zip(section.names, section.rows, strict=True)}
    yield _tag("h2", section.dataset)
    yield _tag("p", f"{section.about}.")
    yield html_table(*replace(section, columns=list(COLUMNS)).table())
    yield _tag("p", EXPLAINED)
    if figure := _overview(section):
        yield f'<img alt="overview" src="data:image/png;base64,{base64.b64encode(png_of(figure)).decode()}">'
    after = [f"after {task}" for task in range(1, int(section.rows[0].settings["tasks"]) + 1)]
    yield _tag("h3", "Average accuracy on the tasks learned so far (%)")
    curves = {name: np.stack([average_accuracy_curve(run.matrix) for run in runs]) for name, runs in methods.items()}
    yield html_table(["method", *after], [[name, *map(shown, seeds.T)] for name, seeds in curves.items()])
    yield _tag("h3", "Accuracy of each task after each task (%)")
    for method, runs in methods.items():
        by_task = np.stack([run.matrix for run in runs], axis=-1)  # [i, j, seed]
        yield _tag("h4", method)
        yield html_table(
            ["", *after],
            [[f"task {i + 1}", *("" if np.isnan(a).all() else shown(a) for a in row)] for i, row in enumerate(by_task)],
        )
    yield _tag("h3", "Tasks")
    learned = max((runs[0].tasks for runs in methods.values()), key=len)
    yield html_table(
        ["task", "classes", "training images", "test images"],
        [[t["name"], ", ".join(t["classes"]), str(t["train_images"]), str(t["test_images"])] for t in learned],
    )
    yield _tag("h3", "Runs")
    for method, runs in methods.items():
        for run in runs:
            yield _tag("h4", f"{method}, seed {run.seed}")
            yield f"<ul>{''.join(_tag('li', f'{name}: {text}') for name, text in _facts(run).items())}</ul>"


def _facts(result: RunResult) -> dict[str, str]:
    """What it takes to judge a run and to repeat it."""
    known = filled(result.config)
    options = known.pop("options")
    set_options = [f"{part}.{name}={value}" for part, values in options.items() for name, value in values.items()]
    return {
        "accuracy": shown([result.acc]),
        "seconds": shown([result.seconds]),
        "device": result.device,
        "execution": result.execution,
        "command": result.command,
        "options": ", ".join(set_options) or "none",
        "configuration": ", ".join(f"{name}={value}" for name, value in known.items() if value is not None),
        "versions": ", ".join(f"{package} {version}" for package, version in result.versions.items()),
        "weights": result.weights,
        "weights hash": result.weights_sha256,
        "final hash": result.final_sha256,
    }


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"
