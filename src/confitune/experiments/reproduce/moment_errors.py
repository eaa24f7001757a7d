"""In which layers and channels the moments that batch norm uses miss the true ones (beyond the paper).

The second half of the page about representational shift. The paper says nothing of variances, so nothing is claimed
here: tables and a picture speak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from confitune.analysis import OverChannels, ShiftResult
from confitune.experiments.drawing import draw_panels
from confitune.experiments.reproduce.outcome import Outcome, picture_name
from confitune.experiments.reproduce.plan import Scope
from confitune.experiments.tables import markdown_table

# Heading -> what is drawn of it, and its unit.
_PANELS = {
    "Mean error: the mean in use against the true one": ("mean_error_after_last", "deviations"),
    "Variance moved: what there was to follow": ("variance_moved", "log of the ratio"),
    "Variance error: the variance in use against the true one": ("variance_error_after_last", "log of the ratio"),
}


def add_moment_errors(outcome: Outcome, scope: Scope, dataset: str, found: Mapping[str, list[ShiftResult]]) -> None:
    """Tables, a picture and data of one dataset; a note for results from before errors were measured.

    Args:
        found: results by method.
    """
    measured, before = {}, []
    for method, results in found.items():
        known = [result for result in results if result.has_errors]
        if known:
            measured[method] = _Errors.of(known)
        if old := [str(result.seed) for result in results if not result.has_errors]:
            before.append(f"{method} (seed {', '.join(old)})")
    if before:
        outcome.notes.append(
            f"{dataset}: runs from before variances were measured have no errors of moments: {', '.join(before)}; "
            "to see them, delete these runs and run again"
        )
    if not measured:
        return
    outcome.tables[f"{dataset}: used against true moments, mean over convolutions after the last task"] = _overview(
        measured
    )
    for method, errors in measured.items():
        outcome.tables[f"{dataset}, {method}: used against true moments, after the first task → the last"] = _by_layer(
            errors
        )
    _draw(outcome, scope, dataset, measured)
    outcome.data[dataset]["moments"] = {method: errors.as_json() for method, errors in measured.items()}


@dataclass(frozen=True)
class _Errors:
    """One method's, layer by layer."""

    layers: list[str]
    seeds: list[int]
    channels: list[int]
    near_zero: tuple[np.ndarray, np.ndarray]  # channels, mean over seeds: after the first task, after the last
    rms: dict[str, np.ndarray]  # over channels, mean over seeds
    worst: dict[str, list[OverChannels]]  # of all seeds

    @classmethod
    def of(cls, results: Sequence[ShiftResult]) -> _Errors:
        by_seed = [_quantities(result) for result in results]
        zero_first, zero_last = (
            np.mean([[errors.near_zero for errors in after] for after in runs], 0)
            for runs in ([r.after_first for r in results], [r.after_last for r in results])
        )
        return cls(
            layers=results[0].layers,
            seeds=[result.seed for result in results],
            channels=[errors.channels for errors in results[0].after_last],
            near_zero=(zero_first, zero_last),
            rms={name: np.mean([[layer.rms for layer in run[name]] for run in by_seed], 0) for name in by_seed[0]},
            worst={
                name: [
                    max(seeds, key=lambda layer: abs(layer.worst))
                    for seeds in zip(*(run[name] for run in by_seed), strict=True)
                ]
                for name in by_seed[0]
            },
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "channels": self.channels,
            "near_zero_after_first": self.near_zero[0].tolist(),
            "near_zero_after_last": self.near_zero[1].tolist(),
            **{name: values.tolist() for name, values in self.rms.items()},
            "worst": {
                name: [{"channel": layer.worst_channel, "value": layer.worst} for layer in layers]
                for name, layers in self.worst.items()
            },
        }


def _quantities(result: ShiftResult) -> dict[str, list[OverChannels]]:
    return {
        "mean_error_after_first": [layer.mean_error for layer in result.after_first],
        "mean_error_after_last": [layer.mean_error for layer in result.after_last],
        "variance_moved": result.variance_moved,
        "variance_error_after_first": [layer.variance_error for layer in result.after_first],
        "variance_error_after_last": [layer.variance_error for layer in result.after_last],
    }


def _overview(measured: Mapping[str, _Errors]) -> str:
    """One row a method."""
    rows = []
    for method, errors in measured.items():
        cells = []
        for name, _ in _PANELS.values():
            values = errors.rms[name]
            most = int(values.argmax())
            cells += [f"{values.mean():.3f}", f"{errors.layers[most]}: {values[most]:.3f}"]
        rows.append([method, *cells])
    head = ["method", "mean error", "most in", "variance moved", "most in", "variance error", "most in"]
    return markdown_table(head, rows)


def _by_layer(errors: _Errors) -> str:
    """One row a convolution, with the worst channel after the last task."""
    head = ["convolution", "channels", "near zero", "mean error", "worst channel"]
    head += ["variance moved", "worst channel", "variance error", "worst channel"]
    rows = []
    for place, layer in enumerate(errors.layers):
        rms = {name: f"{values[place]:.3f}" for name, values in errors.rms.items()}
        worst = {n: f"{layers[place].worst_channel}: {layers[place].worst:+.3f}" for n, layers in errors.worst.items()}
        cells = [
            layer,
            str(errors.channels[place]),
            " → ".join(f"{counts[place]:g}" for counts in errors.near_zero),
            f"{rms['mean_error_after_first']} → {rms['mean_error_after_last']}",
            worst["mean_error_after_last"],
            rms["variance_moved"],
            worst["variance_moved"],
            f"{rms['variance_error_after_first']} → {rms['variance_error_after_last']}",
            worst["variance_error_after_last"],
        ]
        rows.append(cells)
    return markdown_table(head, rows)


def _draw(outcome: Outcome, scope: Scope, dataset: str, measured: Mapping[str, _Errors]) -> None:
    panels = {
        heading: {
            method: ([float(place) for place in range(1, len(errors.layers) + 1)], errors.rms[name].tolist())
            for method, errors in measured.items()
        }
        for heading, (name, _) in _PANELS.items()
    }
    picture = picture_name("shift-moments", dataset)
    draw_panels(
        panels,
        scope.out / picture,
        title=f"{dataset}: the first task's moments after the last task",
        x="convolution, from the input on",
        y={heading: f"{unit}, root mean square over channels" for heading, (_, unit) in _PANELS.items()},
    )
    outcome.pictures.append(picture)
