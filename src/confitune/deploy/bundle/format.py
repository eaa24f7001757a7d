"""What the files of a bundle are called, and what its manifest says.

    bundle.json          the manifest: the network, the files that all tasks share, the record of every task
    bundle.before.json   the manifest before the last change; every file that it names is still there
    backbones/<sha256>.safetensors
    tasks/<sha256>.safetensors      what one task owns of the network (head, norms, ...)
    held-out/<sha256>.safetensors   held-out images of a task that was asked to keep some
    features/<sha256>.safetensors   features of a task's images; the sums of all tasks' (see `label_space.py`)

A change writes new files under new names, copies the manifest to the one before and renames a new manifest into place:
that rename is the commit. What neither manifest names does not count, so a change that breaks off has not happened, and
the next one deletes what it left.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import nn

from confitune.errors import ConfituneError
from confitune.files import checksum_of
from confitune.methods import METHODS, Method, create_method
from confitune.nn import ContinualNet
from confitune.tasks import Preprocess

FORMAT: Literal[4] = 4  # another one, too, where files hold the same but made otherwise, as sums of other features
MANIFEST, BEFORE, LOCK = "bundle.json", "bundle.before.json", ".lock"
BACKBONES, TASKS, HELD_OUT, FEATURES = FOLDERS = ("backbones", "tasks", "held-out", "features")
NAME_LENGTH = 100


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

    folder: Literal["backbones", "tasks", "held-out", "features"]
    sha256: Sha256
    bytes: int = Field(ge=0)

    @property
    def name(self) -> str:
        """Within the bundle."""
        return f"{self.folder}/{self.sha256}.safetensors"


class TaskRecord(_Record):
    """One task."""

    classes: tuple[Annotated[Text, Field(min_length=1, max_length=1000)], ...] = Field(min_length=2)
    file: StoredFile
    held_out: StoredFile | None = None
    features: StoredFile | None = None
    accuracy: float | None = Field(None, ge=0, le=100, description="when it was learned, on all its test images")
    checked: float | None = Field(None, ge=0, le=100, description="when last tested, on the images that were kept")
    images: int = Field(0, ge=0, description="that it was learned from")
    only_head: bool = Field(False, description="it uses the pre-trained network and owns nothing but a head")
    choice: dict[str, str | float | bool | dict[str, float]] = Field(
        default_factory=dict, description="what the method chose for it, and why"
    )
    epochs: int = Field(0, ge=0)
    learned: Text = Field("", description="when, ISO 8601")

    def files(self) -> list[StoredFile]:
        """Those that are the task's own."""
        return [stored for stored in (self.file, self.held_out, self.features) if stored is not None]

    @property
    def newest_accuracy(self) -> float | None:
        """In percent, when it was last tested, or else when it was learned."""
        return self.accuracy if self.checked is None else self.checked


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

    def around(self, backbone: nn.Module) -> ContinualNet:
        """The network around a backbone of its model, without tasks."""
        return self.learner().network(backbone)


class Manifest(_Record):
    """What a bundle is."""

    format: Literal[4] = FORMAT
    network: Network
    backbone: StoredFile
    pretrained: StoredFile | None = Field(None, description="the network before its first task; often the backbone")
    sums: StoredFile | None = Field(None, description="of the features of all tasks")
    lineage: Sha256 = Field(description="of all backbones up to this one: equal if every step of learning was the same")
    tasks: dict[Name, TaskRecord]
    versions: dict[str, str]
    written: Text

    @cached_property
    def version(self) -> str:
        """Another one after every change."""
        return checksum_of(self.model_dump(mode="json"))[:12]

    def shared_files(self) -> list[StoredFile]:
        """Those of no single task."""
        return [stored for stored in (self.backbone, self.pretrained, self.sums) if stored is not None]

    def files(self) -> set[str]:
        """Names of all files that it needs."""
        of_tasks = [stored for task in self.tasks.values() for stored in task.files()]
        return {stored.name for stored in [*self.shared_files(), *of_tasks]}

    def to_bytes(self) -> bytes:
        """As JSON, with a checksum of itself."""
        values = self.model_dump(mode="json")
        return json.dumps({**values, "checksum": checksum_of(values)}, indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """What `to_bytes` gave, or an error that says what is wrong with it."""
        try:
            values = json.loads(data)
            checksum = values.pop("checksum")
            if checksum != checksum_of(values):
                raise DamagedError(f"{where} is damaged: its checksum does not match; restore it from a copy")
            found = values.get("format")
            if isinstance(found, int) and found != FORMAT:
                raise BundleError(
                    f"{where} was written by another version of confitune (format {found}, not {FORMAT}): use that "
                    "one, or learn its tasks into a new bundle"
                )
            return cls.model_validate(values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            brief = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DamagedError(f"{where} is damaged or not a bundle: {brief}; restore it from a copy") from error


def check_name(task: str) -> str:
    """A task's name that is one line of readable text.

    >>> check_name("birds of Samoa")
    'birds of Samoa'
    >>> check_name("birds\\n")
    Traceback (most recent call last):
    confitune.deploy.bundle.format.BundleError: a task's name must be 1 to 100 readable characters: got 'birds\\n'
    """
    try:
        if 0 < len(task) <= NAME_LENGTH and readable(task) == task.strip():
            return task
    except ValueError:
        pass
    raise BundleError(f"a task's name must be 1 to {NAME_LENGTH} readable characters: got {task[:200]!r}")
