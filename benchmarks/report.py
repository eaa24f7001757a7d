"""What every benchmark writes beside its numbers: all it takes to measure them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from confitune.engine.result import command_line, device_name, versions
from confitune.files import write_whole


def write_report(path: Path, device: torch.device, weights_sha256: str, numbers: dict[str, Any]) -> None:
    """Write `numbers` as JSON with their provenance."""
    report = {
        **numbers,
        "device": device_name(device),
        "versions": versions(),
        "weights_sha256": weights_sha256,
        "command": command_line(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(json.dumps(report, indent=1).encode()))
