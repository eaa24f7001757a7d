"""The server's answers over a real socket."""

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from confitune.deploy import Prediction
from confitune.deploy.server import Limits
from confitune.errors import ConfituneError
from confitune.tasks.decode import open_rgb
from deploy.server.running import running_server
from deploy.shared import FakePredictor, known, until

httpx = pytest.importorskip("httpx", reason="pip install httpx")
pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")


class Colours(FakePredictor):
    """Classes are colours: the strongest channel decides. Blue images are birds, black ones are of no task."""

    name = "colours"
    tasks = {  # noqa: RUF012
        "pets": known(("red cat", "green frog", "blue fish"), 93.5, 640, "2026-05-01"),
        "birds": known(("red robin", "green parrot"), None, 12, "2026-05-02"),
    }

    def __init__(self):
        self.batches = []
        self.decoded = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = None

    def decode(self, data, name="image"):
        self.decoded.append(name)
        return torch.from_numpy(np.array(open_rgb(io.BytesIO(data), name=name).resize((4, 4)))).permute(2, 0, 1)

    def predict(self, pixels, tasks, top=5):
        self.batches.append(list(tasks))
        assert self.gate.wait(60)
        if self.fails:
            raise self.fails
        return [self.answer(image.float().mean((1, 2)), task, top) for image, task in zip(pixels, tasks, strict=True)]

    def answer(self, channels, task, top):
        confidence = None
        if task is None:
            if channels.max() < 5:
                return Prediction(None, 0.5, ())
            task, confidence = ("birds", 0.75) if channels.argmax() == 2 else ("pets", 0.875)
        share = channels[: len(self.tasks[task].classes)] + 1
        order = share.argsort(descending=True, stable=True).tolist()
        share = share / share.sum()
        return Prediction(task, confidence, tuple((self.tasks[task].classes[n], float(share[n])) for n in order[:top]))


def picture(colour, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(file, kind)
    return file.getvalue()


RED, GREEN, BLUE, BLACK = (254, 0, 0), (0, 254, 0), (0, 0, 254), (0, 0, 0)


@pytest.fixture
def colours():
    return Colours()


@pytest.fixture
def client(colours):
    """A client of a running server."""
    with (
        running_server(colours, limits=Limits(max_batch=8)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client
        colours.gate.set()


def form(*colours, names=None):
    return [
        ("images", (name, picture(colour))) for name, colour in zip(names or map(str, colours), colours, strict=True)
    ]


def predicted(answer):
    assert answer.status_code == 200, answer.text
    return [(p["task"], p["classes"][0]["name"] if p["classes"] else None) for p in answer.json()["predictions"]]


def test_one_image(client):
    answer = client.post("/v1/predict", files=form(RED, names=["my cat.png"]), data={"task": "pets"}).json()
    took = answer.pop("milliseconds")
    assert 0 < took < 5000
    share = pytest.approx(1 / 257, rel=1e-3)
    assert answer == {
        "predictions": [
            {
                "image": "my cat.png",
                "task": "pets",
                "task_confidence": None,
                "unknown": False,
                "classes": [
                    {"name": "red cat", "probability": pytest.approx(255 / 257, rel=1e-3)},
                    {"name": "green frog", "probability": share},
                    {"name": "blue fish", "probability": share},
                ],
                "others": [],
                "version": "",
            }
        ]
    }


def test_images_of_different_tasks_come_back_in_order(client):
    sent = form(RED, GREEN, RED, BLACK, GREEN, BLUE, names=["0", "1", "2", "3", "4", "5"])
    answer = client.post("/v1/predict", files=sent, data={"task": ["pets", "birds", "birds", "", "", ""]})
    assert predicted(answer) == [
        ("pets", "red cat"),
        ("birds", "green parrot"),
        ("birds", "red robin"),
        (None, None),
        ("pets", "green frog"),
        ("birds", "red robin"),
    ]
    found = answer.json()["predictions"]
    assert [p["image"] for p in found] == ["0", "1", "2", "3", "4", "5"]
    assert [p["unknown"] for p in found] == [False, False, False, True, False, False]
    assert [p["task_confidence"] for p in found] == [None, None, None, 0.5, 0.875, 0.75]


def test_one_task_for_all_images(client):
    answer = client.post("/v1/predict", files=form(RED, GREEN, BLUE), data={"task": "pets"})
    assert predicted(answer) == [("pets", "red cat"), ("pets", "green frog"), ("pets", "blue fish")]


def test_an_image_as_the_body(client):
    headers = {"Content-Type": "image/jpeg"}
    body = picture(GREEN, "JPEG")
    assert predicted(client.post("/v1/predict", content=body, headers=headers)) == [("pets", "green frog")]
    answer = client.post("/v1/predict", content=body, headers=headers, params={"task": "birds", "top": 1})
    assert predicted(answer) == [("birds", "green parrot")]
    assert len(answer.json()["predictions"][0]["classes"]) == 1


@pytest.mark.parametrize(("top", "classes"), [("1", 1), (" 2 ", 2), ("1000", 3)])
def test_as_many_classes_as_wanted_and_there_are(client, top, classes):
    answer = client.post("/v1/predict", files=form(RED), data={"task": "pets", "top": top})
    assert len(answer.json()["predictions"][0]["classes"]) == classes


def test_requests_at_the_same_time_share_batches_and_each_gets_its_own_answer(client, colours):
    colours.gate.clear()
    cases = [(RED, "pets", 1, "red cat"), (GREEN, "birds", 2, "green parrot"), (BLUE, "pets", 3, "blue fish")] * 3

    def ask(case):
        colour, task, top, _ = case
        data = {"task": task, "top": str(top)}
        answer = httpx.post(client.base_url.join("/v1/predict"), files=form(colour), data=data)
        return [*predicted(answer), len(answer.json()["predictions"][0]["classes"])]

    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(ask, cases[0])
        while not colours.batches:
            time.sleep(0.002)
        others = [pool.submit(ask, case) for case in cases[1:]]
        until(lambda: client.get("/healthz").json()["queue_images"] == 8 and len(colours.decoded) == 9)
        time.sleep(0.1)  # the last is being decoded
        colours.gate.set()
        answers = [future.result() for future in [first, *others]]
    assert answers == [[(task, name), top] for _, task, top, name in cases]
    assert sorted(map(len, colours.batches)) == [1, 8]
    assert set(colours.batches[1]) == {"pets", "birds"}


BAD = [
    ("no images", {"data": {"task": "pets"}, "files": {"top": (None, "1")}}, 422, "no-images", "field 'images'"),
    ("a wrong field", {"files": {"image": ("a.png", b"x")}}, 422, "no-images", "field 'images'"),
    ("too few tasks", {"files": form(RED, RED, RED), "data": {"task": ["pets", "birds"]}}, 422, "bad-field", "2 tasks"),
    ("top 0", {"files": form(RED), "data": {"top": "0"}}, 422, "bad-field", "from 1 to 1000, not '0'"),
    ("top in words", {"files": form(RED), "data": {"top": "²"}}, 422, "bad-field", "from 1 to 1000"),
    ("a huge top", {"files": form(RED), "data": {"top": "9" * 900}}, 422, "bad-field", "from 1 to 1000"),
    (
        "top in the query",
        {"content": b"x", "headers": {"Content-Type": "image/png"}, "params": {"top": 1001}},
        422,
        "bad-field",
        "top: ",
    ),
    ("a long field", {"files": form(RED), "data": {"task": "x" * 2000}}, 400, "bad-request", "1KB"),
    (
        "an unknown task",
        {"files": form(RED), "data": {"task": "cars"}},
        404,
        "unknown-task",
        "no task 'cars'; /v1/tasks",
    ),
    (
        "another type",
        {"content": b"{}", "headers": {"Content-Type": "application/json"}},
        415,
        "unsupported-type",
        "form",
    ),
    ("no type", {"content": b"x"}, 415, "unsupported-type", "an unnamed type"),
    ("no image", {"files": {"images": ("a.txt", b"hello")}}, 422, "unreadable-image", "a.txt"),
    ("an empty image", {"files": {"images": ("a.png", b"")}}, 422, "unreadable-image", "a.png is empty"),
    ("half an image", {"files": {"images": ("a.png", picture(RED)[:45])}}, 422, "unreadable-image", "a.png"),
]


@pytest.fixture(scope="module")
def shared_client():
    with running_server(Colours()) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("request_", "status", "error", "words"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_what_cannot_be_answered_says_why(shared_client, request_, status, error, words):
    answer = shared_client.post("/v1/predict", **request_)
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert words in answer.json()["detail"]
    assert predicted(shared_client.post("/v1/predict", files=form(RED))) == [("pets", "red cat")]


def test_the_unreadable_one_of_many_images_is_named(shared_client):
    sent = [*form(RED, GREEN), ("images", ("häßlich.png", b"\x89PNG not"))]
    answer = shared_client.post("/v1/predict", files=sent)
    assert answer.status_code == 422
    assert answer.json()["image"] == "häßlich.png"


def test_a_failing_predictor_is_a_500_and_the_next_request_works(client, colours):
    colours.fails = RuntimeError("secret of the machine")
    answer = client.post("/v1/predict", files=form(RED))
    assert (answer.status_code, answer.json()["error"]) == (500, "prediction-failed")
    assert "secret" not in answer.text
    colours.fails = ConfituneError("the task's file is gone")
    answer = client.post("/v1/predict", files=form(RED))
    assert (answer.status_code, answer.json()["detail"]) == (500, "the prediction failed; the server's log says why")
    colours.fails = None
    assert predicted(client.post("/v1/predict", files=form(RED))) == [("pets", "red cat")]


def test_health_says_that_nothing_is_answered(client, colours):
    colours.fails = RuntimeError("secret of the machine")
    assert client.post("/v1/predict", files=form(RED)).status_code == 500
    until(lambda: client.get("/healthz").status_code == 503)
    answer = client.get("/healthz")
    assert answer.json()["error"] == "failing"
    assert "secret" not in answer.text
    colours.fails = None
    assert client.post("/v1/predict", files=form(RED)).status_code == 200
    until(lambda: client.get("/healthz").status_code == 200)


def test_a_failing_server_tells_nothing_of_itself(client, colours):
    def renew():
        raise RuntimeError("secret of the machine")

    colours.renew = renew
    for answer in (client.get("/v1/tasks"), client.post("/v1/predict", files=form(RED))):
        assert (answer.status_code, answer.json()["error"]) == (500, "internal")
        assert "secret" not in answer.text
    del colours.renew
    assert predicted(client.post("/v1/predict", files=form(RED))) == [("pets", "red cat")]


def test_tasks_and_health(shared_client):
    answer = shared_client.get("/v1/tasks").json()
    assert answer["name"] == "colours"
    assert answer["tasks"] == [
        {
            "name": name,
            "classes": list(task.classes),
            "accuracy": task.accuracy,
            "images": task.images,
            "learned": task.learned,
        }
        for name, task in Colours.tasks.items()
    ]
    assert answer["limits"] == {"body_bytes": 32_000_000, "image_bytes": 16_000_000, "images": 64}
    assert shared_client.get("/healthz").json() == {
        "status": "ok",
        "version": "1",
        "unreadable_tasks": [],
        "queue_images": 0,
        "body_bytes": 0,
    }


def test_everything_is_described(shared_client):
    described = shared_client.get("/openapi.json").json()
    assert set(described["paths"]) == {"/v1/predict", "/v1/tasks", "/healthz"}
    predict = described["paths"]["/v1/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {"multipart/form-data", "image/*"}
    error = {"$ref": "#/components/schemas/ErrorAnswer"}
    assert set(predict["responses"]) == {"200", "4XX", "5XX"}
    for status in ("4XX", "5XX"):
        assert predict["responses"][status]["content"]["application/json"]["schema"] == error
    fields = described["components"]["schemas"]["ImagePrediction"]["properties"]
    assert set(fields) == {"image", "task", "task_confidence", "unknown", "classes", "others", "version"}


def test_the_page_loads_only_its_own_files_and_runs_only_its_own_script(shared_client):
    page = shared_client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<style" not in page.text
    assert "http://" not in page.text + shared_client.get("/page.js").text
    assert "https://" not in page.text + shared_client.get("/page.js").text
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("icon.svg", "image/svg+xml")):
        assert f'"{name}"' in page.text
        answer = shared_client.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_form_that_is_cut_off_is_refused(client):
    """Its last field, which is lost, may have been the task."""
    image = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + picture(RED) + b"\r\n"
    task = b'--x\r\nContent-Disposition: form-data; name="task"\r\n\r\nbir'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.post("/v1/predict", content=image + b"--x--\r\n", headers=headers).status_code == 200
    for body in (image + task, image + b"--x\r\n"):
        answer = client.post("/v1/predict", content=body, headers=headers)
        assert (answer.status_code, "cut off" in answer.text) == (400, True), answer.text
