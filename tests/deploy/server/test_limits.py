"""Clients that send too much, too slowly or nonsense: each is told so or dropped, and the others are answered."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from confitune.deploy import Prediction
from confitune.deploy.server import Limits, create_app
from confitune.errors import UnreadableImageError
from deploy.server.running import running_server
from deploy.shared import FakePredictor, known, until

httpx = pytest.importorskip("httpx", reason="pip install httpx")
pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")
TestClient = pytest.importorskip("fastapi.testclient").TestClient


class Sizes(FakePredictor):
    """Every image that does not begin with 'bad' can be read; its class is its number of bytes."""

    name = "sizes"

    def __init__(self, classes=1):
        self.tasks = {"pets": known(("x" * 30,) * classes, None, 1, "2026-05-01")}
        self.predicted = 0
        self.gate = threading.Event()
        self.gate.set()

    def decode(self, data, name="image"):
        if data.startswith(b"bad"):
            raise UnreadableImageError(f"cannot read the image {name}")
        return torch.tensor(list(len(data).to_bytes(3, "big")), dtype=torch.uint8).view(3, 1, 1)

    def predict(self, pixels, tasks, top=5):
        self.predicted += len(pixels)
        assert self.gate.wait(120)
        sizes = [int.from_bytes(bytes(image.flatten().tolist()), "big") for image in pixels]
        return [
            Prediction("pets", None, ((str(size), 1.0), *((n, 0.0) for n in self.tasks["pets"].classes)))
            for size in sizes
        ]


@pytest.fixture
def sizes():
    predictor = Sizes()
    yield predictor
    predictor.gate.set()


@contextmanager
def serving(predictor, **limits):
    with (
        running_server(predictor, limits=Limits(**limits)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client
        if isinstance(predictor, Sizes):
            predictor.gate.set()


@contextmanager
def connected(client, timeout=5.0):
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port), timeout) as connection:
        yield connection


def everything(connection):
    """What the server says until it hangs up."""
    said = b""
    try:
        while part := connection.recv(65536):
            said += part
    except ConnectionResetError:
        pass
    return said


def one_answer(connection):
    """What the server says until its answer is whole."""
    said = connection.recv(65536)
    while b"\r\n\r\n" not in said or len(said.partition(b"\r\n\r\n")[2]) < int(
        said.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    ):
        part = connection.recv(65536)
        assert part, f"hung up after {said!r}"
        said += part
    return said


def parsed(said):
    """Status, headers and JSON of one raw answer."""
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, json.loads(body[: int(headers["content-length"])])


def head(length=None, kind="image/png", more=""):
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{size}\r\n{more}\r\n".encode()


def works(client, size=7):
    answer = client.post("/v1/predict", content=b"x" * size, headers={"Content-Type": "image/png"})
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"][0]["classes"][0]["name"] == str(size)


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent(sizes):
    with serving(sizes, body_bytes=100_000) as client, connected(client) as connection:
        connection.sendall(head(100_001, more="Expect: 100-continue\r\n"))
        status, headers, answer = parsed(everything(connection))
        assert (status, answer["error"], headers["connection"]) == (413, "body-too-large", "close")
        assert "more than 0.1 MB" in answer["detail"]
        assert works(client)


def test_a_client_that_sends_its_large_body_all_the_same_can_read_why_it_was_refused(sizes):
    """Closing on a client that still sends would reset the connection, and the answer with it."""
    body = b"x" * 20_000_000
    with serving(sizes, body_bytes=100_000) as client:
        for start, status in ((head(len(body)), 413), (head(len(body)).replace(b"/v1/predict", b"/nowhere"), 404)):
            with connected(client) as connection:
                connection.sendall(start + body)
                assert parsed(everything(connection))[0] == status
        assert works(client)


def test_a_chunked_body_is_counted_while_it_arrives(sizes):
    with serving(sizes, body_bytes=100_000, image_bytes=100_000) as client, connected(client) as connection:
        connection.sendall(head())
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        sent = 0
        connection.settimeout(0.05)
        said = b""
        while not said and sent < 100:
            connection.sendall(chunk)
            sent += 1
            try:
                said = one_answer(connection)
            except TimeoutError:
                continue
        assert sent == 7  # 6 x 16 KiB are below 100,000 bytes
        assert parsed(said)[0] == 413
        assert works(client)


def test_one_image_of_a_form_may_be_too_large(sizes):
    with serving(sizes, image_bytes=5000) as client:
        sent = [("images", ("small.png", b"x" * 5000)), ("images", ("large.png", b"x" * 5001))]
        answer = client.post("/v1/predict", files=sent)
        assert (answer.status_code, answer.json()["error"]) == (413, "image-too-large")
        assert answer.json()["image"] == "large.png"
        answer = client.post("/v1/predict", content=b"x" * 5001, headers={"Content-Type": "image/png"})
        assert answer.status_code == 413
        assert works(client, 5000)


def test_too_many_images(sizes):
    with serving(sizes, images=3) as client:
        for count, status in ((3, 200), (4, 400)):
            answer = client.post("/v1/predict", files=[("images", ("a.png", b"xx"))] * count)
            assert answer.status_code == status
        assert "Maximum number of files is 3" in answer.json()["detail"]
        assert sizes.predicted == 3


def test_a_full_queue_is_a_429_that_says_when_to_come_back(sizes):
    with serving(sizes, images=2, queue_images=4, max_batch=1, max_wait_ms=0) as client, ThreadPoolExecutor(8) as pool:
        sizes.gate.clear()
        ask = lambda size: pool.submit(works, httpx.Client(base_url=client.base_url, timeout=60), size)  # noqa: E731
        running = ask(1)
        until(lambda: sizes.predicted == 1)
        waiting = [ask(size) for size in (2, 3, 4, 5)]
        until(lambda: client.get("/healthz").json()["queue_images"] == 4)
        answer = client.post("/v1/predict", content=b"x", headers={"Content-Type": "image/png"})
        assert (answer.status_code, answer.json()["error"], answer.headers["retry-after"]) == (429, "busy", "1")
        with connected(client) as connection:  # even before it sends the image
            connection.sendall(head(1000, more="Expect: 100-continue\r\n"))
            assert parsed(everything(connection))[0] == 429
        assert client.get("/healthz").status_code == 200  # busy is not broken
        sizes.gate.set()
        assert all(future.result() for future in [running, *waiting])
        assert works(client)
        assert sizes.predicted == 6


def test_bodies_under_way_are_bounded_together(sizes):
    limits = {"body_bytes": 60_000, "all_bodies_bytes": 100_000, "body_seconds": 20}
    with serving(sizes, **limits) as client, connected(client) as first, connected(client) as second:
        first.sendall(head(60_000) + b"x" * 59_999)
        until(lambda: client.get("/healthz").json()["body_bytes"] == 59_999)
        second.sendall(head(50_000))  # announced: it would not fit
        status, headers, answer = parsed(one_answer(second))
        assert (status, answer["error"], headers["retry-after"]) == (429, "busy-bytes", "1")
        assert works(client, 30_000)
        first.sendall(b"x")
        assert parsed(one_answer(first))[2]["predictions"][0]["classes"][0]["name"] == "60000"
        until(lambda: client.get("/healthz").json()["body_bytes"] == 0)


def test_a_client_that_sends_its_body_slowly_is_dropped(sizes):
    with serving(sizes, body_seconds=0.4) as client, connected(client) as connection:
        connection.sendall(head(1000) + b"x")
        stop = threading.Event()

        def trickle():
            while not stop.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

        trickling = threading.Thread(target=trickle)
        trickling.start()
        status, _, answer = parsed(everything(connection))
        stop.set()
        trickling.join()
        assert (status, answer["error"]) == (408, "slow-client")
        assert works(client)
        assert client.get("/healthz").json()["body_bytes"] == 0


def test_an_answer_that_takes_too_long_is_a_504(sizes):
    with serving(sizes, request_seconds=0.3, max_batch=1) as client:
        sizes.gate.clear()
        answer = client.post("/v1/predict", files=[("images", ("a.png", b"xx"))] * 5)
        assert (answer.status_code, answer.json()["error"]) == (504, "timeout")
        sizes.gate.set()
        assert works(client)
        assert sizes.predicted == 2  # the other four were given up


def test_the_other_images_of_a_request_that_failed_are_not_predicted(sizes):
    with serving(sizes, max_batch=1, max_wait_ms=0) as client, ThreadPoolExecutor(1) as pool:
        sizes.gate.clear()
        running = pool.submit(works, httpx.Client(base_url=client.base_url, timeout=60))
        until(lambda: sizes.predicted == 1)
        answer = client.post("/v1/predict", files=[("images", ("a", b"x"))] * 5 + [("images", ("b", b"bad"))])
        assert answer.status_code == 422
        sizes.gate.set()
        assert running.result()
        assert works(client)
        assert sizes.predicted == 2


def test_images_of_a_client_that_has_left_are_not_predicted(sizes):
    with serving(sizes, max_batch=1, max_wait_ms=0) as client:
        sizes.gate.clear()
        with connected(client) as connection:
            connection.sendall(head(3) + b"xxx")
            until(lambda: sizes.predicted == 1)
            with connected(client) as other:
                other.sendall(head(4) + b"xxxx")
                until(lambda: client.get("/healthz").json()["queue_images"] == 1)
            time.sleep(0.2)  # for the server to hear of it
            sizes.gate.set()
            assert parsed(one_answer(connection))[0] == 200
        assert works(client)
        assert sizes.predicted == 2


@pytest.fixture(scope="module")
def shared():
    with serving(Sizes()) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/static/..%2f..",
        "/page/../../limits.py",
        "/page.js/../app.py",
        "/page.js%00.html",
        "//etc/passwd",
        "/index.html",
        "/v1/tasks/..%5c..%5cx",
        "/redoc",
    ],
)
def test_paths_lead_nowhere_else(shared, path):
    with connected(shared) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        status, _, answer = parsed(everything(connection))
    assert (status, answer["error"]) == (404, "not-found")


def test_methods_that_a_path_does_not_have(shared):
    answer = shared.get("/v1/predict")
    assert (answer.status_code, answer.headers["allow"], answer.json()["error"]) == (405, "POST", "method-not-allowed")


def part(content=b"x", disposition=b'form-data; name="images"; filename="a.png"'):
    return b"--B\r\nContent-Disposition: " + disposition + b"\r\n\r\n" + content + b"\r\n"


FORM = "multipart/form-data; boundary=B"
NAMED = b'form-data; name="images"; filename="'
TASK = b'form-data; name="task"'
HOSTILE = {
    "no boundary": ("multipart/form-data", part() + b"--B--", 400),
    "an empty boundary": ("multipart/form-data; boundary=", part() + b"--B--", 400),
    "a long boundary": ("multipart/form-data; boundary=" + "B" * 3000, part() + b"--B--", 400),
    "another boundary": ("multipart/form-data; boundary=C", part() + b"--B--", 400),
    "no end": (FORM, part(), 422),
    "cut off in the headers": (FORM, part()[:30], 422),
    "an empty form": (FORM, b"--B--\r\n", 422),
    "nothing": (FORM, b"", 422),
    "no name": (FORM, part(disposition=b"form-data") + b"--B--", 400),
    "long headers": (FORM, part(disposition=b"x" * 60_000) + b"--B--", 400),
    "a strange charset": (FORM + "; charset=idna", part(disposition=b'form-data; name="\xff\xfe"') + b"--B--", 422),
    "a name of no encoding": (FORM, part(b"bad", NAMED + b'\xff\xed\xa0\x80"') + b"--B--", 422),
    "a long name": (FORM, part(b"bad", NAMED + b"n" * 4000 + b'"') + b"--B--", 422),
    "thousands of tasks": (FORM, part(b"pets", TASK) * 9000 + b"--B--", 400),
    "a task of no encoding": (FORM, part(b"\xff" * 900, TASK) + part() + b"--B--", 404),
    "a type of no type": ("image", b"x", 415),
    "an unreadable image": ("image/png", b"bad", 422),
    "no image at all": ("image/png", b"", 422),
}


@pytest.mark.parametrize(("kind", "body", "status"), HOSTILE.values(), ids=HOSTILE)
def test_nonsense_is_the_clients_fault(shared, kind, body, status):
    answer = shared.post("/v1/predict", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert set(answer.json()) <= {"error", "detail", "image"}
    assert len(answer.content) < 3000
    assert works(shared)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
        b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=["tls", "negative length", "two lengths", "a bad chunk", "long headers"],
)
def test_what_is_not_http_is_dropped(shared, request_):
    with connected(shared) as connection:
        connection.sendall(request_)
        said = everything(connection)
    assert said.startswith(b"HTTP/1.1 4") or said == b""
    assert works(shared)


PIECES = (part(), part(b"bad"), part()[:-2], b"--B", b"--B--", b"\r\n", b"--", b"B", b"Content-Disposition: ")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([FORM, "image/png", FORM + "; boundary=C"]),
    pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=20), max_size=8),
)
def test_no_body_makes_the_server_fail(shared, kind, pieces):
    answer = shared.post("/v1/predict", content=b"".join(pieces), headers={"Content-Type": kind})
    assert answer.status_code in (200, 400, 413, 422)


# ---- connections, and names of the server ----------------------------------------------------------------------------


def test_idle_connections_make_room_for_who_asks(sizes):
    with serving(sizes, connections=5) as client, ExitStack() as stack:
        idle = [stack.enter_context(connected(client)) for _ in range(80)]  # more than are kept for health
        for _ in range(3):
            with httpx.Client(base_url=client.base_url, timeout=60) as newcomer:
                assert works(newcomer)
                assert newcomer.get("/healthz").status_code == 200
        assert everything(idle[0]) == b""


def test_busy_connections_are_bounded(sizes, monkeypatch):
    monkeypatch.setattr("confitune.deploy.server.app._SPARE", 2)
    with serving(sizes, connections=3, body_seconds=20) as client, ExitStack() as stack:
        busy = [stack.enter_context(connected(client)) for _ in range(3)]
        for connection in busy:  # requests whose bodies do not come
            connection.sendall(head(1000))
        with httpx.Client(base_url=client.base_url, timeout=60) as newcomer:
            until(lambda: newcomer.get("/v1/tasks").status_code == 503)
        for _ in range(2):
            connection = stack.enter_context(connected(client))
            connection.sendall(head(1000))
            assert parsed(one_answer(connection))[0] == 503  # and its body is still waited for
        one_more = stack.enter_context(connected(client))
        with suppress(ConnectionResetError, BrokenPipeError):
            one_more.sendall(head(1000))
        assert everything(one_more) == b""


def test_health_is_told_when_every_connection_is_busy(sizes):
    with serving(sizes, connections=3, body_seconds=20) as client, ExitStack() as stack:
        for _ in range(4):  # requests whose bodies do not come
            connection = stack.enter_context(connected(client))
            connection.sendall(head(1000))
        with httpx.Client(base_url=client.base_url, timeout=60) as newcomer:
            until(lambda: newcomer.get("/v1/tasks").status_code == 503)
            assert newcomer.get("/healthz").status_code == 200


def test_a_body_in_pieces_of_one_byte_is_cut_off(sizes):
    with serving(sizes) as client, connected(client) as connection:
        connection.sendall(head())
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(b"1\r\nx\r\n" * 20_000)
        assert everything(connection) == b""  # and does not wait for the rest
        assert works(client)


def test_a_body_in_larger_pieces_is_taken(sizes):
    with serving(sizes) as client, connected(client) as connection:
        connection.sendall(head() + b"3e8\r\n" + b"x" * 1000 + b"\r\n" + (b"3e8\r\n" + b"x" * 1000 + b"\r\n") * 299)
        connection.sendall(b"0\r\n\r\n")
        status, _, answer = parsed(one_answer(connection))
        assert (status, answer["predictions"][0]["classes"][0]["name"]) == (200, "300000")


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "["])
def test_a_page_of_another_name_is_told_nothing(sizes, name):
    with serving(sizes) as client:
        answer = client.get("/v1/tasks", headers={"Host": name})
        assert (answer.status_code, answer.json()["error"]) == (421, "unknown-host")


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000", "192.168.0.7", "my.model"])
def test_names_of_the_server(sizes, name):
    app = create_app(sizes, hosts=["My.Model"])
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/v1/tasks", headers={"Host": name}).status_code == 200
