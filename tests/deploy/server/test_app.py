"""The server from its start to its end: where it listens, what it says, and that it leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from confitune.deploy.server import Limits, create_app, serve
from confitune.deploy.server.app import listen
from confitune.errors import ConfituneError
from deploy.server.running import running_server
from deploy.shared import until

httpx = pytest.importorskip("httpx", reason="pip install httpx")
pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")

PREDICTOR = """
import threading
import torch
from confitune.deploy.predictor import Prediction

class Fake:
    name, version, outdated, unreadable = "fake", "1", False, ()
    tasks = {}

    def renew(self):
        pass

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0

    def decode(self, data, name="image"):
        return torch.zeros(3, 2, 2, dtype=torch.uint8)

    def predict(self, pixels, tasks, top=5):
        self.asked += len(pixels)
        self.gate.wait(120)
        return [Prediction("pets", None, (("cat", 1.0),), "1") for _ in pixels]
"""
made = {}
exec(PREDICTOR, made)
Fake = made["Fake"]  # for this process, and as text for another one


def post(address, images=1):
    return httpx.post(f"{address}/v1/predict", files=[("images", ("a.png", b"x"))] * images, timeout=120)


def test_nothing_is_left_when_the_server_has_stopped():
    before = set(threading.enumerate())
    with running_server(Fake()) as address:
        with ThreadPoolExecutor(4) as pool:
            assert [answer.status_code for answer in pool.map(post, [address] * 8)] == [200] * 8
        assert {"confitune-serve", "confitune-predict"} <= {thread.name for thread in threading.enumerate()}
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


@pytest.mark.parametrize(("seconds", "opens"), [(5, True), (1, False)])
def test_what_waits_when_the_server_is_stopped_is_answered_or_cut_off(seconds, opens):
    fake = Fake()
    fake.gate.clear()
    with ThreadPoolExecutor(2) as pool, ExitStack() as running:
        limits = Limits(shutdown_seconds=seconds, max_batch=2)
        address = running.enter_context(running_server(fake, limits=limits))
        answers = [pool.submit(post, address, 3) for _ in range(2)]
        until(
            lambda: fake.asked and fake.asked + httpx.get(f"{address}/healthz", timeout=60).json()["queue_images"] == 6
        )
        if opens:
            threading.Timer(0.4, fake.gate.set).start()
        running.close()  # which without a limit would wait for the gate
        fake.gate.set()
        for answer in answers:
            cut_off = answer.exception() is not None or answer.result().status_code >= 500
            assert cut_off is not opens


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfituneError, match=f"port {port}: .*; port 0 takes a free one"):
            serve(Fake(), port=port)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"host": "192.0.2.1", "port": 0}, "192.0.2.1, port 0"),
        ({"host": "no such host.invalid", "port": 0}, "no such host.invalid, port 0"),
    ],
)
def test_an_address_that_is_not_there_is_said(where, words):
    with pytest.raises(ConfituneError, match=words):
        serve(Fake(), **where)


def test_an_answer_is_sent_at_once():
    """Without TCP_NODELAY the second part of an answer waits 40 ms for the client's acknowledgement of the first."""
    with listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP  # asyncio sets it on such sockets alone


def test_ipv6_if_there_is_any():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with running_server(Fake(), host="::1") as address:
        assert address.startswith("http://[::1]:")
        assert post(address).status_code == 200


PROGRAM = f"""
import sys
PACKAGES = ("fastapi", "starlette", "uvicorn", "python_multipart")
sys.modules.update(dict.fromkeys(PACKAGES))  # as if they were not installed
import confitune.deploy
from confitune.deploy.server import Limits, create_app, serve
from confitune.errors import ConfituneError
for start in (lambda: create_app(None), lambda: serve(None)):
    try:
        start()
    except ConfituneError as error:
        print(error)
for name in PACKAGES:
    del sys.modules[name]
{PREDICTOR}
serve(Fake(), port=0)
print("after")
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_a_program_of_its_own():
    """Without its packages the server says how to get them, and all else imports; Ctrl-C ends it without a word."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            missing = "the server needs packages that are not installed: pip install 'confitune[serve]'\n"
            assert [process.stdout.readline() for _ in range(2)] == [missing] * 2
            said = process.stdout.readline()
            assert said.startswith("serving fake at http://127.0.0.1:")
            assert post(said.split()[3]).status_code == 200
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # where one of these fails
    assert (rest, errors, process.returncode) == ("after\n", "", 0)


def test_the_app_runs_under_any_asgi_server():
    """Its threads come and go with its lifespan."""
    from starlette.testclient import TestClient

    before = set(threading.enumerate())
    app = create_app(Fake())
    assert set(threading.enumerate()) <= before
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/healthz").json()["status"] == "ok"
        answer = client.post("/v1/predict", files={"images": ("a.png", b"x")})
        assert answer.json()["predictions"][0]["classes"] == [{"name": "cat", "probability": 1.0}]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("confitune")]
    assert torch.is_tensor(Fake().decode(b"x"))
