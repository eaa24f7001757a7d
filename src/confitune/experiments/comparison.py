"""Runs of many configurations, one table a dataset: what differs between them, and what it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.job import RESULT
from confitune.experiments.summary import shown

_NOT_COMPARED = ("seed", "weights_sha256", "dataset")


@dataclass(frozen=True)
class Setting:
    """The runs of one configuration, all seeds."""

    options: Mapping[str, str]
    results: tuple[RunResult, ...]

    @property
    def acc(self) -> float:
        """Their mean."""
        return sum(result.acc for result in self.results) / len(self.results)


def compare(folders: Sequence[Path]) -> dict[str, list[Setting]]:
    """All runs below the folders: dataset and pipeline -> settings, best first; seeds of one setting are one."""
    paths = sorted({path for folder in folders for path in folder.rglob(RESULT)})
    if not paths:
        where = ", ".join(map(str, folders))
        raise ConfituneError(f"no results below {where}: `confitune run --out FOLDER` writes some")
    groups: dict[str, list[RunResult]] = {}
    options: dict[str, dict[str, str]] = {}
    for result in map(RunResult.load, paths):
        config = {name: value for name, value in result.config.items() if name not in _NOT_COMPARED}
        flat = {"method": result.method, **_flat(config)}
        key = json.dumps([result.dataset, flat], sort_keys=True)
        groups.setdefault(key, []).append(result)
        options[key] = flat
    settings: dict[str, list[Setting]] = {}
    for key, results in groups.items():
        pipeline = results[0].config.get("pipeline", "clean")
        dataset = results[0].dataset + (f" ({pipeline})" if pipeline != "clean" else "")
        settings.setdefault(dataset, []).append(Setting(options[key], tuple(results)))
    return {dataset: sorted(found, key=lambda s: -s.acc) for dataset, found in settings.items()}


def comparison_table(settings: Sequence[Setting]) -> str:
    """One dataset's as Markdown; an option that is the same in all settings is not shown."""
    names = dict.fromkeys(name for setting in settings for name in setting.options)
    differing = [name for name in names if len({setting.options.get(name) for setting in settings}) > 1]
    head = [*differing, "ACC ↑", "FGT ↓", "when learned", "numbers a task", "seeds"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting in settings:
        cells = [setting.options.get(name, "") for name in differing]
        cells += [shown([getattr(r, m) for r in setting.results]) for m in ("acc", "fgt", "learning_acc")]
        numbers = max(task["norm_numbers"] for result in setting.results for task in result.tasks)
        cells += [f"{numbers:,}", str(len(setting.results))]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def comparison_page(folders: Sequence[Path]) -> str:
    """All datasets, with what their settings have in common in words."""
    parts = []
    for dataset, settings in compare(folders).items():
        first = settings[0].results[0]
        common = [str(first.config["model"])] if "model" in first.config else []
        devices = ", ".join(dict.fromkeys(r.device for setting in settings for r in setting.results))
        about = ", ".join([*common, f"{len(first.accuracy_matrix)} tasks", f"on {devices}"])
        parts.append(f"**{dataset}**, {about}\n\n{comparison_table(settings)}\n")
    return "\n".join(parts)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by dotted name, as text; what is not set is not there."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, "" if name == "options" else f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = f"{value:.3g}" if isinstance(value, float) else str(value)
    return flat
