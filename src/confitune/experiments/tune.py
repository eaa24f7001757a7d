"""Do a hyperparameter search: every value of the grid a run in a folder of its own, then the winner on everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, field_validator
from rich.markup import escape
from rich.table import Table

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.drawing import save_figure, search_figure
from confitune.experiments.identity import require_same_run
from confitune.experiments.job import TrainingError, load_backbone
from confitune.experiments.methods import value_text
from confitune.experiments.place import LocalPlace, Place
from confitune.experiments.recipe import Recipe
from confitune.experiments.runner import Plan, finish_plan, plan_recipe, refuse_existing, run_recipe
from confitune.experiments.search import Point, Search, winner
from confitune.experiments.summary import collect_results, shown, summarised
from confitune.files import write_whole

FAILURE = "failed.json"


class _Failure(BaseModel):
    """Why a grid point has no result, and of which run that is true."""

    message: str
    config: dict[str, Any]

    @field_validator("config")
    @classmethod
    def _of_a_run(cls, config: dict[str, Any]) -> dict[str, Any]:
        options = config.get("options") or {}
        by_part = isinstance(options, dict) and all(isinstance(values, dict) for values in options.values())
        if not by_part or not isinstance(config.get("seed", 0), int):
            raise ValueError("its configuration is no run's")
        return config


def run_search(
    search: Search,
    out: Path,
    *,
    place: Place | None = None,
    resume: bool = False,
    retrain: bool = True,
) -> tuple[list[Point], list[RunResult]]:
    """Try every value, write what came out below `out`, and train the winner again on all training images.

    Below `out`: `grid/<part.option=value>/` and `retrained/<part.option=value>/` as `run_recipe` writes them,
    `search.json`, `search.png` and, for `confitune run`, `winner.yaml`.

    Args:
        place: where runs are done (`open_place`); default: here, one after the other, without a word.
        resume: take what is finished or failed there as it is, and do what is missing.
        retrain: else nothing is said of the test images.

    Returns:
        What each value gave on the held-out images, and the results of the retraining (none without it).
    """
    place = place or LocalPlace()
    _refuse_mixing(search, out, resume)
    plans = [_planned(search, value, out, place, resume) for value in search.grid]
    place.begin([job for plan in plans if isinstance(plan, Plan) for job in plan.left])
    points: list[Point] = []
    for value, plan in zip(search.grid, plans, strict=True):
        place.console.print(_where(search, points, place, retrain), markup=False, highlight=False, style="bold")
        points.append(_tried(value, plan, place))
        write_search(search, points, out)
    best = winner(points)
    if best is None:
        raise ConfituneError(
            f"no value of {search.place} could be trained; the first said: {points[0].failure} "
            f"(delete the files {out / 'grid' / '*' / FAILURE} to try them again with --resume)"
        )
    write_winner(search, best, out)
    results: list[RunResult] = []
    if retrain:
        what = f"retraining {search.method} with {search.name(best.value)} on all training images"
        place.console.print(what, markup=False, highlight=False)
        folder = out / "retrained" / search.folder(best.value)
        results = run_recipe(search.retraining(best.value), folder, place=place, resume=resume)
    write_search(search, points, out, results)
    return points, results


def search_table(search: Search, points: list[Point], retrained: list[RunResult]) -> Table:
    """Values as rows, mean and 95% interval over seeds; the winner in bold, with its test accuracy after retraining."""
    recipe, best = search.recipe, winner(points)
    table = Table(
        title=escape(f"{recipe.dataset}: {search.method}, {recipe.model}, {recipe.seeds} seed(s)"),
        caption=f"ACC and FGT in percent, on the {search.held_out:.0%} of the training images that were held out."
        + (" Test ACC and FGT: retrained on all of them." if retrained else ""),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column(search.place, justify="right")
    for column in ("ACC ↑", "FGT ↓", "seconds", *(("test ACC ↑", "test FGT ↓") if retrained else ())):
        table.add_column(column, justify="right")
    failed = any(point.failure for point in points)
    if failed:
        table.add_column("why it failed")
    for point in points:
        value, won = value_text(point.value), point is best
        if point.failure:
            blank = ["-"] * (len(table.columns) - 3)
            table.add_row(value, "[red]failed[/red]", *blank, escape(point.failure))
            continue
        cells = [shown([getattr(r, metric) for r in point.results]) for metric in ("acc", "fgt")]
        cells.append(f"{sum(r.seconds for r in point.results):.0f}")
        if won:
            cells += [shown([getattr(r, metric) for r in retrained]) for metric in ("acc", "fgt") if retrained]
        table.add_row(value, *cells, style="bold" if won else "")
    return table


def edge_note(search: Search, points: list[Point]) -> str:
    """What to say where the best value is the grid's smallest or largest: a better one may lie beyond."""
    best = winner(points)
    if best is None or isinstance(best.value, bool | str) or best.value not in (search.grid[0], search.grid[-1]):
        return ""
    end, beyond = ("smallest", "smaller") if best.value == search.grid[0] else ("largest", "larger")
    return f"{search.name(best.value)} is the {end} value tried; a {beyond} one may be better: try it with --grid"


def write_search(search: Search, points: list[Point], out: Path, retrained: list[RunResult] | None = None) -> None:
    """Write `search.json`, and `search.png` where there is something to draw."""
    best = winner(points)
    whole = len(points) == len(search.grid)
    entries = [
        {"value": point.value, "failure": point.failure}
        if point.failure
        else {"value": point.value, **summarised(point.results)}
        for point in points
    ]
    found = {
        "dataset": search.recipe.dataset,
        "method": search.method,
        "option": search.place,
        "grid": list(search.grid),
        "held_out": search.held_out,
        "points": entries,
        "winner": best.value if best and whole else None,
        "retrained": summarised(retrained) if retrained else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "search.json", lambda file: file.write(json.dumps(found, indent=1).encode()))
    if best is not None and whole:
        measured = {p.value: ([r.acc for r in p.results], [r.fgt or 0.0 for r in p.results]) for p in points}
        title = f"{search.recipe.dataset}, {search.method}: {search.held_out:.0%} of the training images held out"
        figure = search_figure(measured, title=title, option=search.place, best=best.value)
        save_figure(figure, out / "search.png")


def write_winner(search: Search, best: Point, out: Path) -> None:
    """Write `winner.yaml`, a recipe that trains with the best value on all training images."""
    recipe = search.retraining(best.value).model_dump(mode="json", exclude_unset=True)
    tried = ", ".join(map(value_text, search.grid))
    comment = (
        f"# {search.name(best.value)}: the best of {tried}\n"
        f"# on {search.held_out:.0%} of the training images, held out (ACC {best.acc:.2f}, FGT {best.fgt:.2f}).\n"
    )
    text = comment + yaml.safe_dump(recipe, sort_keys=False)
    write_whole(out / "winner.yaml", lambda file: file.write(text.encode()))


def _planned(search: Search, value: Any, out: Path, place: Place, resume: bool) -> Plan | _Failure:
    """The runs of a grid point, or why it failed when it was tried before."""
    recipe, folder = search.validation(value), out / "grid" / search.folder(value)
    return _recorded_failure(place.settled(recipe), folder) or plan_recipe(recipe, folder, place, resume=resume)


def _tried(value: Any, plan: Plan | _Failure, place: Place) -> Point:
    if isinstance(plan, Plan):
        try:
            return Point(value, tuple(finish_plan(plan, place)))
        except TrainingError as error:
            failure = _Failure(message=str(error), config=error.config)
            text = failure.model_dump_json(indent=1)
            write_whole(plan.out / FAILURE, lambda file: file.write(text.encode()))
    else:
        failure = plan
    place.console.print(f"failed: {failure.message}", style="yellow", markup=False, highlight=False)
    return Point(value, failure=failure.message)


def _recorded_failure(recipe: Recipe, folder: Path) -> _Failure | None:
    """Why the point failed when it was tried before; refused if that was with another configuration."""
    path = folder / FAILURE
    if not path.exists():
        return None
    try:
        failure = _Failure.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfituneError(f"{path} cannot be read ({problem}); delete it to try this value again") from error
    seed = failure.config.get("seed", 0)
    if seed not in recipe.run_seeds:  # not asked for this time
        return None
    wanted = recipe.identity(recipe.methods[0], seed, load_backbone(recipe).weights_sha256)
    require_same_run(failure.config, wanted, path)
    return failure


def _refuse_mixing(search: Search, out: Path, resume: bool) -> None:
    if collect_results(out):
        raise ConfituneError(f"{out} holds results of `confitune run`: choose another --out folder for the search")
    if resume:
        return
    folders = [out / "grid" / search.folder(value) for value in search.grid]
    for folder in folders:
        if (folder / FAILURE).exists():
            raise ConfituneError(f"{folder} holds a value that failed: add --resume to go on, or choose another --out")
    refuse_existing([run.parent for folder in folders for run in folder.glob("*/*/seed-*/*")])


def _where(search: Search, done: list[Point], place: Place, retrain: bool) -> str:
    """Which grid point comes next, and what is left with it."""
    left = len(search.grid) - len(done)
    measured = [point for point in done if point.results] if place.at_once is not None else []
    at_once = min(place.at_once or 1, search.recipe.seeds)
    took = [sum(result.seconds for result in point.results) / at_once for point in measured]
    minutes = (left + retrain) * sum(took) / len(took) / 60 if took else 0
    after = [f"{left - 1} more after it"] if left > 1 else []
    after += ["then the retraining"] if retrain else []
    after += [f"about {minutes:.0f} min in all"] if minutes >= 1 else []
    text = f"grid point {len(done) + 1} of {len(search.grid)}: {search.name(search.grid[len(done)])}"
    return text + (f" ({', '.join(after)})" if after else "")
