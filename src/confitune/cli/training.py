"""Commands that train: run, tune, reproduce, and the report of what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from confitune.cli.app import Option, app, stoppable

_WITH_RESUME = "the same command with --resume goes on where it was"

DatasetName = Annotated[
    str | None,
    Option(
        help="photos, digits (offline), flowers102, cifar100, cub200, caltech101, or folder:PATH; or tasks of several, "
        "counted from 1: photos:1-2+digits:1+photos:3-5"
    ),
]
Tasks = Annotated[int | None, Option(help="only the first so many tasks, of all parts of the dataset together")]
Epochs = Annotated[
    int | None, Option(help="a task; default: the dataset's (the paper's for its four sets), of several the first's")
]
BatchSize = Annotated[int | None, Option(help="default: the dataset's, of several the first's")]
PipelineName = Annotated[
    str | None,
    Option(help="clean, or published (what the paper's code fed the network), which every part must have"),
]
FollowName = Annotated[
    str | None, Option(help="what moments of earlier tasks follow: weights (the paper's) or images of later tasks")
]
Rank = Annotated[int | None, Option(help="keep window means as a product of this rank: fewer numbers")]
On = Annotated[
    str,
    Option(
        metavar="PLACE",
        help="where runs are done. local: one after the other. ray: many at once on this machine (or on the cluster "
        "that RAY_ADDRESS names). HOST:PORT or ray://HOST:PORT: on that Ray cluster, whose nodes must share the folder "
        "of --out. A run whose node dies goes on from its checkpoint on another: docs/scaling.md",
    ),
]
GpusPerRun = Annotated[
    float | None,
    Option(min=0, max=1, help="on Ray: a run's share of a GPU; 0.2: five at once on each; default: 1, where there are"),
]
CpusPerRun = Annotated[
    int | None,
    Option(min=1, help="on Ray: a run's CPUs and torch's threads; default: its GPU's part of the node's, else up to 4"),
]


def _recipe_values(recipe: Path | None, given: dict[str, Any], set_option: list[str] | None) -> dict[str, Any]:
    """The file's values with those given on the command line over them."""
    from confitune.experiments import merge_options, read_recipe

    values: dict[str, Any] = read_recipe(recipe) if recipe else {}
    values |= {name: value for name, value in given.items() if value is not None}
    if set_option:
        values["options"] = merge_options(values.get("options") or {}, set_option)
    return values


def _source(recipe: Path | None) -> str:
    return str(recipe) if recipe else "the options given"


_PLACE = ("on", "parallel_seeds", "gpus_per_run", "cpus_per_run")


def _place(asked: dict[str, Any]) -> dict[str, Any]:
    """What says where runs are done."""
    return {name: asked[name] for name in _PLACE}


_NOT_IN_RECIPE = ("recipe", "method", "set_option", "checkpoint_seconds", "out", "resume", *_PLACE)


@app.command(name="run")
def run_command(
    recipe: Annotated[Path | None, typer.Argument(help="a YAML file with any of the options below")] = None,
    dataset: DatasetName = None,
    order_seed: Annotated[int | None, Option(help="of the order of classes, and so of what makes a task")] = None,
    method: Annotated[
        list[str] | None,
        Option(help="repeatable: confit, finetune, hierarchical, finetune-xconv, task-bn, bn-only, linear-probe, ..."),
    ] = None,
    model: Annotated[str | None, Option(help="a timm or torchvision name, e.g. resnet18.tv_in1k")] = None,
    weights: Annotated[str | None, Option(help="a .safetensors or .pth file, or 'none' for a random start")] = None,
    data_dir: Annotated[Path | None, Option(help="folder that holds the datasets")] = None,
    cache_dir: Annotated[Path | None, Option(help="folder for decoded images")] = None,
    seeds: Annotated[int | None, Option(help="how many runs of each method, with seeds 0, 1, ...")] = None,
    tasks: Tasks = None,
    classes_per_task: Annotated[int | None, Option(help="in every part; default: the dataset's")] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str | None, Option(help="auto (bf16 on GPUs), fp32 or bf16")] = None,
    step: Annotated[
        str | None,
        Option(help="auto (graph on GPUs), eager, graph, or compile (a minute to start, a quarter faster after)"),
    ] = None,
    pixels: Annotated[str | None, Option(help="auto (images on the GPU if they fit), device, host")] = None,
    deterministic: Annotated[
        bool | None, Option("--deterministic", help="the same bits in every run on this kind of GPU")
    ] = None,
    pipeline: PipelineName = None,
    means: Annotated[str | None, Option(help="window (exact) or phase (the paper's)")] = None,
    statistics: Annotated[str | None, Option(help="running (the paper's) or pass (after the last step)")] = None,
    variance: Annotated[
        str | None, Option(help="stored (the paper's) or ratio (follows what later tasks do to variances)")
    ] = None,
    follow: FollowName = None,
    rank: Rank = None,
    lr: Annotated[float | None, Option(help="learning rate")] = None,
    optimizer: Annotated[str | None, Option(help="sgd, adam or adamw")] = None,
    momentum: Annotated[float | None, Option(help="of SGD")] = None,
    weight_decay: Annotated[float | None, Option()] = None,
    clip_norm: Annotated[float | None, Option(help="scale gradients down to this norm")] = None,
    lr_schedule: Annotated[str | None, Option(help="constant, cosine or step")] = None,
    augmentation: Annotated[str | None, Option(help="none, flip or flip-shift")] = None,
    set_option: Annotated[
        list[str] | None,
        Option("--set", help="repeatable: an option of a method, e.g. ewc.strength=3000 (see `confitune methods`)"),
    ] = None,
    parallel_seeds: Annotated[int, Option(min=1, help="so many seeds of a method at once, to fill a large GPU")] = 1,
    on: On = "local",
    gpus_per_run: GpusPerRun = None,
    cpus_per_run: CpusPerRun = None,
    checkpoint_seconds: Annotated[float, Option(min=0, help="how much work a killed run may lose, at most")] = 30.0,
    out: Annotated[Path, Option(help="results, logs and pictures go below this folder")] = Path("confitune-run"),
    resume: Annotated[bool, Option(help="take what is finished there as it is, and go on with what is not")] = False,
) -> None:
    """Learn tasks one after the other with each method, and show what each forgets.

    Without options: patches of 20 photographs, 5 tasks, EfficientNet-Lite0, fine-tuning against ConFiT; offline, under
    3 minutes on 2 cores. Options given here win over those in the recipe.

    [bold]Examples[/bold]

      confitune run

      confitune run --dataset flowers102 --model resnet18.tv_in1k --method finetune --method confit --seeds 5

      confitune run recipes/flowers102.yaml --out runs/flowers --resume

      confitune run --dataset photos:1-2+digits:1+photos:3-5  [dim]# a task from elsewhere in between[/dim]

      confitune run --method confit --method ewc --method mas --seeds 5 --on ray --cpus-per-run 1

      torchrun --nproc-per-node 4 -m confitune run --dataset flowers102  [dim]# one network on four GPUs[/dim]
    """
    asked = dict(locals())
    given = {name: value for name, value in asked.items() if name not in _NOT_IN_RECIPE}
    from confitune.experiments import draw_pictures, make_recipe, open_place, run_recipe, summary_table
    from confitune.ranks import joined

    with joined() as ranks, stoppable(_WITH_RESUME, says=ranks.first):
        values = _recipe_values(recipe, given, set_option)
        if method:
            values["methods"] = method
        checked = make_recipe(values, _source(recipe))
        console = Console(quiet=not ranks.first)
        with open_place(console=console, ranks=ranks, **_place(asked)) as place:
            results = run_recipe(checked, out, place=place, resume=resume, checkpoint_seconds=checkpoint_seconds)
    if not ranks.first:
        return
    pictures = draw_pictures(out, checked.methods)
    console.print(summary_table(results))
    if pictures:
        where = f"Everything is in {out}; the picture to look at first: {pictures[-1]}"
        console.print(where, soft_wrap=True, markup=False)


_NOT_IN_TUNE_RECIPE = (*_NOT_IN_RECIPE, "option", "grid", "retrain")


@app.command(name="tune")
def tune_command(
    method: Annotated[str, typer.Argument(help="one method: ewc, si, rwalk, mas, mas-cpr, ewc+confit, ...")],
    recipe: Annotated[Path | None, typer.Argument(help="a YAML file as `confitune run` takes it")] = None,
    dataset: DatasetName = None,
    order_seed: Annotated[int | None, Option(help="of the order of classes, and of what is held out")] = None,
    model: Annotated[str | None, Option(help="a timm or torchvision name, e.g. resnet18.tv_in1k")] = None,
    weights: Annotated[str | None, Option(help="a .safetensors or .pth file, or 'none' for a random start")] = None,
    data_dir: Annotated[Path | None, Option(help="folder that holds the datasets")] = None,
    cache_dir: Annotated[Path | None, Option(help="folder for decoded images")] = None,
    seeds: Annotated[int | None, Option(help="how many runs of each value, with seeds 0, 1, ...")] = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    pipeline: PipelineName = None,
    set_option: Annotated[
        list[str] | None, Option("--set", help="repeatable: another option of the method, e.g. mas.strength=30")
    ] = None,
    option: Annotated[
        str | None, Option(help="what to search, e.g. ewc.strength; default: what the paper searched")
    ] = None,
    grid: Annotated[list[str] | None, Option(help="repeatable: a value to try; default: the paper's values")] = None,
    parallel_seeds: Annotated[int, Option(min=1, help="so many seeds of a value at once, to fill a large GPU")] = 1,
    on: On = "local",
    gpus_per_run: GpusPerRun = None,
    cpus_per_run: CpusPerRun = None,
    out: Annotated[Path, Option(help="everything goes below this folder")] = Path("confitune-tune"),
    resume: Annotated[bool, Option(help="take what is finished there as it is, and go on with what is not")] = False,
    retrain: Annotated[bool, Option(help="train the winner again on all training images, and test it")] = True,
) -> None:
    """Choose an option of a method by images held out of training, as the paper did.

    A tenth of every task's training images is held out; each value of the grid is trained on the rest and tested on
    them. The best value (ACC; of equal ones FGT) is written to OUT/winner.yaml and trained again on all training
    images: only then are the test images looked at.

    [bold]Examples[/bold]

      confitune tune ewc --dataset digits --seeds 3

      confitune tune mas-cpr recipes/flowers102-paper.yaml --data-dir data --out runs/tune-cpr --resume

      confitune tune ewc+confit --option ewc.strength --grid 300 --grid 3000 --grid 30000 --no-retrain
    """
    asked = dict(locals())
    given = {name: value for name, value in asked.items() if name not in _NOT_IN_TUNE_RECIPE}
    from confitune.experiments import edge_note, open_place, plan_search, run_search, search_table

    values = _recipe_values(recipe, given, set_option)
    search = plan_search(method, values, option, grid or (), _source(recipe))
    console = Console()
    with stoppable(_WITH_RESUME), open_place(console=console, **_place(asked)) as place:
        points, retrained = run_search(search, out, place=place, resume=resume, retrain=retrain)
    console.print(search_table(search, points, retrained))
    if note := edge_note(search, points):
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    where = f"Everything is in {out}; to run the winner again: confitune run {out / 'winner.yaml'}"
    console.print(where, soft_wrap=True, markup=False, highlight=False)


@app.command(name="reproduce")
def reproduce_command(
    what: Annotated[
        list[str],
        typer.Argument(
            help="datasets, table1, table2, curves, storage, shift, transductive, deeper, search, theory, controls, "
            "all, or a YAML file that names them"
        ),
    ],
    datasets: Annotated[
        list[str] | None, Option(help="repeatable, or with commas; default: flowers102; any that `run` takes")
    ] = None,
    methods: Annotated[
        list[str] | None,
        Option(help="only these, of those that are compared; shift and transductive also know best"),
    ] = None,
    seeds: Annotated[int | None, Option(min=1, help="runs of each method; default: the paper's 5")] = None,
    pipeline: Annotated[
        str | None, Option(help="published (default: what the paper's numbers come from) or clean")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="2 tasks, 5 epochs, 1 seed: see that everything works")] = False,
    model: Annotated[str | None, Option(help="default: the paper's ResNet18")] = None,
    weights: Annotated[str | None, Option(help="a .safetensors or .pth file, or 'none'")] = None,
    data_dir: Annotated[Path | None, Option(help="folder that holds the datasets")] = None,
    cache_dir: Annotated[Path | None, Option(help="folder for decoded images")] = None,
    tasks: Tasks = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str | None, Option(help="auto (bf16 on GPUs), fp32 or bf16")] = None,
    means: Annotated[str | None, Option(help="phase (default: the paper's) or window (exact)")] = None,
    statistics: Annotated[
        str | None, Option(help="running (default: the paper's) or pass (after the last step)")
    ] = None,
    variance: Annotated[
        str | None, Option(help="stored (default: the paper's) or ratio (follows what later tasks do to variances)")
    ] = None,
    follow: FollowName = None,
    rank: Rank = None,
    parallel_seeds: Annotated[int, Option(min=1, help="so many seeds of a method at once, to fill a large GPU")] = 1,
    on: On = "local",
    gpus_per_run: GpusPerRun = None,
    cpus_per_run: CpusPerRun = None,
    out: Annotated[Path, Option(help="everything goes below this folder")] = Path("confitune-reproduction"),
) -> None:
    """Make tables and figures of the paper again, and put its numbers beside what is measured.

    Runs that are done are not done again, whichever table needed them first; a broken-off reproduction goes on where it
    stopped when the same command is given again. Everything is in index.md.

    [bold]Examples[/bold]

      confitune reproduce all --datasets photos --quick

      confitune reproduce table2 --data-dir data --parallel-seeds 5

      confitune reproduce shift --data-dir data --methods hierarchical,confit,best --means window --variance ratio

      confitune reproduce recipes/table1.yaml --data-dir data
    """
    asked = dict(locals())
    from confitune.experiments import open_place, read_scope, reproduce

    scope, whats = read_scope({name: value for name, value in asked.items() if name not in _PLACE})
    console = Console()
    with stoppable("the same command goes on where it was"), open_place(console=console, **_place(asked)) as place:
        outcomes = reproduce(whats, scope, place=place)
    for outcome in outcomes:
        verdicts = [cell.verdict for cell in outcome.cells]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("inside", "higher", "lower") if v in verdicts)
        where = f"{outcome.title}: {out / (outcome.what + '.md')}" + (f" ({counts})" if counts else "")
        console.print(where, soft_wrap=True, markup=False)
    console.print(f"Everything: {out / 'index.md'}", soft_wrap=True, markup=False)


@app.command(name="report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that `confitune run` wrote, finished or not")],
    out: Annotated[Path | None, Option(metavar="FILE", help="the page, *.html; default: DIR/report.html")] = None,
    title: Annotated[str | None, Option(metavar="TEXT", help="heading; default: the folder's name")] = None,
) -> None:
    """Write one page with tables, curves, accuracy matrices over time and the provenance of every run, and its twin.

    The page is a single file that loads nothing: open it, send it, print it. Beside it stands a Markdown file with the
    same numbers.

    [bold]Examples[/bold]

      confitune report confitune-run

      confitune report results/photos --out photos.html --title "Photos, five tasks"
    """
    from confitune.experiments import write_report

    page, twin = write_report(folder, out, title)
    Console().print(f"The report is {page}, as Markdown {twin}", soft_wrap=True, markup=False, highlight=False)


@app.command(name="compare")
def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders that `confitune run` wrote")],
    out: Annotated[Path | None, Option(metavar="FILE", help="also write the tables there, as Markdown")] = None,
) -> None:
    """Put runs of different settings side by side: the options that differ, and what they did.

    One table a dataset, best accuracy first. Runs that differ only in their seed are one row.

    [bold]Examples[/bold]

      confitune compare runs/lr-0.01 runs/lr-0.03

      confitune compare results/beyond --out beyond.md
    """
    from confitune.experiments import comparison_page
    from confitune.files import write_whole

    page = comparison_page(folders)
    print(page, end="")
    if out is not None:
        write_whole(out, lambda file: file.write(page.encode()))
