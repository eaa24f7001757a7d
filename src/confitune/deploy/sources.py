"""Answers for image files: files, folders, patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from confitune.deploy.predictor import Prediction, Predictor
from confitune.tasks import DataError, DataMissingError, is_image_name

_BATCH = 32


def image_files(given: Sequence[str]) -> list[Path]:
    """Every file once, in the order given; folders with everything below them, patterns such as 'new/*.jpg' as well."""
    found: list[Path] = []
    for text in given:
        path = Path(text)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if is_image_name(p.name) and p.is_file())
            if not inside:
                raise DataMissingError(f"the folder {path} holds no images")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            matches = sorted(match for match in map(Path, glob.glob(text, recursive=True)) if match.is_file())
            if not matches:
                raise DataMissingError(f"there is no image {text}")
            found += matches
    return list(dict.fromkeys(found))


def predict_files(
    predictor: Predictor, files: Sequence[Path], task: str | None, top: int, among: Sequence[str] | None = None
) -> Iterator[tuple[Path, Prediction | DataError]]:
    """Each file with its answer, or with what is wrong with it; decoded by all cores, a batch at a time."""

    def decoded(file: Path) -> Tensor | DataError:
        try:
            return predictor.decode(file)
        except DataError as error:
            return error

    with ThreadPoolExecutor() as pool:
        for first in range(0, len(files), _BATCH):
            batch = files[first : first + _BATCH]
            pixels = list(pool.map(decoded, batch))
            good = [image for image in pixels if isinstance(image, Tensor)]
            answers = iter(predictor.predict(torch.stack(good), [task] * len(good), top, among) if good else ())
            for file, image in zip(batch, pixels, strict=True):
                yield file, next(answers) if isinstance(image, Tensor) else image
