"""Files that are made to take memory: how much more each takes than was taken before it was opened.

    PYTHONPATH=src:tests python -m attack.hostile             # --quick: smaller ones, of each kind

Each is opened in a process of its own. It must be refused with a documented error or be used, and take less than a
gigabyte either way.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import pickle
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from confitune.deploy import Bundle, Predictor, changing
from confitune.deploy.bundle import TaskRecord
from confitune.engine.checkpoint import CHECKPOINT, Checkpoint
from confitune.errors import ConfituneError
from confitune.files import write_sealed
from confitune.nn import create_backbone
from confitune.tasks.decode import open_rgb
from deploy.shared import NETWORK
from fuzz.watch import MEMORY, peak_of_process

LARGE = ("torchvision:regnet_y_128gf", "torchvision:vit_h_14", "vit_giant_patch14_dinov2", "regnety_2560")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the pixels and of the packed bytes, a quarter of the memory"
    )
    quick = parser.parse_args().quick
    most, failed, memory = 0, [], MEMORY // 4 if quick else MEMORY
    with tempfile.TemporaryDirectory() as scratch:
        for name, (file, use) in cases(Path(scratch), 10 if quick else 1).items():
            grown, end = measured(use)
            most = max(most, grown)
            print(f"{name}: {file:,} bytes, memory grew by {grown / 2**20:,.0f} MB, {end}", flush=True)
            if grown >= memory or end.startswith("FAILED"):
                failed.append(name)
    print(f"hostile files took {most / 2**20:,.0f} MB at most")
    if failed:
        sys.exit(f"these did not stand the test: {', '.join(failed)}")


def measured(use: Callable[[], object]) -> tuple[int, str]:
    """By how much the memory of a process grew, and how that ended."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_use, args=(use, send))
    process.start()
    send.close()
    try:
        grown, end = receive.recv()
    except EOFError:
        grown, end = 0, "FAILED: the process died"
    process.join()
    return grown, end


def _use(use: Callable[[], object], send: multiprocessing.connection.Connection) -> None:  # type: ignore[name-defined]
    torch.set_num_threads(1)
    before = peak_of_process()
    try:
        use()
        end = "used"
    except ConfituneError as error:
        end = f"refused: {str(error)[:150]}"
    except BaseException as error:
        end = f"FAILED: {type(error).__name__}: {str(error)[:150]}"
    send.send((peak_of_process() - before, end))


def cases(root: Path, smaller: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """By name: the size of the file, and how it is used."""
    bytes_inside, side = 6_000_000_000 // smaller, round(8_900 / smaller**0.5)
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    for model in LARGE:
        path = _bundle(root / model.replace(":", "-"), model)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found[f"a bundle that says it is {model}"] = size, lambda path=path: Predictor.from_bundle(path, device="cpu")
    for name, data in {"packed": _packed(bytes_inside), "that declares a huge storage": _declared()}.items():
        path = root / f"{name}.pth"
        path.write_bytes(data)
        found[f"weights {name}"] = len(data), lambda path=path: create_backbone("resnet18", path)
    folder = root / "run"
    folder.mkdir()
    write_sealed(folder / CHECKPOINT, _packed(bytes_inside, "archive/DATA.PKL"))
    size = (folder / CHECKPOINT).stat().st_size
    found["a checkpoint that is a packed pickle"] = size, lambda: Checkpoint.load(folder, {})
    for name, data in _images(side).items():
        found[f"an image {name}"] = len(data), lambda data=data: open_rgb(io.BytesIO(data))
    return found


def _bundle(path: Path, model: str) -> Path:
    bundle = Bundle(path, NETWORK.model_copy(update={"model": model}))
    with changing(bundle) as change:
        stored = change.store_task({"head.weight": torch.zeros(2, 8)}, ["a", "b"])
        shared = {"x": torch.zeros(1_000_000)}  # more than the one convolution that transformers have
        change.add_task("a", TaskRecord(classes=("a", "b"), file=stored), shared)
    return path


def _packed(size: int, name: str = "archive/data/0") -> bytes:
    """A file of torch's kind, six megabytes that are six gigabytes of zeros."""
    out = io.BytesIO()
    plain = io.BytesIO()
    torch.save({"a": torch.zeros(10)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            if not member.filename.endswith("data/0"):
                target.writestr(member.filename, source.read(member))
        with target.open(name, "w", force_zip64=True) as file:
            for _ in range(size // 100_000_000):
                file.write(bytes(100_000_000))
    return out.getvalue()


class _Storage:
    """Pickled as torch's older files name a storage: of a type, with so many numbers."""

    def __init__(self, count: int) -> None:
        self.count = count


def _declared(count: int = 2_000_000_000) -> bytes:
    """An older file of torch's that says its one tensor has eight gigabytes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            if isinstance(value, _Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", value.count, None)
            return None

    class Tensor:
        def __reduce__(self) -> object:
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (_Storage(count), 0, (count,), (1,), False, {})

    out = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(value, out, 2)
    Pickler(out, 2).dump({"a": Tensor()})
    pickle.dump(["0"], out, 2)
    out.write(struct.pack("<q", count) + bytes(1000))
    return out.getvalue()


def _images(side: int) -> dict[str, bytes]:
    found = {
        "of one column": _png(1, 50_000_000, bits=1, colour=0),
        "of many pixels with transparency of 16 bits": _png(side, side, bits=16, colour=6),
        "of a hundred to one": _png(9 * side, side // 11, bits=8, colour=6),
    }
    out = io.BytesIO()
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(out, "JPEG", progressive=True)
    found["in a progressive JPEG"] = out.getvalue()
    out = io.BytesIO()
    Image.new("P", (side, side)).save(out, "GIF")
    found["in a GIF"] = out.getvalue()
    return found


def _png(width: int, height: int, bits: int, colour: int) -> bytes:
    """A black image, its rows packed one at a time."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(), bytes(1 + (width * bits * (4 if colour == 6 else 1) + 7) // 8)
    rows = [packer.compress(row * min(1000, height - first)) for first in range(0, height, 1000)]
    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", b"".join([*rows, packer.flush()])) + chunk(b"IEND", b"")


if __name__ == "__main__":
    main()
