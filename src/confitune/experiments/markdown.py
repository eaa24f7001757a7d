"""The summary as a Markdown table, to paste where people read."""

from __future__ import annotations

from typing import Any

_COLUMNS = (("acc", "ACC ↑"), ("fgt", "FGT ↓"), ("learning_acc", "when learned"))


def summary_markdown(summary: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One table per dataset: methods as rows, mean ± 95% interval over seeds, best accuracy first.

    >>> entry = {"seeds": [0], "acc": {"mean": 90.0, "ci95": None}, "fgt": None, "learning_acc": None,
    ...          "numbers_per_task": [1200], "config": {"model": "net"}, "device": "cpu"}
    >>> print(summary_markdown({"toy": {"joint": entry}}))
    **toy**, net, 1 tasks, 1 seed, on cpu
    <BLANKLINE>
    | method | ACC ↑ | FGT ↓ | when learned | numbers a task |
    |---|---|---|---|---|
    | joint | 90.0 | - | - | 1,200 |
    <BLANKLINE>
    """
    return "\n".join(_table(dataset, methods) for dataset, methods in summary.items())


def _table(dataset: str, methods: dict[str, dict[str, Any]]) -> str:
    first = next(iter(methods.values()))
    config, seeds = first["config"], len(first["seeds"])
    details = [config.get("model", ""), f"{max(len(e['numbers_per_task']) for e in methods.values())} tasks"]
    if config.get("pipeline", "clean") != "clean":
        details.append(f"{config['pipeline']} pipeline")
    if config.get("held_out"):
        details.append(f"tested on {config['held_out']:.0%} of the training images")
    forms = sorted(
        {f"{c['means']} means, {c.get('statistics', 'running')} statistics" for c in _xconv_configs(methods)}
    )
    devices = dict.fromkeys(entry["device"] for entry in methods.values())
    details += [*forms, f"{seeds} seed{'s' if seeds > 1 else ''}", f"on {' and '.join(devices)}"]
    lines = [f"**{dataset}**, {', '.join(details)}", ""]
    lines.append("| method | " + " | ".join(title for _, title in _COLUMNS) + " | numbers a task |")
    lines.append("|---" * (len(_COLUMNS) + 2) + "|")
    for method, entry in sorted(methods.items(), key=lambda item: -item[1]["acc"]["mean"]):
        cells = [_cell(entry[name]) for name, _ in _COLUMNS]
        lines.append(f"| {method} | {' | '.join(cells)} | {max(entry['numbers_per_task']):,} |")
    return "\n".join(lines) + "\n"


def _xconv_configs(methods: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry["config"] for entry in methods.values() if entry["config"].get("means")]


def _cell(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    return f"{value['mean']:.1f}" + (f" ± {value['ci95']:.1f}" if value["ci95"] is not None else "")
