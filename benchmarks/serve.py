"""The server at its limit: more images asked for than its queue takes, every answer checked, bad clients in between.

    python benchmarks/serve.py --bundle model                       # a minute
    python benchmarks/serve.py --bundle model --seconds 10 --device cpu
    python benchmarks/serve.py --bundle model --beside photos       # a task comes and goes meanwhile, again and again

The server runs in a process of its own and is asked over loopback, first one image at a time, which is the speed that
answers in batches are compared with. Every version of the bundle is kept; in the end each answer is compared with that
of a predictor of the version which it names.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import skimage.data
from PIL import Image
from report import write_report

from confitune.deploy import Bundle, Prediction, Predictor
from confitune.deploy.server import Limits, serve
from confitune.engine import TrainSettings

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "retina")
TASKS = 6  # of the bundle, besides guessing
BOUNDARY = b"benchmark"
Bad = dict[str, Callable[[], tuple[bytes, str]]]  # what it is, and the body and type
FORM = "multipart/form-data; boundary=" + BOUNDARY.decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="a folder that `confitune learn` made")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--images", type=int, default=8, help="at most in a request")
    parser.add_argument("--queue", type=int, default=128, help="images that may wait")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of a probability: batches round differently")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--beside", type=Path, help="photos of a task that is learned, grown and removed meanwhile; bundles of `best`"
    )
    parser.add_argument("--out", type=Path, default=Path("serve.json"))
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)  # be the server
    options = parser.parse_args()
    if options.answer:
        limits = Limits(queue_images=options.queue, images=min(64, options.queue), max_batch=options.max_batch)
        predictor = Predictor.from_bundle(options.bundle, device=options.device)
        serve(predictor, port=0, limits=limits, announce=lambda line: print(line, flush=True))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--answer"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split(" at ")[1].split()[0]
            numbers = asyncio.run(Load(address, server.pid, options, Path(scratch)).run())
        finally:
            server.send_signal(signal.SIGINT)
    numbers["server_exit"] = server.returncode
    device = TrainSettings(device=options.device).torch_device()
    write_report(options.out, device, Bundle.open(options.bundle).network.weights_sha256, numbers)
    print(f"written to {options.out}")
    if numbers["wrong"] or numbers["unexpected"] or numbers["server_exit"]:
        sys.exit("the server did not stand the test")


@dataclass
class Load:
    """What is asked of a server, and what it answered."""

    address: str
    pid: int
    options: argparse.Namespace
    scratch: Path  # for copies of the bundle, by version
    took: list[float] = field(default_factory=list)
    answers: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)  # photo, task and what was said
    in_time: int = 0  # of them, before the time was over
    changes: int = 0  # of the bundle
    statuses: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)

    async def run(self) -> dict[str, Any]:
        """Ask for a while; the numbers."""
        self.files = photographs()
        tasks = ["", *list(Bundle.open(self.options.bundle).tasks)[:TASKS]]
        client = Client(self.address)
        self.pairs = [(n, task) for task in tasks for n in range(len(self.files))]
        self.keep_version()
        await client.post(form([(self.files[0], "")]))  # the first answer takes what is only done once
        began = time.perf_counter()
        for n, task in self.pairs:
            await client.post(form([(self.files[n], task)]))
        alone = len(self.pairs) / (time.perf_counter() - began)
        bad = hostile(self.files[0])
        await self.annoy(client, bad, busy=False)
        end = time.perf_counter() + self.options.seconds
        self.memory.append(resident(self.pid))
        watch = asyncio.create_task(self.watch_memory())
        clients = (self.ask(seed, end) for seed in range(self.options.clients))
        await asyncio.gather(*clients, self.keep_annoying(bad, end), self.keep_changing(end))
        watch.cancel()
        ordered = sorted(self.took)
        numbers = {
            "tasks": len(tasks) - 1,
            "clients": self.options.clients,
            "images_a_request": self.options.images,
            "queue": self.options.queue,
            "max_batch": self.options.max_batch,
            "seconds": self.options.seconds,
            "images": len(self.answers),
            "images_per_second": self.in_time / self.options.seconds,
            "one_at_a_time_images_per_second": alone,
            "p50_ms": 1000 * statistics.median(ordered),
            "p99_ms": 1000 * ordered[int(0.99 * len(ordered))],
            "statuses": dict(sorted(self.statuses.items())),
            "rejected": self.statuses["429"],
            "wrong": self.wrong(),
            "changes_meanwhile": self.changes,
            "versions_that_answered": len({found["version"] for _, _, found in self.answers}),
            "unexpected": dict(self.unexpected),
            "memory_start_mb": self.memory[0] / 1e6,
            "memory_half_mb": max(self.memory[: len(self.memory) // 2 + 1]) / 1e6,  # the most in the first half
            "memory_most_mb": max(self.memory) / 1e6,
        }
        self.show(numbers)
        return numbers

    def show(self, numbers: dict[str, Any]) -> None:
        print(
            f"{numbers['images_per_second']:,.1f} images/s, "
            f"{numbers['images_per_second'] / numbers['one_at_a_time_images_per_second']:.2f} times one at a time; "
            f"p50 {numbers['p50_ms']:,.0f} ms, p99 {numbers['p99_ms']:,.0f} ms\n"
            f"{numbers['images']} images checked, {numbers['wrong']} wrong; {numbers['rejected']} requests rejected "
            f"(429); {numbers['changes_meanwhile']} changes meanwhile, {numbers['versions_that_answered']} versions; "
            f"answers {numbers['statuses']}, not expected {numbers['unexpected'] or 'none'}\n"
            f"memory of the server {numbers['memory_start_mb']:,.0f} MB at the start, "
            f"at most {numbers['memory_half_mb']:,.0f} MB in the first half, {numbers['memory_most_mb']:,.0f} MB in all"
        )

    async def ask(self, seed: int, end: float) -> None:
        """A client that wants the next answer as soon as it has one; images of all tasks together."""
        chance, client = random.Random(seed), Client(self.address)
        while time.perf_counter() < end:
            chosen = chance.sample(self.pairs, chance.randint(1, self.options.images))
            began = time.perf_counter()
            status, _, answer = await client.post(form([(self.files[n], task) for n, task in chosen]))
            self.statuses[str(status)] += 1
            if status == 200:
                now = time.perf_counter()
                self.took.append(now - began)
                self.in_time += len(chosen) if now <= end else 0
                self.answers += [(*pair, f) for pair, f in zip(chosen, answer["predictions"], strict=True)]
            elif status == 429:
                await asyncio.sleep(chance.uniform(0.2, 0.6))  # sooner than told: the queue stays full
            else:
                self.unexpected[f"{status} {answer}"] += 1

    def keep_version(self) -> None:
        """Copy the bundle as it is now."""
        shutil.copytree(
            self.options.bundle, self.scratch / Bundle.open(self.options.bundle).manifest.version, dirs_exist_ok=True
        )

    def wrong(self) -> int:
        """Answers that are not those of the version which they name, where classes are not as good as equal."""
        predictor = cache(lambda version: Predictor.from_bundle(self.scratch / version, device=self.options.device))
        pixels = cache(lambda n: predictor(self.answers[0][2]["version"]).decode(self.files[n])[None])
        expected = cache(lambda version, n, task: predictor(version).predict(pixels(n), [task or None])[0])
        return sum(not self.matches(found, expected(found["version"], n, task)) for n, task, found in self.answers)

    def matches(self, found: dict[str, Any], expected: Prediction) -> bool:
        """Whether the same task and the same classes were found, where they are not as good as equal."""
        before = dict(expected.classes)
        last = min(before.values(), default=0.0)
        return (
            found["task"] == expected.task
            and len(found["classes"]) == len(before)
            and all(
                abs(entry["probability"] - before.get(entry["name"], last)) <= self.options.tolerance
                for entry in found["classes"]
            )
        )

    async def keep_annoying(self, bad: Bad, end: float) -> None:
        client = Client(self.address)
        while time.perf_counter() < end:
            await self.annoy(client, bad, busy=True)
            await asyncio.sleep(2)  # not to flood: 50 MB a round

    async def keep_changing(self, end: float) -> None:
        """Learn a task, let it grow, take a class from it and remove it, as commands of other processes."""
        bundle, photos = str(self.options.bundle), self.options.beside
        learn = ("learn", str(photos), "--bundle", bundle, "--device", "cpu")
        steps = (
            (*learn, "--name", "beside", "--epochs", "1"),
            (*learn, "--into", "beside"),
            ("tasks", bundle, "--rename", "beside", "renamed"),
            ("tasks", bundle, "--remove", "renamed"),
        )
        while photos and time.perf_counter() < end:
            for command in steps:
                call = (sys.executable, "-m", "confitune", *command)
                process = await asyncio.create_subprocess_exec(*call, stdout=asyncio.subprocess.DEVNULL)
                if await process.wait():
                    self.unexpected[f"{command} ended with {process.returncode}"] += 1
                self.changes += 1
                self.keep_version()

    async def annoy(self, client: Client, bad: Bad, *, busy: bool) -> None:
        """Send what nobody should; only a busy server may put it off with 429."""
        for name, make in bad.items():
            body, kind = make()
            status, _, answer = await client.post(body, kind)
            self.statuses[f"bad {status}"] += 1
            if not 400 <= status < 500 or (status == 429 and not busy):
                self.unexpected[f"{name}: {status} {answer}"] += 1

    async def watch_memory(self) -> None:
        while True:
            self.memory.append(resident(self.pid))
            await asyncio.sleep(0.2)


class Client:
    """One connection, opened again when the server has closed it."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._where = parts.hostname, parts.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes, kind: str = FORM) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._where)
        reader, writer = self._streams
        head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            await writer.drain()
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self._streams = None
            return 0, {}, f"connection lost: {type(error).__name__}"
        if headers.get("connection") == "close":
            writer.close()
            self._streams = None
        return int(first.split()[1]), headers, answer


def form(images: list[tuple[bytes, str]]) -> bytes:
    """Images with their tasks as the body of a form."""
    parts = [('name="images"; filename="photo.jpg"', data) for data, _ in images]
    parts += [('name="task"', task.encode()) for _, task in images]
    start = b"--" + BOUNDARY + b"\r\nContent-Disposition: form-data; "
    return b"".join(start + name.encode() + b"\r\n\r\n" + data + b"\r\n" for name, data in parts) + (
        b"--" + BOUNDARY + b"--\r\n"
    )


def photographs() -> list[bytes]:
    """Patches of photographs that come with scikit-image, as JPEG files."""
    found = []
    for name in PHOTOS:
        image = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
        for left, top in ((0, 0), (image.width - 256, image.height - 256)):
            file = io.BytesIO()
            image.crop((left, top, left + 256, top + 256)).save(file, "JPEG", quality=90)
            found.append(file.getvalue())
    return found


def hostile(good: bytes) -> Bad:
    """Bodies and their types, none of which can be answered with classes."""

    def image(data: bytes) -> Callable[[], tuple[bytes, str]]:
        return lambda: (data, "image/png")

    chance = random.Random(0)
    thin, floats = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (1, 60_000)).save(thin, "PNG")
    Image.new("F", (50, 50)).save(floats, "TIFF")
    return {
        "text": image(b"hello, this is not an image"),
        "nothing": image(b""),
        "noise": image(chance.randbytes(100_000)),
        "half a photograph": image(good[: len(good) // 2]),
        "only a header": image(good[:200]),
        "20,000 pixels square in 50 kB": image(png(20_000, 20_000)),
        "60,000 pixels square announced": image(png(60_000, 60_000, rows=1)),
        "as thin as it gets": image(thin.getvalue()),
        "no bytes but floats": image(floats.getvalue()),
        "a program": image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n"),
        "a drawing": image(b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'),
        "a huge file": lambda: (bytes(17_000_000), "image/png"),
        "a huge body": lambda: (bytes(33_000_000), FORM),
        "too many images": lambda: (form([(good, "")] * 65), FORM),
        "an unknown task": lambda: (form([(good, "no such task")]), FORM),
        "half a form": lambda: (form([(good, "")])[:-30], FORM),
        "another type": lambda: (b"{}", "application/json"),
    }


def png(width: int, height: int, rows: int | None = None) -> bytes:
    """A black image of one bit a pixel, with all or only some of its rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(bytes((width // 8 + 1) * (height if rows is None else rows)))
    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


if __name__ == "__main__":
    main()
