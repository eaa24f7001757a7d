"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO
from uuid import uuid4


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is either whole or as it was before: to a temporary file beside it, synced, then renamed."""
    partial = path.with_name(f"{path.stem}.{uuid4().hex}.partial")
    try:
        with partial.open("xb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Without it a power cut could undo the rename; Windows neither needs nor allows it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
