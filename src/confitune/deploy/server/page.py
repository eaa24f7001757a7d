"""The page for people: files of the package, each at its own fixed address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Even a class or file name that got past the page's care could not run, nor ask anything of another server.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """The people's side of an app. Paths are looked up, never opened: there is nothing to climb out of."""
    for path, (name, kind) in _FILES.items():
        content = files("confitune.deploy.server").joinpath("page", name).read_bytes()
        app.add_api_route(path, _endpoint(content, kind), include_in_schema=False)


def _endpoint(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def asset() -> Response:
        return Response(content, headers=_HEADERS | {"Content-Type": kind})

    return asset
