"""What callers hear of work on data: how far it is, and what went wrong, with the place and the remedy."""

from collections.abc import Callable, Iterable

from confitune.errors import ConfituneError

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total), e.g. progress("decoding flowers102", 256, 8189)."""


class DataError(ConfituneError):
    """The data, or what was asked of it, cannot be used; the message says where and what to change."""


class DataMissingError(DataError):
    """A dataset is not where it was looked for and could not be downloaded."""


class UnreadableImageError(DataError):
    """Image files could not be decoded; the message names them.

    Attributes:
        files: their names, where they are files of a dataset.
    """

    def __init__(self, message: str, files: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.files = frozenset(files)


class StoreError(DataError):
    """The store of decoded images could not be written; the message names the folder and the space needed."""
