"""What the files of a bundle hold, what they are called, and how tensors are written to them and read.

    bundle.json          the head: network, preprocessing, the backbone's file, how far the index counts
    bundle.before.json   the head before the last change; every file that it needs is still there
    index.jsonl          what happened to tasks, one line each; only ever appended to
    backbones/<sha256>.safetensors
    tasks/<sha256>.safetensors      what one task owns of the network (head, norms, ...)
    held-out/<sha256>.safetensors   a task's held-out images, as PNG
    features/<sha256>.safetensors   features of a task's images; the sums of all tasks' (see `label_space.py`)
    .unfinished          is there from the first file that a change writes until all is done

A change writes new files under new names, appends to the index and then renames a new head into place: that rename is
the commit. Whatever no head names does not count, so a change that breaks off has not happened. After the commit the
old head becomes the one before, and what only the one before that needed is deleted. Files are looked for that nothing
names only where `.unfinished` says that a change broke off: the others take the same time however many tasks there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.files import checksum_of, open_plain, write_whole
from confitune.methods import METHODS, Method, create_method
from confitune.tasks import Preprocess

FORMAT = 2
HEAD, BEFORE, INDEX = "bundle.json", "bundle.before.json", "index.jsonl"
LOCK, UNFINISHED = ".lock", ".unfinished"
BACKBONES, TASKS, HELD_OUT, FEATURES = FOLDERS = ("backbones", "tasks", "held-out", "features")
NAME_LENGTH = 100
_FOLDER = f"({'|'.join(FOLDERS)})/"
_OWN = re.compile(
    rf"{_FOLDER}[0-9a-f]{{64}}\.safetensors|({_FOLDER})?([0-9a-f]{{64}}|bundle|bundle\.before)\.[0-9a-f]{{32}}\.partial"
)
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_KINDS = {*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}


def readable(text: str) -> str:
    """One line of text that can be shown: a terminal obeys other characters, and they can hide what is there."""
    if not text.isprintable() and any(unicodedata.category(c) in _UNSEEN and c not in _JOINERS for c in text):
        raise ValueError(f"{text[:200]!r} holds characters that cannot be shown")
    return text


_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # of Persian words, of emoji
Text = Annotated[str, AfterValidator(readable)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[Text, Field(min_length=1, max_length=NAME_LENGTH)]
MethodOptions = dict[str, float | int | bool | str]


class BundleError(ConfituneError):
    """A bundle, or what was asked of it, cannot be used; the message says what to do."""


class DamagedError(BundleError):
    """A file of a bundle is not what was written, or is gone."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StoredFile(_Record):
    """A file that is named by what it holds."""

    sha256: Sha256
    bytes: int = Field(ge=0)


class TaskRecord(_Record):
    """One task."""

    classes: tuple[Annotated[Text, Field(min_length=1, max_length=1000)], ...] = Field(min_length=2)
    file: StoredFile
    held_out: StoredFile | None = None
    held_out_images: int = Field(0, ge=0)
    features: StoredFile | None = None
    accuracy: float | None = Field(None, ge=0, le=100, description="when it was learned, on all its test images")
    images: int = Field(0, ge=0, description="that it was learned from")
    only_head: bool = Field(False, description="it uses the pre-trained network and owns nothing but a head")
    choice: dict[str, str | float | bool | dict[str, float]] = Field(
        default_factory=dict, description="what the method chose for it, and why"
    )
    epochs: int = Field(0, ge=0)
    learned: Text = Field("", description="when, ISO 8601")


class Added(_Record):
    """A task was learned or copied here."""

    op: Literal["add"] = "add"
    task: Name
    record: TaskRecord


class Replaced(_Record):
    """A task has learned more, or lost classes."""

    op: Literal["replace"] = "replace"
    task: Name
    record: TaskRecord


class Renamed(_Record):
    """A task has another name."""

    op: Literal["rename"] = "rename"
    task: Name
    to: Name


class Removed(_Record):
    """A task is gone."""

    op: Literal["remove"] = "remove"
    task: Name


class Checked(_Record):
    """Accuracy on held-out images after a task was learned."""

    op: Literal["check"] = "check"
    after: Name
    accuracy: dict[Name, float]


Event = Added | Replaced | Renamed | Removed | Checked
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="op")])


class Network(_Record):
    """What the network is, and what its inputs must look like."""

    model: Text
    means: Literal["window", "phase"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: int = Field(ge=1, le=224, description="in pixels: images are cut to 224 square ones first")
    weights: Text = Field(description="what it was pre-trained with")
    weights_sha256: Sha256
    statistics: Literal["running", "pass"] = Field("running", description="how means are measured")
    method: str = Field("confit", pattern=r"^[\w-]+$", description="that its tasks are learned with, never a file")
    options: MethodOptions = Field(default_factory=dict, description="of the method")

    def preprocess(self) -> Preprocess:
        """How images of `CROP` pixels become its inputs."""
        return Preprocess.of_cut(self.mean, self.std, self.size)

    def learner(self) -> Method:
        """What its tasks are learned with."""
        kind = METHODS.get(self.method)
        if kind is None:
            raise BundleError(f"its tasks were learned with {self.method!r}, which this confitune does not have")
        of_network: dict[str, Any] = {"means": self.means, "statistics": self.statistics}
        own = {name: value for name, value in of_network.items() if name in kind.Options.model_fields}
        return create_method(self.method, {self.method: {**own, **self.options}})


class Head(_Record):
    """What counts of a bundle's files."""

    format: Literal[2] = 2
    network: Network
    backbone: StoredFile
    pretrained: StoredFile | None = Field(None, description="the network before its first task; often the backbone")
    sums: StoredFile | None = Field(None, description="of the features of all tasks")
    lineage: Sha256 = Field(description="of all backbones up to this one")
    index_bytes: int = Field(ge=0)
    index_chain: Sha256 = Field(description="of the index's lines up to there")
    versions: dict[str, str]
    written: Text


def check_name(task: str) -> str:
    """A task's name that is one line of readable text.

    >>> check_name("birds of Samoa")
    'birds of Samoa'
    >>> check_name("birds\\n")
    Traceback (most recent call last):
    confitune.deploy.format.BundleError: a task's name must be 1 to 100 readable characters: got 'birds\\n'
    """
    try:
        if 0 < len(task) <= NAME_LENGTH and readable(task) == task.strip():
            return task
    except ValueError:
        pass
    raise BundleError(f"a task's name must be 1 to {NAME_LENGTH} readable characters: got {task[:200]!r}")


def file_name(folder: str, stored: StoredFile) -> str:
    """Of a stored file within the bundle."""
    return f"{folder}/{stored.sha256}.safetensors"


def files_of(record: TaskRecord) -> list[tuple[str, StoredFile]]:
    """A task's files, each with its folder."""
    kept = ((HELD_OUT, record.held_out), (FEATURES, record.features))
    return [(TASKS, record.file), *((folder, stored) for folder, stored in kept if stored is not None)]


def files_of_head(head: Head) -> list[tuple[str, StoredFile]]:
    """The files that all tasks share, each with its folder."""
    shared = ((BACKBONES, head.pretrained), (FEATURES, head.sums))
    return [(BACKBONES, head.backbone), *((folder, stored) for folder, stored in shared if stored is not None)]


def chained(chain: str, lines: Iterable[bytes]) -> str:
    """The hash of a growing list, without its beginning: each line is hashed along with what the hash was."""
    for line in lines:
        chain = hashlib.sha256(chain.encode() + line).hexdigest()
    return chain


EMPTY = hashlib.sha256(b"").hexdigest()


def head_to_bytes(head: Head) -> bytes:
    """The head as JSON, with a checksum of itself."""
    values = head.model_dump(mode="json")
    return json.dumps({**values, "checksum": checksum_of(values)}, indent=1, ensure_ascii=False).encode() + b"\n"


def head_from_bytes(data: bytes, where: str) -> Head:
    """The head, or an error that says what is wrong with it."""
    try:
        values = json.loads(data)
        checksum = values.pop("checksum")
        if checksum != checksum_of(values):
            raise DamagedError(f"{where} is damaged: its checksum does not fit; restore it from a copy")
        found = values.get("format")
        if isinstance(found, int) and found != FORMAT:
            raise BundleError(
                f"{where} was written by another version of confitune (format {found}, not {FORMAT}): use that one, or "
                "learn its tasks into a new bundle"
            )
        return Head.model_validate(values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{where} is damaged, or no bundle's: {_brief(error)}; restore it from a copy") from error


def event_to_line(event: Event) -> bytes:
    """One line of the index."""
    return event.model_dump_json().encode() + b"\n"


def event_from_line(line: bytes, where: str) -> Event:
    """What the line says happened."""
    try:
        return _EVENT.validate_json(line)
    except ValidationError as error:
        raise DamagedError(f"{where} is damaged: {_brief(error)}; restore it from a copy") from error


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def own_files(path: Path) -> list[str]:
    """Files with names that only a bundle gives: stored tensors, and files that were not finished."""
    return [name for name in _names_in(path) if _OWN.fullmatch(name)]


def foreign_files(path: Path) -> list[str]:
    """What is in a folder that no bundle writes."""
    usual = {LOCK, UNFINISHED, INDEX, *FOLDERS}
    return [name for name in _names_in(path) if name not in usual and not _OWN.fullmatch(name)]


def _names_in(path: Path) -> list[str]:
    found = [*path.glob("*"), *(entry for folder in FOLDERS for entry in (path / folder).glob("*"))]
    return sorted(entry.relative_to(path).as_posix() for entry in found)


class TensorFiles:
    """Files of tensors in a bundle. Each is compared with its hash when it is first needed, and with its size always.

    Args:
        root: the bundle's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._whole: set[str] = set()  # names of files that were compared

    def store(self, folder: str, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> StoredFile:
        """Write tensors to `<sha256>.safetensors`; the same ones again are not written again.

        Args:
            about: goes into the file's own metadata, so that it can be read without the bundle.
        """
        # One entry: safetensors writes several in an order of its own each time, and the same would not be one file.
        metadata = {"confitune": json.dumps(about, sort_keys=True)}
        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata)
        stored = StoredFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        path = self._root / file_name(folder, stored)
        self._whole.discard(file_name(folder, stored))
        try:
            self.check(folder, stored)
        except DamagedError:  # or it is not there yet
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda out: out.write(data))
        return stored

    def check(self, folder: str, stored: StoredFile) -> bytes:
        """The file as it was stored; raises if it is not that."""
        name = file_name(folder, stored)
        path = self._root / name
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != stored.bytes:
                    raise DamagedError(f"{path} is damaged: {size} bytes, not {stored.bytes}; restore it from a copy")
                data = file.read()
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
        if name not in self._whole and hashlib.sha256(data).hexdigest() != stored.sha256:
            raise DamagedError(f"{path} is damaged: its hash is not its name; restore it from a copy")
        self._whole.add(name)
        return data

    def read(self, folder: str, stored: StoredFile) -> dict[str, Tensor]:
        """The tensors that `store` wrote."""
        data, path = self.check(folder, stored), self._root / file_name(folder, stored)
        try:
            tensors = load(data)
        except Exception as error:  # whatever a file can be that only its hash vouches for
            raise BundleError(f"{path} holds no tensors: {error}") from error
        if not {tensor.dtype for tensor in tensors.values()} <= _KINDS:
            raise BundleError(f"{path} holds tensors of a kind that no bundle has")
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise BundleError(f"{path} holds numbers that are not finite: nothing can be predicted with them")
        return tensors
