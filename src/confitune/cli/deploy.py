"""Commands for one growing model of your own: learn, tasks, predict, serve, export."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import closing
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from confitune.cli.app import Option, app, importing, say, stoppable
from confitune.cli.options import with_settings
from confitune.errors import ConfituneError

if TYPE_CHECKING:
    from confitune.deploy import LearnReport, Prediction

_WORTH_A_WORD = 0.01  # probability of a class of another task
# `deploy.export.export.FORMATS`, without the import: help needs no torch.
_FORMATS = [m.name for m in iter_modules([f"{Path(__file__).parents[1]}/deploy/export"]) if m.name != "export"]
BundleFolder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `confitune learn` made")]
Device = Annotated[str, Option(help="auto, cpu, cuda, ...")]
Texts = list[str] | None  # of an option that may be given many times


@app.command(name="learn")
@with_settings(
    *("epochs", "batch_size", "lr", "seed", "augmentation", "model", "weights", "device", "cache_dir"),
    epochs="10, or the method's",
    batch_size="16 with best, else 32",
    lr="0.003 with best, else 0.01",
    augmentation="flip with best, else none",
)
def learn_command(
    folder: Annotated[Path, typer.Argument(help="a folder of photos for each class, or train/ and test/ with those")],
    bundle: Annotated[Path, Option(help="the model's folder; made by the first task")],
    name: Annotated[str | None, Option(help="of a new task, e.g. birds")] = None,
    into: Annotated[str | None, Option(metavar="TASK", help="instead: more classes or photos for this task")] = None,
    keep: Annotated[int, Option(min=0, help="held-out photos to keep with the model, to test the task later")] = 0,
    check: Annotated[int, Option(min=0, help="earlier tasks to test again, at random where there are more")] = 20,
    skip_broken: Annotated[bool, Option("--skip-broken", help="leave out and list unreadable photos")] = False,
    size: Annotated[int | None, Option(min=32, max=224, help="of a new bundle's input in pixels; default 224")] = None,
    method: Annotated[str | None, Option(help="of a new bundle: best (default), confit (the paper's), ...")] = None,
    changes: Annotated[
        Texts, Option("--set", metavar="NAME=VALUE", help="repeatable: any other setting (`confitune options`)")
    ] = None,
    **settings: Any,
) -> None:
    """Teach one model another task from a folder of photos, and see what the earlier tasks lost or gained.

    The first call makes the model from a pre-trained network; every later one adds a task. With --method best the
    network stays as it was pre-trained: a task gets a head, and where that is not enough norms and small changes of its
    own, so earlier tasks lose nothing. A fifth of the photos (or test/) is held out to measure accuracy. No photo stays
    with the model, unless --keep says how many: such tasks are tested again after later ones, up to --check of them.
    If learning is stopped or fails, the model is as it was.

    With --into a task that is there gets new classes, or more photos of its classes; its old photos are not needed.
    Only its head is fitted anew, so this takes seconds.

    [bold]Examples[/bold]

      confitune learn photos/birds --name birds --bundle model
      confitune learn photos/owl --into birds --bundle model
    """
    from pydantic import ValidationError

    from confitune.deploy import LearnSettings, grow, learn
    from confitune.engine.progress import LiveProgress, decoding_bar
    from confitune.experiments.runs.recipe import merge_settings

    console = Console()
    cache_dir = settings.pop("cache_dir", None)
    given = {"size": size, "method": method, "keep": keep, "check": check, "skip_broken": skip_broken}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        checked = LearnSettings.model_validate(merge_settings({**settings, **given}, changes or ()))
    except ValidationError as error:
        wrong = (f"--{problem['loc'][0]} {problem['input']}: {problem['msg']}" for problem in error.errors())
        raise ConfituneError("; ".join(wrong)) from error
    if (name is None) == (into is None):
        raise ConfituneError("give --name for a new task, or --into for one that is there")
    change, task = (learn, str(name)) if into is None else (grow, into)
    live = LiveProgress(console, task, stages=True)
    with stoppable("the bundle is as it was"), decoding_bar(console, lines=True) as decoding, closing(live):
        report = change(folder, task, bundle, checked, cache_dir=cache_dir, listener=live, progress=decoding)
    _print_learned(console, report, bundle)


def _print_learned(console: Console, report: LearnReport, bundle: Path) -> None:
    from confitune.experiments.reporting.table import terminal_table

    rows = []
    for change in report.changes:
        before = "-" if change.before is None else f"{change.before:.1f}"
        moved = "-" if change.before is None else f"{change.after - change.before:+.1f}"
        rows.append([change.task, str(change.images), before, f"{change.after:.1f}", moved])
    rows.append([report.task, str(report.test_images), "", f"{report.accuracy:.1f}", "new"])
    title = f"{report.task}: {len(report.record.classes)} classes, {report.accuracy:.1f}% right"
    caption = "accuracy in percent on held-out photos"
    if len(report.changes) < report.earlier:
        few = f"{len(report.changes):,} of {report.earlier:,}"
        caption += f"; {few} earlier tasks were tested (--check), chosen at random; before: when last tested"
    console.print(terminal_table(["task", "photos", "before", "now", "change"], rows, title=title, caption=caption))
    if report.record.only_head:
        say("The pre-trained features are enough for this task: only a head was fitted.")
    photos = report.record.held_out
    kept = f", held-out photos {photos.bytes / 1e6:.2f} MB" if photos else ""
    grew = f"{bundle} grew by {report.record.file.bytes / 1e6:.2f} MB ({report.numbers:,} numbers and the head)"
    say(f"{grew}{kept}; {report.seconds:.0f} s")


@app.command(name="tasks")
def tasks_command(
    bundle: BundleFolder,
    rename: Annotated[tuple[str, str] | None, Option(metavar="OLD NEW", help="give a task another name")] = None,
    remove: Annotated[
        str | None, Option(metavar="NAME", help="forget a task; its files go with the next change")
    ] = None,
    remove_class: Annotated[str | None, Option(metavar="TASK/CLASS", help="forget a class of a task")] = None,
    undo: Annotated[bool, Option("--undo", help="go back to what it was before its last change")] = False,
    check: Annotated[bool, Option("--check", help="measure every task again on its held-out photos")] = False,
    device: Device = "auto",
    as_json: Annotated[bool, Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """List the tasks of a bundle and what each takes on disk; rename or remove one; undo the last change.

    A class goes with --remove-class; more classes come with `confitune learn --into`.

    [bold]Examples[/bold]

      confitune tasks model
      confitune tasks model --rename birds "birds of Samoa"
      confitune tasks model --check
      confitune tasks model --undo
    """
    from confitune.deploy import Bundle, changing, check_tasks, go_back, remove_class as forget_class
    from confitune.engine.progress import decoding_bar
    from confitune.experiments.reporting.table import terminal_table

    opened = Bundle.open(bundle)
    console = Console()
    changes = rename or remove or remove_class
    if undo and changes:
        raise ConfituneError("--undo goes back on its own: give the other changes afterwards")
    if undo:
        go_back(opened)
    if changes:
        with changing(opened) as change:
            if rename:
                change.rename_task(*rename)
            if remove:
                change.remove_task(remove)
            if remove_class:
                of_task, _, name = remove_class.partition("/")
                forget_class(change, of_task, name)
    with decoding_bar(console) as testing:
        checked = check_tasks(opened, device, testing) if check else None
    accuracy = checked.accuracy if checked else {}
    told, rows = [], []
    for name, record in opened.tasks.items():
        right = accuracy.get(name, record.newest_accuracy)
        size = {"accuracy": right, "bytes": record.file.bytes}
        told.append({"task": name, **record.model_dump(mode="json", include={"classes", "images", "learned"}), **size})
        counts = (str(len(record.classes)), str(record.images), record.learned[:10])
        rows.append([name, *counts, "-" if right is None else f"{right:.1f}", f"{record.file.bytes / 1e3:,.0f}"])
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    head = ["task", "classes", "photos", "learned", "accuracy", "KB"]
    console.print(terminal_table(head, rows, caption="accuracy in percent on held-out photos"))
    if checked and checked.guessed is not None:
        say(
            f"Without --task, {checked.guessed:.1f}% of these photos are assigned to the right task (chance level "
            f"{100 / len(opened.tasks):.1f}%), {checked.unknown:.1f}% to none."
        )


@app.command(name="predict")
def predict_command(
    bundle: BundleFolder,
    images: Annotated[list[str], typer.Argument(help="image files, folders, or patterns such as 'new/*.jpg'")],
    task: Annotated[str | None, Option(help="which task's classes; default: those of all tasks together")] = None,
    top: Annotated[int, Option(min=1, help="so many classes for each image")] = 5,
    device: Device = "auto",
    as_json: Annotated[bool, Option("--json", help="one JSON object for each image, a line each")] = False,
    as_csv: Annotated[bool, Option("--csv", help="a line for each image and class; no task: unknown")] = False,
) -> None:
    """Say what is on photos. Images that cannot be read are named at the end; the exit code is then 1.

    [bold]Examples[/bold]

      confitune predict model new/*.jpg --task birds
      confitune predict model holiday/ --csv --top 1 > answers.csv
    """
    with importing():
        from confitune.deploy import Predictor
        from confitune.deploy.predictor import image_files, predict_files

    errors, files = Console(stderr=True), image_files(images)
    predictor = Predictor.from_bundle(bundle, device=device)
    if task is not None:
        predictor.bundle.record(task)
    failed = 0
    table = csv.writer(sys.stdout, lineterminator="\n")
    if as_csv:
        table.writerow(["image", "task", "class", "probability"])
    for file, answer in predict_files(predictor, files, task, top):
        if isinstance(answer, ConfituneError):
            failed += 1
            say(str(answer), "red", errors)
        elif as_json:
            found = {key: value for key, value in answer.told(top).items() if value or key != "others"}
            typer.echo(json.dumps({"image": str(file), **found}, ensure_ascii=False))
        elif as_csv:
            table.writerows([file, answer.task or "", name, f"{share:.6f}"] for name, share in answer.classes)
        else:
            say(f"{file}: {_in_words(answer)}")
    if failed:
        say(f"{failed} of {len(files)} images could not be read", "red", errors)
        raise typer.Exit(1)


def _in_words(answer: Prediction) -> str:
    if answer.task is None:
        name, share = answer.classes[0]
        return f"unknown: it looks like nothing that was learned (nearest: {name}, {100 * share:.1f}%)"
    own = ", ".join(f"{name} {100 * probability:.1f}%" for name, probability in answer.classes)
    others = [f"{task}: {name} {100 * share:.1f}%" for task, name, share in answer.others if share >= _WORTH_A_WORD]
    found = "; or ".join([own, *others])
    return found if answer.task_confidence is None else f"{answer.task} ({100 * answer.task_confidence:.0f}%): {found}"


@app.command(name="serve")
def serve_command(
    bundle: BundleFolder,
    host: Annotated[str, Option(help="0.0.0.0 to be reached from elsewhere; there is no login")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any free one")] = 8000,
    device: Device = "auto",
    max_batch: Annotated[int, Option(min=1, help="images of all requests that go through the network together")] = 32,
    queue: Annotated[int, Option(min=1, help="images that may wait; more are refused with 429")] = 256,
    max_body_mb: Annotated[int, Option(min=1, help="of one request")] = 32,
    allow_host: Annotated[Texts, Option(metavar="NAME", help="repeatable: a name that it is reached by")] = None,
) -> None:
    """Answer over HTTP, with a page to drop photos on.

    POST /v1/predict (one or many images, task optional), GET /v1/tasks, /healthz, /openapi.json.
    Requests of different tasks go through the network together.

    [bold]Examples[/bold]

      confitune serve model
      curl -F images=@bird.jpg -F task=birds http://127.0.0.1:8000/v1/predict
    """
    with importing():
        from confitune.deploy import Predictor
    from confitune.deploy.server import Limits, serve
    from confitune.deploy.server.app import require_server_packages

    require_server_packages()
    body = max_body_mb * 1_000_000
    of_images = {"max_batch": max_batch, "queue_images": queue, "images": min(queue, Limits.images)}
    limits = Limits(**of_images, body_bytes=body, all_bodies_bytes=max(body, Limits.all_bodies_bytes))
    predictor = Predictor.from_bundle(bundle, device=device)
    serve(predictor, host=host, port=port, limits=limits, hosts=allow_host or ())


@app.command(name="export")
def export_command(
    bundle: BundleFolder,
    task: Annotated[str | None, Option(help="which task")] = None,
    every: Annotated[bool, Option("--all", help="all tasks in one file, which is told the task by its number")] = False,
    to: Annotated[
        str | None, Option(metavar=f"[{'|'.join(_FORMATS)}]", help="format; default: as --out ends, or onnx")
    ] = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="default: the name of the task or the bundle")] = None,
) -> None:
    """Write one task, or all of them, as a file for another runtime: images in, logits out.

    The file is run on ten images of each task and compared with the bundle before it is said to be good. Its metadata
    says how to use it.

    [bold]Examples[/bold]

      confitune export model --task birds --out birds.onnx
      confitune export model --all
    """
    from confitune.deploy import export_bundle

    if (task is None) != every:
        raise ConfituneError("give --task for one task, or --all for all tasks in one file")
    path, difference = export_bundle(bundle, task, out, to)
    say(f"{path}: equal to the bundle up to {difference:.1e} on ten images" + (" of each task" if every else ""))
