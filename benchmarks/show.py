"""What the benchmarks measured, as tables and pictures in docs/; nothing there is typed in.

    python benchmarks/show.py                # from results/benchmarks/*.json to docs/*.md and docs/speed/*.png

A page says what goes where: between `<!-- results/benchmarks/step-*.json stages -->` and `<!-- end -->` comes the
part 'stages' of every file that matches. A picture carries the hash of the file it was drawn from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import show_figures as figures
import show_floor as floor
import show_tables as tables
from matplotlib.figure import Figure
from show_tables import Numbers

from confitune.experiments.reporting.figures import PIXELS_PER_INCH
from confitune.files import write_whole

PAGES = ("speed.md", "measurements.md")
PICTURES = "speed"  # the folder beside the pages
MARKED = re.compile(r"<!-- results/benchmarks/(\S+\.json) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
NOTHING = "Not measured yet.\n"


@dataclass(frozen=True)
class Part:
    """What of a benchmark is shown in one block."""

    title: str
    about: Callable[[Numbers], str]
    table: Callable[[Numbers], str]
    figure: Callable[[Numbers], Figure] | None = None


PARTS = {
    "stages": Part(
        "Images a second of a training step, statistics silent; in brackets times the published way, which was timed "
        "with everything trained",
        tables.about_steps,
        tables.stages_table,
        figures.stages_figure,
    ),
    "deterministic": Part(
        "Steps that train everything, without and with `deterministic`",
        tables.about_steps,
        tables.deterministic_table,
    ),
    "tracking": Part(
        "Steps that train everything, and whole tasks; in brackets how much longer than with plain batch norm",
        tables.about_steps,
        tables.tracking_table,
        figures.tracking_figure,
    ),
    "floor": Part("Estimated floor", floor.about_floor, floor.floor_table),
    "growth": Part("Task after task with ConFiT", tables.about_growth, tables.growth_table, figures.growth_figure),
    "methods": Part(
        "The comparison methods against fine-tuning in the same run; a task includes its importance pass, AFEC's also "
        "its free copy's training",
        tables.about_growth,
        tables.methods_table,
    ),
    "learn": Part(
        "Accuracy in percent on all test images, and what a task adds to the bundle, head and held-out photos apart",
        tables.about_learn,
        tables.learn_table,
    ),
    "photos": Part("Accuracy in percent on new photos, the task given", tables.about_photos, tables.photos_table),
    "order": Part("Accuracy in percent of tasks that are unlike one another", tables.about_order, tables.order_table),
    "growing": Part("A growing bundle", tables.about_growing, tables.growing_table),
    "space": Part(
        "All classes of all tasks, by features of the pre-trained network alone",
        tables.about_space,
        tables.space_table,
        figures.space_figure,
    ),
    "predict": Part("One task against a guess", tables.about_predict, tables.predict_table),
    "export": Part("One ONNX file of many tasks against a file of each", tables.about_export, tables.export_table),
    "mixed": Part("A mixed batch against one of a single task", tables.about_mixed, tables.mixed_table),
    "many": Part("A bundle of many tasks against one of few", tables.about_many, tables.many_table),
    "load": Part("The server at its limit", tables.about_load, tables.load_table),
    "whole": Part(
        "A whole sequence with ConFiT, evaluation included",
        tables.about_whole,
        tables.whole_table,
        figures.whole_figure,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    shown: set[Path] = set()
    for page in (options.docs / name for name in PAGES):
        text = page.read_text(encoding="utf-8")
        for name, (source, figure) in pictures(text, options.results).items():
            target = options.docs / PICTURES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            save(figure(json.loads(source.read_text())), target, digest(source))
            print(f"drawn: {target}")
        written = rewritten(text, options.results)
        write_whole(page, lambda out, written=written: out.write(written.encode()))  # type: ignore[misc]
        shown |= {source for pattern, _, _ in MARKED.findall(text) for source in options.results.glob(pattern)}
        print(f"written: {page}")
    for source in sorted(set(options.results.glob("*.json")) - shown):
        print(f"no page shows {source}")


def rewritten(text: str, results: Path) -> str:
    """The page with every marked block made anew."""

    def renew(match: re.Match[str]) -> str:
        begin = match[0][: match[0].index("\n") + 1]
        return f"{begin}{block(match[1], match[2], results)}<!-- end -->"

    return MARKED.sub(renew, text)


def block(pattern: str, part: str, results: Path) -> str:
    """What belongs between two markers: for each file its picture, what it was measured on, its table."""
    shown = [_of_file(source, part) for source in sorted(results.glob(pattern))]
    return "\n".join(shown) or NOTHING


def _of_file(source: Path, part: str) -> str:
    how = _part(part)
    numbers = json.loads(source.read_text())
    link = f"[{source.name}](../results/benchmarks/{source.name})"
    picture = f"![{how.title}]({PICTURES}/{picture_name(source, part)})\n\n" if how.figure else ""
    return f"{picture}{how.title}: {how.about(numbers)}, on {tables.where(numbers)} ({link}).\n\n{how.table(numbers)}"


def pictures(text: str, results: Path) -> dict[str, tuple[Path, Callable[[Numbers], Figure]]]:
    """The page's pictures: name -> the file it comes from, and how it is drawn."""
    return {
        picture_name(source, part): (source, figure)
        for pattern, part, _ in MARKED.findall(text)
        if (figure := _part(part).figure)
        for source in sorted(results.glob(pattern))
    }


def picture_name(source: Path, part: str) -> str:
    """Such as step-h200-stages.png."""
    return f"{source.stem}-{part}.png"


def digest(source: Path) -> str:
    """Tells whether a picture was drawn from this file as it is."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def save(figure: Figure, path: Path, source_digest: str) -> None:
    """As a PNG, 1800 pixels wide (readable at 900)."""
    metadata = {"Software": None, "Source": source_digest}
    write_whole(
        path, lambda out: figure.savefig(out, format="png", dpi=PIXELS_PER_INCH, facecolor="white", metadata=metadata)
    )


def _part(name: str) -> Part:
    if name not in PARTS:
        raise SystemExit(f"a block asks for {name!r}; there are {', '.join(PARTS)}")
    return PARTS[name]


if __name__ == "__main__":
    main()
