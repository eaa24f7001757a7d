"""What the program writes about its work and reads again: image stores, results, logs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from confitune.engine import CsvLog, RunResult
from confitune.engine.result import summary_of
from confitune.experiments.reporting.report import write_pages, write_report
from confitune.experiments.reporting.table import summary_tables
from confitune.files import checksum_of
from confitune.tasks.decode import Pipeline
from confitune.tasks.store import ImageFile, open_store
from fuzz.mutations import as_json, changed, damaged, holds_deep
from fuzz.watch import Watch


def fuzz(watch: Watch) -> None:
    _stores(watch)
    _results(watch)
    _logs(watch)


def _stores(watch: Watch) -> None:
    photos, cache = watch.at_hand / "photos", watch.at_hand / "cache"
    photos.mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8), (number, 2, 3)).save(photos / f"{number}.png")
    files = [ImageFile("0.png"), ImageFile("1.png")]

    def opened() -> list[int]:
        return [int(image[0, 0, 0]) for image in open_store("test", photos, files, Pipeline(), cache)]

    assert opened() == [0, 1]
    (store,) = cache.glob("*.u8")
    whole = store.read_bytes()

    def use(data: bytes) -> None:
        store.write_bytes(data)
        assert opened() == [0, 1]  # whatever was there: it is built again
        store.write_bytes(whole)

    watch.try_many(damaged(whole), use, 280)


def _results(watch: Watch) -> None:
    out = watch.at_hand / "runs"
    out.mkdir()
    path = out / "runs.jsonl"
    task = {
        "name": "t",
        "classes": ["a", "b"],
        "train_images": 8,
        "test_images": 2,
        "norm_numbers": 5,
        "head_numbers": 6,
    }
    result = RunResult(
        dataset="digits",
        method="confit",
        seed=0,
        **summary_of(np.array([[90.0, 80.0], [np.nan, 95.0]])),
        tasks=[task, task],
        config={
            "model": "net",
            "seed": 0,
            "means": "window",
            "statistics": "pass",
            "options": {"ewc": {"strength": 3.0}},
        },
        versions={"torch": "2"},
        device="cpu",
        weights="own.pth",
        weights_sha256="ab" * 32,
        final_sha256="cd" * 32,
        seconds=1.5,
        images_per_second=100.0,
        command="confitune run",
    )
    whole, values = result.line(), result.model_dump(mode="json")

    def use(data: bytes) -> None:
        path.write_bytes(data)
        summary_tables([RunResult.of_line(data, "here")])
        write_pages(out)
        write_report(out, out / "report.html", None)

    def say(values: Any) -> None:
        """With a checksum that is right."""
        checksum = {}
        if not holds_deep(values):
            with suppress(ValueError):  # what is no text has no checksum
                checksum = {"checksum": checksum_of(values)}
        use(as_json({**values, **checksum}).encode())

    use(whole)
    watch.try_many(damaged(whole), use, 120)
    watch.try_many(changed(values), say, 250)


def _logs(watch: Watch) -> None:
    folder = watch.at_hand / "logs"
    folder.mkdir()
    path = folder / "epochs.csv"
    head = "task,task_name,stage,epoch,loss,accuracy,lr,seconds,images\r\n"
    whole = (head + "".join(f'0,"a, b",head,{n},1.5,50.0,0.01,1.0,8\r\n' for n in range(4))).encode()

    def use(data: bytes) -> None:
        path.write_bytes(data)
        log = CsvLog(folder)
        log.run_started("confit", ["a", "b"], 4, 0)
        log.task_started(0, "a", 3)
        assert len(path.read_text().splitlines()[0].split(",")) == 9

    watch.try_many(damaged(whole), use, 80, found=[b'"' + b"x" * 200_000, b"\0\0\0", whole + b"0,a,he"])
