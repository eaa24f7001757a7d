"""What is in a folder that this program wrote, whether it is whole, and what can be mended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confitune.deploy import Bundle, BundleError
from confitune.deploy.held_out import decode_kept
from confitune.engine import BEFORE, CHECKPOINT, RunResult, has_checksum
from confitune.errors import ConfituneError
from confitune.experiments.job import LOCK, RESULT
from confitune.files import DamagedFileError, is_free, read_sealed


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        problem: what, with the file's name.
        remedy: what `repair` does about it, or has done; None: nothing can be done here.
    """

    problem: str
    remedy: str | None = None


@dataclass
class Examination:
    """What was found in a folder."""

    kind: str  # 'bundle' or 'runs'
    contents: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def examine(folder: Path, repair: bool = False) -> Examination:
    """Read everything below a folder and compare it with its checksums.

    Args:
        folder: a bundle, or a folder that `run`, `tune` or `reproduce` wrote.
        repair: do what the findings' remedies say. Nothing that is whole is ever removed, but for what belongs to a
            change of a bundle that did not end, or that is undone because of damage.
    """
    if not folder.is_dir():
        raise ConfituneError(f"there is no folder {folder}")
    if Bundle.exists(folder):
        return _examine_bundle(folder, repair)
    runs = sorted({path.parent for name in (RESULT, CHECKPOINT, BEFORE) for path in folder.rglob(name)})
    if runs:
        return _examine_runs(folder, runs, repair)
    raise ConfituneError(f"{folder} holds no bundle and no runs")


def _examine_bundle(folder: Path, repair: bool) -> Examination:
    found = Examination("bundle")
    try:
        bundle = Bundle.open(folder)
    except BundleError as error:
        found.findings.append(Finding(str(error)))
        return found
    if bundle.damage is not None:
        back = f"gone back to what it was before its last change, on {bundle.written}"
        found.findings.append(Finding(bundle.damage, f"{back}; what was made since is deleted"))
        if repair:
            bundle.go_back()
    network = bundle.network
    about = f"{network.model}, {network.means} means, {network.size} pixels"
    found.contents.append(f"{about}, last changed {bundle.written}")
    try:
        bundle.load_network()
    except ConfituneError as error:
        found.findings.append(Finding(str(error)))
    for task, record in bundle.tasks.items():
        found.contents.append(f"task {task!r}: {len(record.classes)} classes, {record.file.bytes:,} bytes")
        try:
            bundle.task_state(task)
            kept = bundle.held_out(task)
            if kept is not None:
                decode_kept(kept, task)
        except ConfituneError as error:
            found.findings.append(Finding(f"task {task!r}: {error}"))
    if bundle.damage is not None:  # what is left over shows when it is mended
        return found
    for path in bundle.leftovers():
        found.findings.append(Finding(f"{path} is left from a change that broke off", "deleted"))
    if repair and found.findings:
        with bundle.changing():
            bundle.sweep()
    return found


def _examine_runs(folder: Path, runs: list[Path], repair: bool) -> Examination:
    found = Examination("runs")
    for run in runs:
        busy = not is_free(run / LOCK)
        state = "another process is working on it" if busy else _state(run)
        found.contents.append(f"{run.relative_to(folder)}: {state}")
        for finding, source, target in () if busy else _run_problems(run):
            found.findings.append(finding)
            if repair and target is None:
                source.unlink()
            elif repair and target is not None:
                os.replace(source, target)
    return found


def _state(run: Path) -> str:
    if not (run / RESULT).exists():
        return "broken off"
    try:
        checked = "with a checksum" if has_checksum(run / RESULT) else "without a checksum, as results once were"
    except ConfituneError:
        checked = "unreadable"
    return f"finished, {checked}"


def _run_problems(run: Path) -> Iterator[tuple[Finding, Path, Path | None]]:
    """What is wrong, and the file that is to be renamed to another for that, or deleted."""
    newest, before, result = run / CHECKPOINT, run / BEFORE, run / RESULT
    whole = {path: _sealed(path) for path in (newest, before) if path.exists()}
    if result.exists():
        try:
            RunResult.load(result)
        except ConfituneError as error:
            aside = result.with_name(f"{RESULT}.damaged")
            again = "the same command with --resume makes it again"
            yield Finding(str(error).splitlines()[0], f"put aside as {aside.name}; {again}"), result, aside
    if whole.get(newest) is False and whole.get(before):
        yield Finding(f"{newest} is damaged", f"replaced by {BEFORE}, which is whole"), before, newest
    elif whole.get(newest) is False:
        anew = Finding(f"{newest} is damaged, and none before it is whole", "deleted: the run starts anew")
        yield anew, newest, None
    if whole.get(before) is False:
        yield Finding(f"{before} is damaged", "deleted"), before, None
    for partial in sorted(run.glob("*.partial")):
        yield Finding(f"{partial} is left from a file that was not finished", "deleted"), partial, None


def _sealed(path: Path) -> bool:
    try:
        read_sealed(path)
    except DamagedFileError:
        return False
    return True
