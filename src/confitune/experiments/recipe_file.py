"""Options in a YAML file, from whoever wrote it.

What a few lines of YAML can stand for has no bound: aliases that refer to one another double with every line. Recipes
need none, nor deep nesting, so both are refused before anything is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from confitune.errors import ConfituneError

MOST_BYTES = 2**16  # a recipe has a few hundred
MOST_DEEP = 20
MOST_LONG = 2000  # characters of one value: Python does not print numbers of more than 4,300 digits


def read_recipe(path: Path) -> dict[str, Any]:
    """The values in a recipe file, by name."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfituneError(f"no recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MOST_BYTES:
        raise ConfituneError(f"{path} is larger than {MOST_BYTES:,} bytes; it is no recipe")
    values = parse_yaml(data, str(path))
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfituneError(f"{path} must hold options by name, e.g. 'dataset: photos'")
    return values


def parse_yaml(data: bytes | str, source: str) -> Any:
    """Plain values; whatever else the text is raises an error that names its source."""
    depth = 0
    try:
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ConfituneError(f"{source} has an alias, *{event.anchor}; write out what it stands for")
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_LONG:
                raise ConfituneError(f"{source} has a value of {len(event.value):,} characters; options are shorter")
            if depth > MOST_DEEP:
                raise ConfituneError(f"{source} is nested more than {MOST_DEEP} deep; options are not")
        return yaml.safe_load(data)
    except ConfituneError:
        raise
    except Exception as error:  # PyYAML raises almost anything: on a 13th month, on a number that is none
        raise ConfituneError(f"{source} is not YAML: {error}") from error
