"""Errors that a user can act on: what was wrong, where, and what to do."""

from collections.abc import Iterable


class ConfituneError(Exception):
    """Base of every error that confitune raises on purpose; the command line prints it without a traceback."""


class DataError(ConfituneError):
    """The data, or what was asked of it, cannot be used."""


class DataMissingError(DataError):
    """A dataset is not where it was looked for and could not be downloaded."""


class UnreadableImageError(DataError):
    """Image files could not be decoded; `files` are their names, where they belong to a dataset."""

    def __init__(self, message: str, files: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.files = frozenset(files)
