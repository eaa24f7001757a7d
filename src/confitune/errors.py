"""Errors that a user can act on: what was wrong, where, and what to do."""


class ConfituneError(Exception):
    """Base of every error that confitune raises on purpose; the command line prints it without a traceback."""
