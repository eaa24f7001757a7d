"""Recipes as `confitune run`, `tune` and `reproduce` take them: YAML by whoever wrote it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st
from PIL import Image

from confitune.experiments.paper.plan import read_scope
from confitune.experiments.paper.reproduce import parts_of
from confitune.experiments.runs.recipe import make_recipe, merge_settings, read_recipe
from confitune.tasks import dataset_parts
from fuzz.mutations import DEEP, changed, damaged
from fuzz.watch import Watch

_WHATS = ("table1", "table2", "curves", "shift", "transductive", "controls", "deeper")


def fuzz(watch: Watch) -> None:
    photos = _draw_photos(watch.at_hand / "photos")
    run = {
        "dataset": f"folder:{photos}",
        "methods": ["finetune", "confit", "mas+cpr"],
        "model": "test_byobnet",
        "weights": "none",
        "data_dir": str(watch.at_hand / "data"),
        "cache_dir": str(watch.at_hand / "cache"),
        "order_seed": 3,
        "tasks": 1,
        "classes_per_task": 2,
        "held_out": 0.3,
        "seeds": 2,
        "epochs": 4,
        "batch_size": 8,
        "lr": 0.05,
        "optimizer": "sgd",
        "momentum": 0.5,
        "clip_norm": 1.0,
        "lr_schedule": "cosine",
        "device": "cpu",
        "options": {"mas": {"strength": 3.0}, "cpr": {"beta": 0.1}},
    }
    scope = {"what": ["table2", "controls"], "datasets": ["photos", "digits"], "methods": ["confit"], "seeds": 2}
    path = watch.at_hand / "recipe.yaml"

    def ask_to_run(data: bytes) -> None:
        path.write_bytes(data)
        _prepare(read_recipe(path), photos)

    def ask_to_reproduce(data: bytes) -> None:
        path.write_bytes(data)
        asked, whats = read_scope([str(path)], watch.at_hand / "out")
        for what in whats:
            if what in _WHATS:
                parts_of(what, asked)

    for values, ask in ((run, ask_to_run), (scope, ask_to_reproduce)):
        ask(_text(values))  # what is not changed is taken
        watch.try_many(damaged(_text(values)), ask, 150, found=_HARMFUL)
        watch.try_many(changed(values).map(_text), ask, 200)
    watch.try_many(
        st.tuples(changed(run["options"]), st.text(max_size=20)),
        lambda given: merge_settings({"options": given[0]}, [f"ewc.strength={given[1]}"]),
        50,
    )


def _prepare(values: dict[str, Any], photos: Path) -> None:
    """As far as `confitune run` goes before it trains."""
    recipe = make_recipe(values)
    for method in recipe.methods:
        recipe.train_settings(0, method).torch_device()
        recipe.identity(method, recipe.seeds - 1, "0" * 64)
    asked = {part.dataset for part in dataset_parts(recipe.dataset)} - {f"folder:{photos}", "digits"}
    nowhere = all(name.startswith("folder:") and not os.path.isdir(name.removeprefix("folder:")) for name in asked)
    # A recipe may say where images are cached, anywhere.
    mine = Path(os.path.abspath(recipe.cache_dir or photos)).is_relative_to(photos.parent)
    if mine and nowhere:  # others would be downloaded
        recipe.load_tasks((0.5,) * 3, (0.2,) * 3)


def _draw_photos(folder: Path) -> Path:
    for label in range(4):
        (folder / f"class {label}").mkdir(parents=True)
        for number in range(5):
            pixels = np.full((12, 12, 3), 60 * label + number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class {label}" / f"{number}.png")
    return folder


def _text(values: Any) -> bytes:
    deep = "[" * 5000 + "]" * 5000
    return yaml.safe_dump(values, sort_keys=False).replace(f"'{DEEP}'", deep).encode("utf-8", "surrogatepass")


def _laughs(levels: int) -> bytes:
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"methods: *a{levels - 1}"]).encode()


def _merges(levels: int) -> bytes:
    lines = ["a0: &a0 {x0: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], x{n}: 1}}" for n in range(1, levels)]
    return "\n".join(lines).encode()


_HARMFUL = [
    _laughs(12),
    _merges(9),
    b"a: &a [*a]",
    b"dataset: &a digits\nmodel: *a",
    b"{" * 20_000,
    b"- " * 20_000,
    b"? " * 20_000,
    b"a: " + b"9" * 20_000,
    b"a: " + b"x" * 70_000,
    b"a: !!int 0b" + b"1" * 60_000,
    b"a: 2024-13-45",
    b"a: 1:" + b"59:" * 10_000 + b"1",
    b"a: !!python/object/apply:os.system ['touch canary']",
    b"a: !!binary '....'",
    b"a: !!timestamp x",
    b"? [1, 2]\n: 3",
    b"1: 2",
    b"dataset: digits\nseeds: 1000000000000",
    b"dataset: digits\nbatch_size: 1000000000000\ntasks: 1000000000000",
    b"dataset: digits\nclasses_per_task: 1000000000000000000000",
    b"dataset: digits\norder_seed: 99999999999999999999999",
    b"dataset: digits\nepochs: 1000000000000\nmethods: confit",
    b"dataset: digits\nlr: .inf",
    b"dataset: digits\noptions: 5",
    b"dataset: digits\noptions: {ewc: 5}\nmethods: [ewc]",
    b"dataset: digits\ndevice: cuda:99999999999999999999",
    b"dataset: digits\ndevice: meta",
    b'dataset: "folder:\\0"',
    b'dataset: "digits:1+folder:~\\0:1"',
    b'dataset: "digits:1+folder:~\\ud800:1"',
    b"dataset: digits:1-999999999",
    b"dataset: digits:" + b"9" * 1900,
    b"dataset: " + b"+".join(b"digits:%d" % n for n in range(1, 190)),
    b"dataset: " + b"+" * 1900,
    b"dataset: digits:1+folder:" + b"a" * 1900 + b":1",
    b'dataset: digits\ncache_dir: "\\ud800"',
    b"dataset: folder:" + b"a" * 5000,
    b"what: 5",
    b"what: [table1, 5]",
    b"what: table1\ndatasets: {a: b}",
    b"what: table1\npipeline: [1]\ndatasets: digits",
    b"what: table1\nseeds: 0\ndatasets: digits",
    b"\xff\xfe",
    b"\xef\xbb\xbfdataset: digits",
    b"",
    b"a: \x00",
]
