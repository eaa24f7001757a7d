"""Find a dataset's folder, fetching it first if that is wanted and possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from confitune.tasks.catalog import DATASETS
from confitune.tasks.errors import DataMissingError
from confitune.tasks.lock import exclusive


def locate(
    name: str,
    data_dir: Path,
    folder: str,
    contents: Sequence[str],
    fetch: Callable[[Path], object] | None,
) -> Path:
    """The folder that holds the dataset `name`: `data_dir/folder`, or `data_dir` itself if that is it.

    Args:
        name: of the dataset, for messages.
        data_dir: as the user gave it.
        folder: the dataset's usual folder in it.
        contents: files or folders that must be there; one that is missing means an interrupted download.
        fetch: called with the folder that should come to hold `folder`; None to leave the network alone.
    """

    def found() -> Path | None:
        places = (data_dir / folder, data_dir)
        return next((place for place in places if all((place / part).exists() for part in contents)), None)

    place = found()
    if place is not None:
        return place
    failure: Exception | None = None
    if fetch is not None:
        root = data_dir.parent if data_dir.name == folder else data_dir
        try:
            # Several processes may want it: one fetches, the others find it there.
            with exclusive(root / f".{name}.lock", lambda: None):
                if found() is None:
                    fetch(root)
        except Exception as error:  # no network, no space, no permission, a wrong checksum, ...
            failure = error
        place = found()
        if place is not None and failure is None:
            return place
    tried = f"; fetching it failed: {failure}" if failure else ""
    raise DataMissingError(
        f"{name} is not there: looked for {', '.join(contents)} in {data_dir / folder} and in {data_dir}{tried}. "
        f"To get it: {DATASETS[name].source}. "
        "To look elsewhere: set data_dir or the environment variable CONFITUNE_DATA"
    ) from failure
