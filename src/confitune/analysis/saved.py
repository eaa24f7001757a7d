"""Results of analyses as files."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from confitune.errors import ConfituneError
from confitune.files import write_whole


class SavedResult(BaseModel):
    """Base of what an analysis found: numbers for a picture, written as JSON."""

    model_config = ConfigDict(frozen=True)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_whole(path, lambda out: out.write(self.model_dump_json(indent=1).encode()))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote, or say what is wrong with the file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfituneError(f"{path} is not a saved {cls.__name__}: {error}") from error
