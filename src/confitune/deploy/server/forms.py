"""The images of a request: a form, or one image as the body. What is over a limit is refused while it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from confitune.deploy.server.limits import Limits, Refusal, megabytes

_LONGEST_NAME = 200
_LONGEST_FIELD = 1000
_HOW = "send images as files of a form (multipart/form-data, field 'images'), or one as the body (image/...)"


@dataclass
class Sent:
    """What a request's body holds: (name, file) for each image, and the form's other fields."""

    images: list[tuple[str, bytes]] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    top: list[str] = field(default_factory=list)


async def read_sent(request: Request, limits: Limits) -> Sent:
    """Read the body to its end, or refuse it."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind == b"multipart/form-data":
        return await _read_form(request, options.get(b"boundary", b""), limits)
    if kind.startswith(b"image/"):
        reader = _Image("image", limits)
        async for chunk in request.stream():
            reader.add(chunk)
        return Sent(images=[reader.finished()])
    raise Refusal(415, "unsupported-type", f"cannot read {kind.decode('latin-1')[:100] or 'an unnamed type'}: {_HOW}")


async def _read_form(request: Request, boundary: bytes, limits: Limits) -> Sent:
    form = _Form(limits)
    try:
        if not boundary:
            raise FormParserError("its boundary is not named")
        callbacks: Any = {name: getattr(form, name) for name in vars(_Form) if name.startswith("on_")}
        parser = MultipartParser(boundary, callbacks)
        async for chunk in request.stream():
            parser.write(chunk)
    except FormParserError as error:
        raise Refusal(400, "bad-form", f"the form cannot be read: {error}") from None
    if not form.ended:
        raise Refusal(400, "bad-form", "the form cannot be read: it ends too early")
    return form.sent


class _Image:
    """A file that is arriving."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limit = limits.image_bytes
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        if len(self._data) + len(data) > self._limit:
            raise Refusal(
                413,
                "image-too-large",
                f"the image {self._name} has more than {megabytes(self._limit)}: send a smaller one",
                image=self._name,
            )
        self._data += data

    def finished(self) -> tuple[str, bytes]:
        if not self._data:
            raise Refusal(422, "unreadable-image", f"the image {self._name} is empty", image=self._name)
        return self._name, bytes(self._data)


class _Form:
    """Takes a form apart while it arrives; the parser calls the methods by their names."""

    def __init__(self, limits: Limits) -> None:
        self.sent = Sent()
        self.ended = False
        self._limits = limits
        self._headers: dict[str, bytes] = {}
        self._name, self._value = bytearray(), bytearray()
        self._image: _Image | None = None
        self._field: list[str] = []
        self._text = bytearray()

    def on_part_begin(self) -> None:
        self._headers.clear()
        self._text.clear()
        self._image = None

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        name = _text(options.get(b"name", b""))
        if name == "images":
            if len(self.sent.images) == self._limits.images:
                raise Refusal(413, "too-many-images", f"a request may have {self._limits.images} images: send fewer")
            self._image = _Image(_text(options.get(b"filename", b"")) or "image", self._limits)
            return
        fields = {"task": (self.sent.tasks, self._limits.images), "top": (self.sent.top, 1)}
        if name not in fields:
            raise Refusal(422, "bad-field", f"there is no field {name!r}: a form has 'images', 'task' and 'top'")
        self._field, most = fields[name]
        if len(self._field) == most:
            raise Refusal(422, "bad-field", f"there are more than {most} fields {name!r}")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._image:
            self._image.add(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > _LONGEST_FIELD:
            raise Refusal(422, "bad-field", f"a field has more than {_LONGEST_FIELD} bytes")

    def on_part_end(self) -> None:
        if self._image:
            self.sent.images.append(self._image.finished())
            self._image = None
        else:
            self._field.append(self._text.decode("utf-8", "replace"))

    def on_end(self) -> None:
        self.ended = True


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")[:_LONGEST_NAME]
