"""A learned bundle behind the server: the same answers as without it, and no image that makes it fail."""

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from confitune.deploy import Predictor
from confitune.deploy.server import Limits
from deploy.server.running import running_server

httpx = pytest.importorskip("httpx", reason="pip install httpx")
pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")

TASKS = ("reds", "stripes", "greens")


@pytest.fixture(scope="module")
def predictor(taught_once):
    return Predictor.from_bundle(taught_once[3], device="cpu")


@pytest.fixture(scope="module")
def client(taught_once):
    own = Predictor.from_bundle(taught_once[3], device="cpu")  # the server is its only user
    with (
        running_server(own, limits=Limits(max_batch=8)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def file(image, kind="PNG"):
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def test_the_server_says_what_the_predictor_says(client, predictor, pictures):
    """Four clients at once, each with images of all tasks, given and not; batches mix them as they come."""
    images = {task: [file(image) for image in pictures(task, 4)] for task in TASKS}
    cases = [(data, task, given) for task in TASKS for data in images[task] for given in (task, None)]
    pixels = torch.stack([predictor.decode(data) for data, _, _ in cases])
    alone = [predictor.predict(pixels[n : n + 1], [given])[0] for n, (_, _, given) in enumerate(cases)]

    def ask(shift):
        order = [(n * 5 + shift) % len(cases) for n in range(len(cases))]
        sent = [("images", (str(n), cases[n][0])) for n in order]
        data = {"task": [cases[n][2] or "" for n in order]}
        with httpx.Client(base_url=client.base_url, timeout=120) as own:
            return own.post("/v1/predict", files=sent, data=data).json()["predictions"]

    with ThreadPoolExecutor(4) as pool:
        answers = [answer for answers in pool.map(ask, range(4)) for answer in answers]
    assert len(answers) == 4 * len(cases)
    for answer in answers:
        expected = alone[int(answer["image"])]
        assert answer["task"] == expected.task
        assert answer["unknown"] == (expected.task is None)
        found = {entry["name"]: entry["probability"] for entry in answer["classes"]}
        assert found == pytest.approx(dict(expected.classes), abs=1e-4)
    given = [answer for answer in answers if cases[int(answer["image"])][2]]
    assert all(answer["task_confidence"] is None for answer in given)


def test_tasks_of_the_bundle(client, predictor):
    answer = client.get("/v1/tasks").json()
    assert answer["name"] == predictor.name
    assert [(task["name"], len(task["classes"])) for task in answer["tasks"]] == [
        ("reds", 2),
        ("stripes", 3),
        ("greens", 2),
    ]
    assert all(0 <= task["accuracy"] <= 100 and task["images"] > 0 for task in answer["tasks"])


def black(width, height, rows):
    """A PNG file of one bit a pixel that announces more than it holds."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes((width // 8 + 1) * rows)))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


PHOTO = file(Image.effect_noise((90, 70), 60).convert("RGB"), "JPEG")
HOSTILE = {
    "text": b"hello",
    "half a photo": PHOTO[: len(PHOTO) // 2],
    "a photo's header": PHOTO[:100],
    "a bomb of 400 megapixels": black(20_000, 20_000, 20_000),
    "3,600 megapixels announced": black(60_000, 60_000, 1),
    "no pixels": black(0, 0, 0),
    "one pixel wide": file(Image.new("RGB", (1, 60_000))),
    "floats": file(Image.new("F", (9, 9)), "TIFF"),
    "a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n",
    "a drawing": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_with_its_name_and_a_reason(client, name):
    answer = client.post("/v1/predict", files={"images": ("evil.png", HOSTILE[name])}, timeout=120)
    assert (answer.status_code, answer.json()["error"]) == (422, "unreadable-image")
    assert answer.json()["image"] == "evil.png"
    assert "evil.png" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "I;16"), ("GIF", "P"), ("WEBP", "RGB"), ("BMP", "1")],
)
def test_images_of_every_usual_kind_are_taken(client, kind, mode):
    data = file(Image.new(mode, (30, 20)), kind)
    answer = client.post("/v1/predict", files={"images": ("a", data)}, data={"task": "reds"})
    assert answer.status_code == 200
    assert len(answer.json()["predictions"][0]["classes"]) == 2
