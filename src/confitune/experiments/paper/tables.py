"""The tables: datasets, main results, ablation, controls, deeper networks, hyperparameters."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from confitune.engine import RunResult
from confitune.engine.result import summary_of
from confitune.experiments.paper.numbers import reported, searched
from confitune.experiments.paper.outcome import Outcome, cells_of
from confitune.experiments.paper.plan import Part, Parts, Scope
from confitune.experiments.reporting.table import shown
from confitune.experiments.runs.identity import file_name, filled, value_text
from confitune.experiments.runs.tune import plan_search, run_search, winner
from confitune.metrics import mean_and_interval
from confitune.tasks import TaskSequence, dataset_info
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD


def datasets(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Appendix, table 1, with the images per class that it does not give."""
    rows = []
    for name in scope.datasets:
        tasks = scope.recipe(name, "finetune").load_tasks(IMAGENET_MEAN, IMAGENET_STD)
        counts = _counts(tasks)
        paper = reported("datasets").get(name, {})
        outcome.data[name] = counts
        rows += [
            [name, key.replace("_", " "), f"{value:,}", f"{paper[key]:,}" if key in paper else "-"]
            for key, value in counts.items()
        ]
    outcome.table("Counts", ["dataset", "", "measured", "paper"], rows)


def _counts(tasks: TaskSequence) -> dict[str, int]:
    images = {
        kind: torch.cat([torch.bincount(getattr(t, kind).labels.cpu(), minlength=len(t.classes)) for t in tasks])
        for kind in ("train", "test")
    }
    sizes = {len(task.classes) for task in tasks}
    ends = (("fewest", torch.min), ("most", torch.max))
    return {
        "tasks": len(tasks),
        **({"classes_per_task": sizes.pop()} if len(sizes) == 1 else {}),  # of several datasets they can differ
        "classes_left_over": len(tasks.unused_classes),
        **{f"{kind}_images": int(count.sum()) for kind, count in images.items()},
        **{f"{end}_{kind}_images_of_a_class": int(of(count)) for kind, count in images.items() for end, of in ends},
    }


def table1(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Main results: every method."""
    beats, known = [], []
    for dataset, of_it in parts.items():
        acc, paper = _compare(outcome, dataset, of_it, "table1")
        if acc and paper:
            outcome.claim(f"{dataset}: the order of the methods", *order_of(acc, paper))
        if {"confit", "single-task"} <= set(acc) and paper:
            known.append(f"{dataset}: {acc['confit']:.2f} against {acc['single-task']:.2f}")
            beats.append(acc["confit"] > acc["single-task"])
    text = "ConFiT beats single-task learning on three of four datasets"
    outcome.claim(text, "; ".join(known) or "-", sum(beats) >= 3 if len(beats) == 4 else None)


def table2(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Ablation: {fine-tuning, hierarchical fine-tuning} x {BN, Xconv BN}."""
    for dataset, of_it in parts.items():
        acc, paper = _compare(outcome, dataset, of_it, "table2")
        if len(acc) == 4:
            ordered = sorted(acc, key=lambda m: acc[m])
            told = sorted(paper, key=lambda m: paper[m])
            outcome.claim(
                f"{dataset}: each half helps alone, both together help most"
                + (f" (order: {', '.join(told)})" if told else ""),
                ", ".join(f"{method} {acc[method]:.2f}" for method in ordered),
                (ordered[0], ordered[-1]) == ("finetune", "confit") and (not told or ordered == told),
            )


def _compare(
    outcome: Outcome, dataset: str, parts: Sequence[Part], table: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Add a dataset's rows, and what is to be known of them; ACC by method, measured and the paper's."""
    paper = {method: cells[dataset] for method, cells in reported(table).items() if dataset in cells}
    cells = [cell for p in parts for cell in cells_of(dataset, p.method, p.results, paper.get(p.method, {}))]
    outcome.cells += cells
    if dataset_info(dataset).from_paper and any(part.recipe.pipeline != "published" for part in parts):
        boxes = ", whole images and not their bounding boxes" if dataset == "cub200" else ""
        outcome.notes.append(f"{dataset}: measured with the clean pipeline{boxes}; the paper's numbers are of another")
    if older := [part.method for part in parts if any(map(_lacks_protocol, part.results))]:
        outcome.notes.append(
            f"{dataset}: runs of {', '.join(older)} did not test tasks before their means are recovered. "
            "Their ACC and FGT are with all means recovered, which the published code does for earlier tasks only"
        )
    measured = {cell.method: cell.measured for cell in cells if cell.metric == "ACC"}
    return measured, {method: told["acc"] for method, told in paper.items()}


def _lacks_protocol(run: RunResult) -> bool:
    config = filled(run.config)
    return bool(config["means"]) and config["statistics"] == "running" and run.as_learned is None


def order_of(acc: Mapping[str, float], paper: Mapping[str, float]) -> tuple[str, bool | None]:
    """Which methods stand the other way round than in the paper, and whether none does.

    >>> order_of({"a": 1.0, "b": 3.0, "c": 2.0}, {"a": 1.0, "b": 2.0, "c": 3.0})
    ('the other way round: b above c', False)
    """
    pairs = [sorted(pair, key=lambda m: -acc[m]) for pair in combinations([m for m in acc if m in paper], 2)]
    turned = [f"{above} above {below}" for above, below in pairs if paper[above] < paper[below]]
    if not pairs:
        return "-", None
    return (f"the other way round: {', '.join(turned)}" if turned else "the paper's"), not turned


def controls(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Beyond the paper: other means and statistics, convolutions that never move, no recovery, all data at once."""
    for dataset, of_it in parts.items():
        cases = [
            {
                "case": f"{part.method}, {part.form}" if part.method == "confit" else part.method,
                "acc": mean_and_interval([run.acc for run in part.results]).mean,
                "acc_shown": shown([run.acc for run in part.results], 2),
                "fgt_shown": shown([run.fgt for run in part.results], 2),
                "seeds": len(part.results),
            }
            for part in of_it
        ]
        cases.sort(key=lambda case: (case["acc"], case["case"]), reverse=True)
        outcome.data[dataset] = cases
        rows = [[str(case[key]) for key in ("case", "acc_shown", "fgt_shown", "seeds")] for case in cases]
        outcome.table(dataset, ["", "ACC", "FGT", "seeds"], rows)


def deeper(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Deeper networks: fine-tuning against ConFiT, 50 epochs."""
    networks = list(dict.fromkeys(part.recipe.model for of_it in parts.values() for part in of_it))
    outcome.title += f": {', '.join(networks)}"
    small, *_, large = (network.split(".")[0] for network in (networks * 2 or [""] * 2))
    for dataset, of_it in parts.items():
        found, rows = {}, []
        for part in of_it:
            values = {metric: [getattr(run, metric) for run in part.results] for metric in ("acc", "fgt")}
            cells = [shown(of_metric, 2) for of_metric in values.values()]
            rows.append([part.recipe.model, part.method, *cells, str(len(part.results))])
            means = {metric: mean_and_interval(of_metric).mean for metric, of_metric in values.items()}
            found[part.recipe.model.split(".")[0], part.method] = means
        outcome.table(dataset, ["network", "method", "ACC", "FGT", "seeds"], rows)
        outcome.data[dataset] = [{"network": n, "method": m, **means} for (n, m), means in found.items()]
        for text, method, metric in (
            (f"fine-tuned {large} forgets more than {small}", "finetune", "fgt"),
            (f"ConFiT on {large} beats ConFiT on {small}", "confit", "acc"),
        ):
            pair = [found[network, method][metric] for network in (small, large) if (network, method) in found]
            told = (f"{pair[0]:.2f} and {pair[1]:.2f}", pair[1] > pair[0]) if len(pair) == 2 else ("-", None)
            outcome.claim(f"{dataset}: {text}", *told)


def search(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Hyperparameters: the paper's grids on held-out images, what wins, and what it gives on all training images."""
    head = ["dataset", "method", "option", "tried", "chosen", "paper"]
    head += ["held-out ACC", "ACC, retrained", "FGT, retrained"]
    rows = []
    for dataset in scope.datasets:
        for entry in (entry for entry in searched() if scope.chosen([entry.method])):
            values = scope.recipe(dataset, entry.method).model_dump(exclude_unset=True)
            grid = [value_text(v) for v in (entry.grid[:2] if scope.quick else entry.grid)]
            planned = plan_search(entry.method, values, grid=grid)
            folder = scope.out / "search" / file_name(dataset) / entry.method
            points, retrained = run_search(planned, folder, place=scope.place, resume=True)
            held_out = {value: mean_and_interval([run.acc for run in runs]).mean for value, runs in points.items()}
            best = winner(points)
            told = entry.chosen.get(dataset)
            tested = [summary_of(run.published_matrix) for run in retrained]
            after = {metric: [run[metric] for run in tested] for metric in ("acc", "fgt")}
            chosen = [value_text(best), "-" if told is None else value_text(told), f"{held_out[best]:.2f}"]
            cells = [", ".join(grid), *chosen, *(shown(values, 2) for values in after.values())]
            rows.append([dataset, entry.method, planned.option, *cells])
            outcome.data[f"{dataset}/{entry.method}"] = {
                **{"tried": grid, "held_out_acc": {value_text(value): acc for value, acc in held_out.items()}},
                **{"chosen": best, "paper": told},
                **{metric: mean_and_interval(values).mean for metric, values in after.items()},
            }
    outcome.table("What was chosen", head, rows)
