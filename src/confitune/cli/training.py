"""Commands that train: run, tune, reproduce, and the reports of what they wrote."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from confitune.cli.app import Option, app, say, stoppable
from confitune.cli.options import with_settings

Places = Callable[[Console], AbstractContextManager[Any]]
_GOES_ON = "the same command with --resume goes on where it was"
_OURS = "the options given"  # what messages say of a recipe that is no file

RecipeFile = Annotated[
    str | None,
    typer.Argument(help="a YAML file with any of the settings that `confitune options` lists, or a recipe's name"),
]
Seeds = Annotated[int | None, Option(show_default="1", help="how many runs of each method, with seeds 0, 1, ...")]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="NAME=VALUE",
        help="repeatable: any other setting, e.g. weight_decay=1e-4, or an option of a method, e.g. ewc.strength=3000; "
        "`confitune options` lists all of them",
    ),
]
Out = Annotated[Path, Option(help="results, logs and pictures go below this folder")]
Resume = Annotated[bool, Option(help="take what is finished there as it is, and go on with what is not")]
_Where = partial(Option, rich_help_panel="Where runs are done")

# The settings that people change; all others are for --set and recipes.
_NETWORK = ("model", "weights", "means")
_TRAINING = ("epochs", "batch_size", "lr", "device", "precision", "step")
_SETTINGS = ("dataset", "data_dir", "cache_dir", "tasks", "pipeline", *_NETWORK, *_TRAINING)


def _place(
    console: Console,
    on: Annotated[
        str,
        _Where(
            metavar="PLACE",
            help="local: here, one run after the other. ray: many at once on this machine (or on the cluster that "
            "RAY_ADDRESS names). HOST:PORT or ray://HOST:PORT: on that Ray cluster, whose nodes must share the folder "
            "of --out. A run whose node dies goes on from its checkpoint on another",
        ),
    ] = "local",
    parallel_seeds: Annotated[int, _Where(min=1, help="so many seeds of a method at once, to fill a large GPU")] = 1,
    gpus_per_run: Annotated[
        float | None,
        _Where(min=0, max=1, help="on Ray: a run's share of a GPU; 0.2: five at once on each; default: 1, if any"),
    ] = None,
    cpus_per_run: Annotated[
        int | None,
        _Where(min=1, help="on Ray: a run's CPUs and torch's threads; default: its GPU's part of the node's, or 4"),
    ] = None,
) -> AbstractContextManager[Any]:
    from confitune.experiments.runs.runner import open_place

    return open_place(
        on=on, console=console, parallel_seeds=parallel_seeds, gpus_per_run=gpus_per_run, cpus_per_run=cpus_per_run
    )


def _recipe_values(recipe: str | None, changes: list[str] | None, **given: Any) -> dict[str, Any]:
    """The file's values with those given on the command line over them."""
    from confitune.experiments.runs.recipe import merge_settings, read_recipe

    values = {name: value for name, value in given.items() if value is not None}
    return merge_settings({**(read_recipe(recipe) if recipe else {}), **values}, changes or ())


@app.command(name="run")
@with_settings(*_SETTINGS, "scenario", place=_place)
def run_command(
    place: Places,
    recipe: RecipeFile = None,
    method: Annotated[
        list[str] | None,
        Option(help="repeatable: confit, best, finetune, ewc, ... (`confitune methods`), or your own: FILE.py:CLASS"),
    ] = None,
    seeds: Seeds = None,
    changes: Set = None,
    out: Out = Path("confitune-run"),
    resume: Resume = False,
    checkpoint_seconds: Annotated[float, Option(min=0, help="how much work a killed run may lose, at most")] = 30.0,
    **settings: Any,
) -> None:
    """Learn tasks one after the other with each method, and show what each forgets.

    Without options: patches of 20 photographs, 5 tasks, EfficientNet-Lite0, fine-tuning against ConFiT; offline, under
    3 minutes on 2 cores. Options given here win over those in the recipe.

    Accuracy is measured with the task of each test image given, or without it (--scenario): then features of the
    pre-trained network say which tasks it may be of, and these tasks' own heads which class.

    [bold]Examples[/bold]

      confitune run
      confitune run --dataset flowers102 --model resnet18.tv_in1k --method finetune --method confit --seeds 5
      confitune run flowers102.yaml --out runs/flowers --resume  [dim]# a recipe that comes along[/dim]
      confitune run --dataset photos:1-2+digits:1+photos:3-5  [dim]# a task from elsewhere in between[/dim]
      confitune run --scenario class --method best --method lda --method joint  [dim]# which task is not given[/dim]
      confitune run --method ewc --set ewc.strength=3000 --set weight_decay=1e-4
      confitune run --method confit --method ewc --method mas --seeds 5 --on ray --cpus-per-run 1
    """
    from confitune.experiments.reporting.report import draw_overview, write_pages
    from confitune.experiments.reporting.table import summary_tables
    from confitune.experiments.runs.job import TrainingError
    from confitune.experiments.runs.recipe import make_recipe
    from confitune.experiments.runs.runner import run_recipe

    console = Console()
    with stoppable(_GOES_ON):
        values = _recipe_values(recipe, changes, **settings, seeds=seeds, methods=method or None)
        checked = make_recipe(values, recipe or _OURS)
        with place(console) as there:
            try:
                results = run_recipe(checked, out, place=there, resume=resume, checkpoint_seconds=checkpoint_seconds)
            except TrainingError as error:
                if error.results:  # the others are none the worse for it
                    console.print(*summary_tables(error.results))
                raise
    console.print(*summary_tables(results))
    try:
        if picture := draw_overview(out, results[0]):
            write_pages(out)
            say(f"Everything is in {out}; the picture to look at first: {picture}")
    except OSError as error:  # results are there, on a disk that is full or read-only by now
        say(f"Everything is in {out}, but no picture: {error}", "yellow")


@app.command(name="tune")
@with_settings(*_SETTINGS, place=_place)
def tune_command(
    place: Places,
    method: Annotated[str, typer.Argument(help="one method: ewc, si, rwalk, mas, mas-cpr, ewc+confit, ...")],
    recipe: RecipeFile = None,
    option: Annotated[
        str | None, Option(help="what to search, e.g. ewc.strength; default: what the paper searched")
    ] = None,
    grid: Annotated[list[str] | None, Option(help="repeatable: a value to try; default: the paper's values")] = None,
    seeds: Seeds = None,
    changes: Set = None,
    out: Out = Path("confitune-tune"),
    resume: Resume = False,
    retrain: Annotated[bool, Option(help="train the winner again on all training images, and test it")] = True,
    **settings: Any,
) -> None:
    """Choose an option of a method by images held out of training, as the paper did.

    A tenth of every task's training images is held out; each value of the grid is trained on the rest and tested on
    them. The best value (ACC; of equal ones FGT) is written to OUT/winner.yaml and trained again on all training
    images: only then are the test images looked at.

    [bold]Examples[/bold]

      confitune tune ewc --dataset digits --seeds 3
      confitune tune mas-cpr flowers102-paper.yaml --data-dir data --out runs/tune-cpr --resume
      confitune tune ewc+confit --option ewc.strength --grid 300 --grid 3000 --grid 30000 --no-retrain
    """
    from confitune.experiments.reporting.table import sections_of
    from confitune.experiments.runs.tune import edge_note, plan_search, run_search

    values = _recipe_values(recipe, changes, **settings, seeds=seeds)
    search = plan_search(method, values, option, grid or (), recipe or _OURS)
    console = Console()
    with stoppable(_GOES_ON), place(console) as there:
        points, retrained = run_search(search, out, place=there, resume=resume, retrain=retrain)
    for section in sections_of([*(run for runs in points.values() for run in runs), *retrained]):
        console.print(section.terminal())
    if note := edge_note(search, points):
        say(f"note: {note}", "yellow")
    say(f"Everything is in {out}; to run the winner again: confitune run {out / 'winner.yaml'}")


@app.command(name="reproduce")
@with_settings(
    *_SETTINGS[1:], place=_place, pipeline="published, where there is one", model="the paper's ResNet18", means="phase"
)
def reproduce_command(
    place: Places,
    what: Annotated[
        list[str],
        typer.Argument(
            help="datasets, table1, table2, curves, storage, shift, transductive, deeper, search, controls, all, or a "
            "YAML file that names them"
        ),
    ],
    datasets: Annotated[
        list[str] | None, Option(help="repeatable, or with commas; default: flowers102; any that `run` takes")
    ] = None,
    methods: Annotated[list[str] | None, Option(help="only these, of those that are compared")] = None,
    seeds: Annotated[int | None, Option(min=1, help="runs of each method; default: the paper's 5")] = None,
    quick: Annotated[bool, Option("--quick", help="2 tasks, 5 epochs, 1 seed: see that everything works")] = False,
    changes: Set = None,
    out: Out = Path("confitune-reproduction"),
    **settings: Any,
) -> None:
    """Make tables and figures of the paper again, and put its numbers beside what is measured.

    Runs that are done are not done again, whichever table needed them first; a broken-off reproduction goes on where it
    stopped when the same command is given again.

    [bold]Examples[/bold]

      confitune reproduce all --datasets photos --quick
      confitune reproduce table2 --data-dir data --parallel-seeds 5
      confitune reproduce shift --data-dir data --methods hierarchical,confit --means window --set statistics=pass
      confitune reproduce table1.yaml --data-dir data  [dim]# a recipe that comes along[/dim]
    """
    from confitune.experiments.paper.plan import read_scope
    from confitune.experiments.paper.reproduce import PAGE, reproduce

    asked = {"datasets": datasets, "methods": methods, "seeds": seeds}
    given = {**settings, **{name: value for name, value in asked.items() if value}}
    scope, whats = read_scope(what, out, quick, given, changes or ())
    with stoppable("the same command goes on where it was"), place(Console()) as there:
        outcomes = reproduce(whats, replace(scope, place=there))
    for outcome in outcomes:
        verdicts = [cell.verdict for cell in outcome.cells]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("inside", "higher", "lower") if v in verdicts)
        say(outcome.title + (f" ({counts})" if counts else ""))
    say(f"Everything is in {out}; the page to read: {out / PAGE}")


@app.command(name="report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that `confitune run` wrote, finished or not")],
    out: Annotated[Path | None, Option(metavar="FILE", help="the page, *.html; default: DIR/report.html")] = None,
    title: Annotated[str | None, Option(metavar="TEXT", help="heading; default: the folder's name")] = None,
) -> None:
    """Write one page with tables, curves and the provenance of every run.

    The page is a single file that loads nothing: open it, send it, print it.

    [bold]Examples[/bold]

      confitune report confitune-run
      confitune report confitune-run --out photos.html --title "Photos, five tasks"
    """
    from confitune.experiments.reporting.report import write_report

    say(f"The report is {write_report(folder, out, title)}")


@app.command(name="compare")
def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders that `confitune run` wrote")],
    out: Annotated[Path | None, Option(metavar="FILE", help="also write the tables there, as Markdown")] = None,
) -> None:
    """Put runs of different settings side by side: the options that differ, and what they did.

    One table a dataset, best accuracy first. Runs that differ only in their seed are one row. Where the output is no
    terminal, it is Markdown.

    [bold]Examples[/bold]

      confitune compare runs/lr-0.01 runs/lr-0.03
      confitune compare runs --out runs.md
    """
    from confitune.experiments.reporting.table import compare
    from confitune.files import write_whole

    console = Console()
    sections = compare(folders)
    page = "\n".join(section.markdown() for section in sections)
    if console.is_terminal:
        console.print(*(section.terminal() for section in sections), sep="\n\n")
    else:
        print(page, end="")
    if out is not None:
        write_whole(out, lambda file: file.write(page.encode()))
