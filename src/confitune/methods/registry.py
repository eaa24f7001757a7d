"""Methods by name, also those in files of a user's own, and combinations of several."""

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from confitune.errors import ConfituneError
from confitune.files import run_file
from confitune.methods.method import METHODS, Method

_PAPER_NAMES = {"mas-cpr": "mas+cpr", "mas-afec": "mas+afec"}


def create_method(name: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> Method:
    """A method by name ('confit'), from a file ('my_method.py:MyMethod'), or several joined by '+' ('ewc+confit').

    Of a combination one may say what tasks own and when it is trained (default: fine-tuning); the others add to its
    steps. The paper's 'mas-cpr' and 'mas-afec' stand for 'mas+cpr' and 'mas+afec'.

    Args:
        options: by the name of the method, {"ewc": {"strength": 1e4}}; see `confitune methods`.

    >>> create_method("confit").parts()[0].kind
    'XconvNorms(window, running)'
    >>> [hook.options.strength for hook in create_method("ewc+confit", {"ewc": {"strength": 300}}).added]
    [300.0]
    """
    options = options or {}
    found = method_classes(name)
    bases = [kind for kind in found if kind.is_base()]
    if len(set(found)) != len(found):
        raise ConfituneError(f"{name!r} names a method twice")
    if len(bases) > 1:
        named = ", ".join(kind.name for kind in bases)
        raise ConfituneError(f"{name!r} names {len(bases)} that say what is trained and when ({named}); give one")
    first = (bases or found)[0]
    method = first(**options.get(first.name, {}))
    method.added = tuple(kind(**options.get(kind.name, {})) for kind in found if kind is not first)
    method.name = name
    if method.added and (method.separate or method.joint):
        raise ConfituneError(f"{name}: a term that protects earlier tasks makes no sense where there are none")
    if method.added and not any("weights" in stage.trains for stage in method.stages(10, 1)):
        raise ConfituneError(f"{name}: there is nothing to protect where later tasks never move the backbone")
    return method


def method_classes(name: str) -> list[type[Method]]:
    """The classes that a name stands for, in its order."""
    return [_class_of(part) for joined in name.split("+") for part in _PAPER_NAMES.get(joined, joined).split("+")]


def _class_of(name: str) -> type[Method]:
    if name in METHODS:
        return METHODS[name]
    place, colon, attribute = name.rpartition(":")
    if colon and place.endswith(".py"):
        found = getattr(_module(str(Path(place).resolve())), attribute, None)
        if not (isinstance(found, type) and issubclass(found, Method) and found.name):
            raise ConfituneError(f"{place} has no method {attribute!r}: a class derived from Method, with a name")
        return found
    if name.endswith(".py"):  # not run: a name in someone else's results may be one
        raise ConfituneError(f"no method {name!r}: write {name}:CLASS, a class in it that is derived from Method")
    near = difflib.get_close_matches(name.lower(), METHODS, 1, 0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfituneError(f"no method {name!r}: {hint}There are {', '.join(METHODS)}.")


@cache
def _module(place: str) -> ModuleType:
    """A file by its path, which is run once."""
    try:
        return run_file(place)
    except Exception as error:
        raise ConfituneError(f"no method can be taken from {place}: {type(error).__name__}: {error}") from error
