"""What can happen to a file, by accident or on purpose: to its bytes, and to what a JSON or YAML file says."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

from hypothesis import strategies as st

DEEP = "@deep@"  # stands for lists in lists, deeper than any reader goes
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**12, 10**30),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    *("", " ", "x", "x" * 20_000, "../../canary", "/../canary", "folder:../..", "a\0b", "a\nb", "\ud800", "‮txt.exe"),
    *("nan", "1e999", "-1", "0x7fffffff", "%s%n", "${HOME}", "<script>", "C:\\evil"),
    *([], {}, [[]], [None] * 1000, {"": {}}, {"a": {"b": {"c": [1, "2", 3.0]}}}, DEEP),
]
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_NUMBERS = (b"-1", b"0", b"4294967295", b"99999999999999999999", b"1e999", b"NaN", b"9" * 5000, b"null", b"[1]")


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes to which one to three things have happened."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((1, 2, 4, 16, 100, 1000))))
        piece = data[start:end]
        other = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("flip", "cut", "drop", "twice", "move", "zeros", "ones", "noise", "number")))
        if kind == "flip" and piece:
            data = data[:start] + bytes([piece[0] ^ (1 << draw(st.integers(0, 7)))]) + data[start + 1 :]
        elif kind == "cut":
            data = data[:start]
        elif kind == "drop":
            data = data[:start] + data[end:]
        elif kind == "twice":
            data = data[:end] + piece * draw(st.sampled_from((1, 2, 50))) + data[end:]
        elif kind == "move":
            data = data[:other] + piece + data[other:]
        elif kind in ("zeros", "ones"):
            data = data[:start] + (b"\0" if kind == "zeros" else b"\xff") * len(piece) + data[end:]
        elif kind == "noise":
            data = data[:start] + draw(st.binary(min_size=1, max_size=16)) + data[end:]
        elif kind == "number" and (places := [m.span() for m in _NUMBER.finditer(data[:100_000])]):
            first, last = draw(st.sampled_from(places))
            data = data[:first] + draw(st.sampled_from(_NUMBERS)) + data[last:]
    return data


@st.composite
def changed(draw: st.DrawFn, values: Any, keep: tuple[str, ...] = ()) -> Any:
    """Values of which one to three were replaced, removed, doubled, renamed or put deeper.

    Args:
        keep: names of entries that stay as they are.
    """
    values = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in _places(values) if place[-1] not in keep]
        if not places:
            break
        place = draw(st.sampled_from(places))
        parent, key = values, place[-1]
        for step in place[:-1]:
            parent = parent[step]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "double", "rename", "deeper", "swap")))
        if kind == "replace":
            parent[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
        elif kind == "remove":
            del parent[key]
        elif kind == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(("", "x", "../x", "__class__", "checksum", "a\0b")))] = parent.pop(key)
        elif kind == "deeper":
            parent[key] = draw(st.sampled_from(([parent[key]], {"x": parent[key]}, str(parent[key])[:1000])))
        elif kind == "swap":
            other = draw(st.sampled_from(places))
            found = values
            for step in other:
                found = found[step] if isinstance(found, dict | list) and _has(found, step) else None
            parent[key] = copy.deepcopy(found)
    return values


def as_json(values: Any, depth: int = 30_000) -> str:
    """JSON that may hold what JSON should not: NaN, lone surrogates, lists in lists without end."""
    return json.dumps(values).replace(json.dumps(DEEP), "[" * depth + "]" * depth)


def holds_deep(values: Any) -> bool:
    return json.dumps(DEEP) in json.dumps(values)


def _has(found: dict[Any, Any] | list[Any], step: Any) -> bool:
    return step in found if isinstance(found, dict) else isinstance(step, int) and step < len(found)


def _places(values: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    found = []
    for step, value in inside:
        found += [(*at, step), *_places(value, (*at, step))]
    return found
