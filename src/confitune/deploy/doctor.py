"""What is in a bundle, whether it is whole, and what can be mended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from confitune.deploy.bundle import Bundle, DamagedError, changing, go_back
from confitune.errors import ConfituneError


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    problem: str  # with the file's name
    remedy: str | None = None  # what `repair` does about it, or has done; None: nothing can be done here


@dataclass
class Examination:
    """What was found in a bundle."""

    contents: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def examine(folder: Path, repair: bool = False) -> Examination:
    """Read every file of a bundle and compare it with its checksum; with `repair`, do what the remedies say.

    Nothing that is whole is removed, except what belongs to a change that broke off or is undone because of damage.
    """
    found = Examination()
    try:
        bundle = Bundle.open(folder)
    except DamagedError as error:
        found.findings.append(Finding(str(error)))
        return found
    if bundle.damage is not None:
        back = f"gone back to what it was before its last change, on {bundle.manifest.written}"
        found.findings.append(Finding(bundle.damage, f"{back}; what was made since is deleted"))
        if repair:
            go_back(bundle)
    network = bundle.network
    found.contents.append(f"{network.model}, {network.size} pixels, last changed {bundle.manifest.written}")
    try:
        bundle.load_network()
        if any(record.features for record in bundle.tasks.values()):
            bundle.load_pretrained()
            bundle.label_space()
    except ConfituneError as error:
        found.findings.append(Finding(str(error)))
    for task, record in bundle.tasks.items():
        found.contents.append(f"task {task!r}: {len(record.classes)} classes, {record.file.bytes:,} bytes")
        try:
            bundle.task_state(task)
            bundle.features(task)
            bundle.held_out(task)
        except ConfituneError as error:
            found.findings.append(Finding(f"task {task!r}: {error}"))
    if bundle.damage is not None:  # what is left over shows when it is mended
        return found
    for path in bundle.leftovers():
        found.findings.append(Finding(f"{path} is left from a change that broke off", "deleted"))
    if repair and found.findings:
        with changing(bundle):  # deletes them
            pass
    return found
