"""What identifies a run: everything that determines its result, and nothing else; and the runs that are finished.

Version 2 leaves out every setting and option that is at its default, so a new one never makes old results strangers.
Version 1 wrote them all. Both are compared by what they say in version 2.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from confitune.engine import RunResult, read_results
from confitune.errors import ConfituneError
from confitune.methods import Method, create_method
from confitune.settings import DataSettings, NetworkSettings, TrainSettings

RUNS, WORK = "runs.jsonl", "runs"  # in an experiment's folder: a line for each finished run, folders of runs
_LONGEST = 200  # bytes of a name; file systems take 255, and pictures say more than the dataset

Value = float | bool | str  # of an option
_NONE = object()

XCONV = ("means", "statistics")  # options of Xconv BN: a recipe says them once, for all methods that have them

# Where a run finds things and how it is executed: that may change the last bits of a result, no more. The weights are
# identified by their checksum.
_NOT_PART = {"data_dir", "cache_dir", "weights", "device", "step", "pixels", "deterministic", "eval_batch_size"}

DEFAULTS: Mapping[str, Any] = {
    name: value
    for settings in (DataSettings(), NetworkSettings(), TrainSettings())
    for name, value in settings.model_dump(mode="json").items()
    if name not in _NOT_PART
}


def shortened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration in version 2; one of version 1 becomes what version 2 would have written.

    >>> shortened({"method": "ewc", "lr": 0.01, "tasks": 3, "options": {"ewc": {"strength": 7.0, "mode": "eval"}}})
    {'version': 2, 'method': 'ewc', 'tasks': 3, 'options': {'ewc': {'strength': 7.0}}}
    """
    usual = option_defaults(config.get("method"))
    options = {
        part: {name: value for name, value in values.items() if value != usual.get(part, {}).get(name, _NONE)}
        for part, values in (config.get("options") or {}).items()
    }
    options = {part: values for part, values in options.items() if values}
    apart = {"version", "options"}
    said = {name: value for name, value in config.items() if name not in apart and value != DEFAULTS.get(name, _NONE)}
    return {"version": 2, **said, **({"options": options} if options else {})}


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration with what it leaves out, for people to read; version 1 left no option out.

    >>> known = filled({"version": 2, "method": "finetune", "lr": 0.1})
    >>> known["lr"], known["model"], known["pipeline"]
    (0.1, 'tf_efficientnet_lite0', 'clean')
    """
    usual = option_defaults(config.get("method") if "version" in config else None)
    given = config.get("options") or {}
    options = {part: {**usual.get(part, {}), **given.get(part, {})} for part in {**usual, **given}}
    said = {name: value for name, value in config.items() if name != "version"}
    return {**said, "options": options, **{name: DEFAULTS[name] for name in DEFAULTS if name not in said}}


def run_key(config: Mapping[str, Any], but: Sequence[str] = ()) -> str:
    """The same for the same run, whichever version its configuration was written in; without what `but` names.

    >>> run_key({"method": "ewc", "lr": 0.01, "seed": 3}) == run_key({"version": 2, "method": "ewc", "seed": 3.0})
    True
    """
    said = {name: value for name, value in shortened(config).items() if name not in but}
    return hashlib.sha256(json.dumps(_plain(said), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Whole numbers as integers, so that 30 and 30.0 are the same text."""
    if isinstance(value, Mapping):
        return {name: _plain(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def finished_runs(out: Path) -> dict[str, RunResult]:
    """The runs of an experiment by their keys, as they were finished; of the same run the last."""
    return {run_key(result.config): result for result in read_results(out / RUNS)}


def file_name(name: str) -> str:
    """What the folder or file of a dataset or a method is called; a name that is too long is cut, with a checksum.

    >>> file_name("photos:1-2+folder:/data/my images"), file_name("ewc+confit"), file_name("my/method.py:Mine")
    ('photos-1-2+folder-data-my-images', 'ewc+confit', 'my-method.py-Mine')
    """
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 9]}-{zlib.crc32(os.fsencode(name)):08x}"


def options_of(method: Method) -> dict[str, type[BaseModel]]:
    """The models of a method's options, by part; empty for one that has none."""
    return {type(hook).name: hook.Options for hook in method.hooks if set(hook.Options.model_fields) - {*XCONV}}


@cache
def option_defaults(name: Any) -> dict[str, dict[str, Any]]:
    """Defaults of a method's options, by part, as JSON takes them; none for a method that is not here any more.

    Results of other people name methods, too: a file or module that a name refers to is not executed for them.
    """
    try:
        models = options_of(create_method(name)) if isinstance(name, str) and ":" not in name else {}
    except ConfituneError:
        return {}
    return {part: options().model_dump(mode="json") for part, options in models.items()}


def value_text(value: Value) -> str:
    """As it is typed.

    >>> value_text(300000.0), value_text(0.005), value_text(True), value_text("train")
    ('300000', '0.005', 'true', 'train')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, int | float) else str(value)
