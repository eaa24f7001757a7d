"""Writes the lock: the version of every package that confitune and its extras need, as installed here.

    make lock

A lock is a file of constraints for pip: it installs nothing by itself, so that the packages of one platform (CUDA
libraries on Linux) are no trouble on another. It holds for the Pythons that all these versions run on; on an older one
pip takes the newest versions that do.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
HEADER = """\
# Every package that confitune and its extras need, in the version that the tests passed with. Written by `make lock`.
# pip install -c constraints.txt confitune
"""


def main() -> None:
    print(HEADER + "\n".join(lines(needed())))


def needed() -> set[str]:
    """Names of all packages that are reached from pyproject.toml through what is installed."""
    extras = [entry for group in PROJECT["optional-dependencies"].values() for entry in group]
    waiting = [Requirement(text) for text in [*PROJECT["dependencies"], *extras]]
    seen: set[tuple[str, str]] = set()  # a package, and an extra of it that is wanted
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        new = {(name, extra) for extra in ("", *requirement.extras)} - seen
        seen |= new
        if name == PROJECT["name"] or not new:
            continue
        for text in distribution(name).requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for _, extra in new):
                waiting.append(inner)
    return {name for name, _ in seen} - {PROJECT["name"]}


def lines(names: set[str]) -> list[str]:
    packages = {name: distribution(name) for name in sorted(names)}
    runs_on = [SpecifierSet(package.metadata["Requires-Python"] or "") for package in packages.values()]
    first = next(python for python in PYTHONS if all(f"{python}.99" in wanted for wanted in runs_on))
    return [
        f"{name}=={package.version.partition('+')[0]} ; python_version >= '{first}'"
        for name, package in packages.items()
    ]


if __name__ == "__main__":
    main()
