"""What identifies a run: everything that determines its result, and nothing else.

Version 2 leaves out every setting and option that is at its default, so a new one never makes old results strangers.
Version 1 wrote them all. Both are compared by what they say in version 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confitune.engine import require_same_config
from confitune.experiments.methods import option_defaults
from confitune.settings import DataSettings, NetworkSettings, TrainSettings

VERSION = 2
Options = Mapping[str, Mapping[str, Any]]  # by part of the method
_NONE = object()

# Where a run finds things and how it is executed: that may change the last bits of a result, no more. The weights are
# identified by their checksum.
_NOT_PART = {"data_dir", "cache_dir", "weights", "device", "step", "pixels", "deterministic", "eval_batch_size"}

DEFAULTS: Mapping[str, Any] = {
    name: value
    for settings in (DataSettings(), NetworkSettings(), TrainSettings())
    for name, value in settings.model_dump(mode="json").items()
    if name not in _NOT_PART
}


def shortened(config: Mapping[str, Any], usual: Options | None = None) -> dict[str, Any]:
    """A run's configuration in version 2; one of version 1 becomes what version 2 would have written.

    The usual options, by part, are by default those of the method that the configuration names.

    >>> shortened({"method": "ewc", "lr": 0.01, "tasks": 3, "options": {"ewc": {"strength": 7.0, "mode": "eval"}}})
    {'version': 2, 'method': 'ewc', 'tasks': 3, 'options': {'ewc': {'strength': 7.0}}}
    """
    usual = _usual(config) if usual is None else usual
    options = {
        part: {name: value for name, value in values.items() if value != usual.get(part, {}).get(name, _NONE)}
        for part, values in (config.get("options") or {}).items()
    }
    options = {part: values for part, values in options.items() if values}
    apart = {"version", "options"}
    said = {name: value for name, value in config.items() if name not in apart and value != DEFAULTS.get(name, _NONE)}
    return {"version": VERSION, **said, **({"options": options} if options else {})}


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration with what it leaves out, for people to read; version 1 left no option out.

    >>> known = filled({"version": 2, "method": "finetune", "lr": 0.1})
    >>> known["lr"], known["model"], known["pipeline"]
    (0.1, 'tf_efficientnet_lite0', 'clean')
    """
    usual, given = _usual(config) if "version" in config else {}, config.get("options") or {}
    options = {part: {**usual.get(part, {}), **given.get(part, {})} for part in {**usual, **given}}
    said = {name: value for name, value in config.items() if name != "version"}
    return {**said, "options": options, **{name: DEFAULTS[name] for name in DEFAULTS if name not in said}}


def require_same_run(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse what another configuration made, whichever version it was written in."""
    require_same_config(filled(shortened(found)), filled(shortened(wanted)), path)


def _usual(config: Mapping[str, Any]) -> Options:
    method = config.get("method")
    return option_defaults(method) if isinstance(method, str) else {}
