"""Bundles: every file of one, damaged, and changed with all checksums made right again."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load, save

from confitune.deploy import Bundle, LearnSettings, Predictor, examine, learn
from confitune.files import checksum_of
from confitune.methods import METHODS
from deploy.shared import settling
from fuzz.mutations import as_json, changed, damaged, holds_deep
from fuzz.watch import Watch


def fuzz(watch: Watch) -> None:
    source, model = watch.at_hand / "source", watch.at_hand / "model"
    _teach(source)
    shutil.copytree(source, model)
    files = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    net = Bundle.open(model).load_network()

    def use() -> None:
        """Read everything there is, the network apart."""
        bundle = Bundle.open(model)
        for task in bundle.tasks:
            bundle.load_task(net, task)
            net.drop_task(task)
            bundle.features(task)
            bundle.held_out(task)
        bundle.label_space()

    def restored(work: Any) -> Any:
        def done(value: Any) -> None:
            try:
                work(value)
            finally:
                _restore(model, files)

        return done

    @restored
    def damage(case: tuple[Path, bytes]) -> None:
        path, data = case
        (model / path).write_bytes(data)
        use()

    @restored
    def manifest(values: Any) -> None:
        (model / "bundle.json").write_text(_sealed(values))
        use()
        Predictor.from_bundle(model, device="cpu").predict(pixels, [None])

    @restored
    def tensors(case: tuple[Path, bytes]) -> None:
        _exchange(model, *case)
        use()

    def other_tensors(case: tuple[Path, tuple[str, str, str]]) -> None:
        tensors((case[0], _with_other(files[case[0]], case[1])))

    @restored
    def look(case: tuple[Path, bytes]) -> None:
        _exchange(model, *case)
        examine(model)

    use()
    small = [path for path in files if path.suffix == ".json"]
    large = [path for path in files if path.suffix == ".safetensors"]
    mine = [path for path in large if path.parts[0] != "backbones"]
    watch.try_many(_of(small, lambda path: damaged(files[path])), damage, 200)
    watch.try_many(_of(large, lambda path: damaged(files[path])), damage, 100)
    watch.try_many(changed(json.loads(files[Path("bundle.json")])), manifest, 350)
    watch.try_many(_of(mine, lambda path: _header(files[path])), tensors, 150)
    watch.try_many(_of(mine, lambda path: damaged(files[path])), tensors, 100)
    watch.try_many(_of(mine, lambda path: _other_tensors(files[path])), other_tensors, 200)
    watch.try_many(_of(large, lambda path: _header(files[path])), look, 25)


def _of(choices: Any, mutated: Any) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.sampled_from(list(choices)).flatmap(lambda chosen: st.tuples(st.just(chosen), mutated(chosen)))


def _teach(model: Path) -> None:
    """One task that is a head, and one that is trained."""
    chance = np.random.default_rng(0)
    for task in ("reds", "blues"):
        folder = model.parent / task
        for label in range(2):
            (folder / f"{task} {label}").mkdir(parents=True)
            for n in range(5):
                values = chance.integers(0, 100, (16, 16, 3)) + 100 * label
                Image.fromarray(values.astype(np.uint8)).save(folder / f"{task} {label}" / f"{n}.png")
        new = {"model": "test_byobnet", "weights": "none", "size": 32} if task == "reds" else {}
        settings = LearnSettings(epochs=10, lr=0.02, batch_size=4, device="cpu", keep=4, **new)
        with patch.object(METHODS["best"], "settle", settling(only_head=task == "reds")):
            learn(folder, task, model, settings, cache_dir=model.parent / "cache")


def _restore(model: Path, files: dict[Path, bytes]) -> None:
    for path in model.rglob("*"):
        if path.is_file() and path.relative_to(model) not in files:
            path.unlink()
    for path, data in files.items():
        if not (model / path).exists() or (model / path).read_bytes() != data:
            (model / path).write_bytes(data)


def _sealed(values: Any) -> str:
    """A manifest with the checksum that belongs to it, where there is one."""
    if not isinstance(values, dict) or holds_deep(values):
        return as_json(values)
    values = {name: value for name, value in values.items() if name != "checksum"}
    try:
        return as_json({**values, "checksum": checksum_of(values)})
    except ValueError:  # what is no text has no checksum
        return as_json(values)


def _exchange(model: Path, path: Path, data: bytes) -> None:
    """Another file in the place of one, under its own hash, wherever that is named."""
    name = hashlib.sha256(data).hexdigest()
    size = (model / path).stat().st_size
    (model / path).unlink()
    (model / path.parent / f"{name}.safetensors").write_bytes(data)
    text = (model / "bundle.json").read_text().replace(path.stem, name)
    values = _resized(json.loads(text), name, size, len(data))
    (model / "bundle.json").write_text(_sealed(values))


def _resized(values: Any, name: str, size: int, new: int) -> Any:
    """A manifest that says of a file how long it is now."""
    if isinstance(values, dict):
        if values.get("sha256") == name and values.get("bytes") == size:
            return {**values, "bytes": new}
        return {key: _resized(value, name, size, new) for key, value in values.items()}
    return values


@st.composite
def _header(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file whose header says something else of its tensors."""
    size = struct.unpack("<Q", data[:8])[0]
    values = draw(changed(json.loads(data[8 : 8 + size])))
    header = as_json(values, depth=200).encode()
    length = draw(st.sampled_from((len(header), len(header), len(header), size, 2**63, 0)))
    return struct.pack("<Q", length) + header + data[8 + size :]


# By name, what becomes of a tensor; None: it is left out.
_OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "left out": lambda tensor: None,
    "one more dimension": lambda tensor: tensor[None].contiguous(),
    "one number": lambda tensor: tensor.reshape(-1)[:1].clone(),
    "twice as long": lambda tensor: torch.cat([tensor.reshape(-1)] * 2),
    "empty": lambda tensor: torch.zeros(0),
    "no dimension": lambda tensor: torch.tensor(-1.0),
    "four dimensions": lambda tensor: torch.zeros(7, 3, 2, 1),
    "all 100": lambda tensor: torch.full_like(tensor, 100),
    "all 10**9": lambda tensor: torch.full_like(tensor.double(), 1e9).to(tensor.dtype),
    "all -1": lambda tensor: torch.full_like(tensor.float(), -1).to(tensor.dtype),
    "float64": lambda tensor: tensor.to(torch.float64),
    "bfloat16": lambda tensor: tensor.to(torch.bfloat16),
    "bool": lambda tensor: tensor.bool(),
    "int8": lambda tensor: tensor.to(torch.int8),
    "not a number": lambda tensor: torch.full_like(tensor.float(), float("nan")),
    "huge": lambda tensor: torch.full_like(tensor.float(), 1e38),
}


@st.composite
def _other_tensors(draw: st.DrawFn, data: bytes) -> tuple[str, str, str]:
    """Which tensor is to be another, what becomes of it, and under which name."""
    key = draw(st.sampled_from(sorted(load(data))))
    name = draw(st.sampled_from((key, key, key, key, "", "x", "../x", "head.bias")))
    return key, draw(st.sampled_from(sorted(_OTHERS))), name


def _with_other(data: bytes, other: tuple[str, str, str]) -> bytes:
    key, kind, name = other
    state = load(data)
    changed_tensor = _OTHERS[kind](state.pop(key))
    return save(state if changed_tensor is None else {**state, name: changed_tensor})
