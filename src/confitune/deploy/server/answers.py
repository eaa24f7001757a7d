"""Errors as answers, all of one shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from confitune.deploy.server.metrics import Metrics
from confitune.deploy.server.refusal import Refusal
from confitune.deploy.server.schemas import ErrorAnswer

_BY_A_LIMIT = frozenset({408, 413, 429, 503, 504})
_WORDS = {
    400: "the form cannot be read",
    404: "there is no such task; some of those that there are come with it",
    408: "the body came too slowly",
    413: "the body, an image or the number of images is over a limit",
    415: "the body is neither a form nor an image",
    422: "an image cannot be read, or a field has no such value",
    429: "too many images are waiting, or too many bytes are under way; Retry-After says for how long",
    500: "the network failed on the batch that the request was in",
    503: "the server is being stopped",
    504: "the answer took too long",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers for an operation's description."""
    return {status: {"model": ErrorAnswer, "description": _WORDS[status]} for status in statuses}


def refusal_response(refusal: Refusal) -> Response:
    """A refusal as an answer."""
    answer = ErrorAnswer(
        error=refusal.error,
        detail=refusal.detail,
        image=refusal.image,
        tasks=None if refusal.tasks is None else list(refusal.tasks),
    )
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    content = answer.model_dump_json(exclude_none=True)
    return Response(content, refusal.status, headers, media_type="application/json")


def handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer refusals, unknown paths and bad parameters in one shape, and count what limits refused."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        if error.status in _BY_A_LIMIT:
            metrics.rejected(error.error)
        return refusal_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        word = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        response = refusal_response(Refusal(error.status_code, word, str(error.detail)))
        response.headers.update(error.headers or {})
        return response

    async def bad_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return refusal_response(Refusal(422, "bad-field", f"{first['loc'][-1]}: {first['msg']}"))

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, bad_parameter)
