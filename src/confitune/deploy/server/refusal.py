"""Requests that are answered with an error."""

from __future__ import annotations

from collections.abc import Iterable

from confitune.errors import ConfituneError

_TASKS_SHOWN = 20


class Refusal(ConfituneError):
    """Ends a request with an HTTP status, a word for programs and a sentence for people.

    Args:
        status: of the answer.
        error: what was wrong in one word that stays the same.
        detail: what was wrong and what to do.
        image: the image it is about.
        tasks: those that there are.
        retry_after: seconds after which it may go better.
    """

    def __init__(
        self,
        status: int,
        error: str,
        detail: str,
        *,
        image: str | None = None,
        tasks: tuple[str, ...] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.error = error
        self.detail = detail
        self.image = image
        self.tasks = tasks
        self.retry_after = retry_after


def unknown_task(name: str, known: Iterable[str]) -> Refusal:
    """The refusal of a task that the model has not learned, with those that it has.

    >>> unknown_task("cats", ["birds", "pets"]).detail
    "there is no task 'cats'; there are: birds, pets"
    """
    names = tuple(known)
    shown = names[:_TASKS_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return Refusal(
        404, "unknown-task", f"there is no task {name[:100]!r}; there are: {', '.join(shown)}{more}", tasks=shown
    )
