"""Checkpoints of a run: damaged, and made on purpose under a true checksum."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from confitune.engine import SequenceRun, TrainSettings
from confitune.engine.checkpoint import CHECKPOINT, Checkpoint, data_of, values_of
from confitune.files import read_sealed, write_sealed
from confitune.methods import create_method
from confitune.tasks import TaskSequence
from confitune.tasks.task import IMAGENET_MEAN, IMAGENET_STD
from fuzz.mutations import DEEP, changed, damaged
from fuzz.watch import Watch

_CONFIG = {"model": "tiny", "lr": 0.05}


def fuzz(watch: Watch) -> None:
    folder = watch.at_hand / "run"
    folder.mkdir()
    path = folder / CHECKPOINT
    sequence = _sequence()
    run = _run(folder, sequence)
    run.run()
    whole = path.read_bytes()
    values = values_of(read_sealed(path))

    def use(data: bytes) -> None:
        """As it is on disk."""
        path.write_bytes(data)
        if Checkpoint.load(folder, _CONFIG) is not None:
            _run(folder, sequence).resume()

    def seal(data: bytes) -> None:
        """Under a true checksum."""
        write_sealed(path, data)
        use(path.read_bytes())

    def say(changed_values: Any) -> None:
        seal(data_of(_with_tensors(changed_values)))

    use(whole)
    inner = read_sealed(path)
    watch.try_many(damaged(whole), use, 150)
    watch.try_many(damaged(inner), seal, 150, found=_harmful(inner, values))
    watch.try_many(changed(_without_tensors(values)), say, 250)
    watch.try_many(_other_tensors(values), lambda other: seal(data_of(other)), 60)


class _Tiny(nn.Module):
    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))).mean((2, 3))


def _sequence() -> TaskSequence:
    chance = torch.Generator().manual_seed(0)
    data = [
        [(torch.randint(0, 256, (3, 8, 8), generator=chance).to(torch.uint8), label % 2) for label in range(10)]
        for _ in range(2)
    ]
    return TaskSequence.from_datasets(data, name="tiny", mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _run(folder: Path, sequence: TaskSequence) -> SequenceRun:
    torch.manual_seed(0)
    method = create_method("ewc+confit", {"ewc": {"strength": 10.0}})
    settings = TrainSettings(epochs=3, batch_size=4, momentum=0.9, device="cpu")
    net = method.network(_Tiny())
    return SequenceRun(net, sequence, method, settings, folder=folder, config=_CONFIG, checkpoint_seconds=0)


class _Held:
    """A tensor or a tuple, among values that are changed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> _Held:
        return self

    def __str__(self) -> str:
        return "a tensor"


def _without_tensors(values: Any) -> Any:
    if isinstance(values, torch.Tensor | tuple):
        return _Held(values)
    if isinstance(values, dict):
        return {key: _without_tensors(value) for key, value in values.items()}
    return [_without_tensors(value) for value in values] if isinstance(values, list) else values


def _with_tensors(values: Any) -> Any:
    if isinstance(values, _Held):
        return values.value
    if isinstance(values, dict):
        return {key: _with_tensors(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_tensors(value) for value in values]
    if values == DEEP:
        deep: list[Any] = []
        for _ in range(300):
            deep = [deep]
        return deep
    return values


@st.composite
def _other_tensors(draw: st.DrawFn, values: Any) -> Any:
    """Some tensor is of another shape, kind or value."""
    places: list[tuple[Any, Any]] = []

    def copied(value: Any) -> Any:
        if isinstance(value, dict | list):
            made = type(value)() if isinstance(value, list) else {}
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inside in items:
                if isinstance(inside, torch.Tensor):
                    places.append((made, key))
                if isinstance(made, list):
                    made.append(copied(inside))
                else:
                    made[key] = copied(inside)
            return made
        return value

    other = copied(values)
    parent, key = draw(st.sampled_from(places))
    tensor = parent[key]
    kinds = (
        tensor[..., None],
        tensor.reshape(-1)[:1],
        torch.zeros(0),
        torch.tensor(float("nan")),
        tensor.to(torch.complex64),
        tensor.bool(),
        torch.full_like(tensor, 100),
        torch.zeros(3, dtype=torch.int8),
    )
    parent[key] = draw(st.sampled_from(kinds))
    return other


def _harmful(inner: bytes, values: dict[str, Any]) -> list[bytes]:
    """What a file can ask for without being damaged."""
    text, _, tensors = inner.partition(b"\n")
    old = io.BytesIO()
    torch.save(values, old)
    return [
        data_of({**values, "config": {**_CONFIG, "lr": torch.zeros(3)}}),
        data_of({**values, "config": {**_CONFIG, 5: 6}}),
        data_of({**values, "net": [["ha"] * 10] * 10}),
        data_of({**values, "matrix": [["a"]]}),
        data_of({**values, "task": 10**30}),
        data_of({**values, "task": -1}),
        data_of([1, 2]),  # type: ignore[arg-type]
        pickle.dumps(values["config"]),
        old.getvalue(),  # as checkpoints once were
        b"[" * 100_000 + b"\n" + tensors,
        b"{}\n" + tensors,
        b'{"tuple": 5}\n' + tensors,
        b'{"channels last": "0"}\n' + tensors,
        text + b"\n",
        text + b"\n" + b"\xff" * 8 + tensors[8:],
    ]
