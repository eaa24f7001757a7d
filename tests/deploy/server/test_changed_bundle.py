"""A bundle that changes while it is served: the new version is taken over whole, and no request harms another."""

import io
import random
import shutil
import threading
from functools import cache

import pytest

from confitune.deploy import Bundle, LearnSettings, Predictor, changing, grow, remove_class
from confitune.methods import METHODS
from deploy.server.running import running_server
from deploy.shared import damage_task, settling

httpx = pytest.importorskip("httpx", reason="pip install httpx")
pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")


@pytest.fixture
def path(taught):
    return taught(3)


@pytest.fixture
def client(path):
    served = Predictor.from_bundle(path, device="cpu")
    with running_server(served) as address, httpx.Client(base_url=address, timeout=120) as client:
        yield client


@pytest.fixture
def sent(pictures):
    out = io.BytesIO()
    pictures("reds", 1)[0].save(out, "PNG")
    return out.getvalue()


def ask(client, sent, *tasks):
    files = [("images", (task or "guessed", sent)) for task in tasks]
    return client.post("/v1/predict", files=files, data={"task": [task or "" for task in tasks]})


def shares(prediction):
    return {entry["name"]: entry["probability"] for entry in prediction["classes"]}


def change(path, work):
    with changing(Bundle.open(path)) as opened:
        work(opened)


def names(client):
    return [task["name"] for task in client.get("/v1/tasks").json()["tasks"]]


def test_removed_and_renamed_tasks_are_noticed_between_two_requests(client, path, sent):
    before = ask(client, sent, "reds").json()["predictions"][0]
    change(path, lambda change: change.remove_task("stripes"))  # which the server has not read yet
    change(path, lambda change: change.rename_task("greens", "lawns"))  # its file is gone now
    guessed = ask(client, sent, None)
    assert guessed.status_code == 200, guessed.text
    assert guessed.json()["predictions"][0]["classes"][0]["name"].startswith("reds")  # or unknown, and nearest to it
    assert ask(client, sent, "stripes").status_code == 404
    assert ask(client, sent, "lawns").status_code == 200
    assert names(client) == ["reds", "lawns"]
    after = ask(client, sent, "reds").json()["predictions"][0]
    assert before["version"] != after["version"] == Bundle.open(path).manifest.version
    assert shares(after) == pytest.approx(shares(before), abs=1e-5)
    assert client.get("/healthz").json()["version"] == after["version"]


def test_a_task_that_was_learned_meanwhile_is_served(client, path, teach, sent):
    assert ask(client, sent, "checks").status_code == 404
    teach("checks", path)  # moves the backbone
    answer = ask(client, sent, "checks", "reds")
    assert answer.status_code == 200, answer.text
    expected = Predictor.from_bundle(path, device="cpu")
    pixels = expected.decode(sent)[None]
    for found in answer.json()["predictions"]:
        alone = expected.predict(pixels, [found["task"]])[0]
        assert shares(found) == pytest.approx(dict(alone.classes), abs=1e-4)


def test_a_damaged_task_fails_alone_and_tells_no_paths(client, path, sent):
    damage_task(path, "stripes")
    answers = [ask(client, sent, task) for task in ("reds", "stripes", None)]
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    refused = answers[1].json()
    assert refused["error"] == "unreadable-task"
    assert "'stripes'" in refused["detail"]
    assert str(path) not in answers[1].text
    assert "safetensors" not in answers[1].text
    health = client.get("/healthz")
    assert health.status_code == 200
    assert health.json()["unreadable_tasks"] == ["stripes"]


def test_a_bundle_that_was_damaged_meanwhile_is_served_as_it_was_opened(client, path, sent):
    before = ask(client, sent, "reds").json()["predictions"][0]
    for name in ("bundle.json", "bundle.before.json"):
        (path / name).write_text("{}")
    after = ask(client, sent, "reds").json()["predictions"][0]
    assert after["version"] == before["version"]
    assert shares(after) == pytest.approx(shares(before), abs=1e-5)
    health = client.get("/healthz").json()
    assert health["status"] == "outdated"
    assert str(path) not in str(health)


def test_files_that_two_changes_deleted_are_not_missed(path, sent):
    predictor = Predictor.from_bundle(path, device="cpu")
    pixels = predictor.decode(sent)[None]
    change(path, lambda change: change.remove_task("stripes"))
    change(path, lambda change: change.rename_task("greens", "lawns"))  # with the sums of before, and stripes
    (guessed,) = predictor.predict(pixels, [None], top=100)
    newest = Predictor.from_bundle(path, device="cpu")
    assert guessed == newest.predict(pixels, [None], top=100)[0]
    assert guessed.version == newest.version


@pytest.fixture
def kept(teach, tmp_path, monkeypatch):
    """A bundle of `best`, whose tasks can grow: 'reds' is a head, 'greens' and those to come have more of their own."""
    for task in ("reds", "greens"):
        monkeypatch.setattr(METHODS["best"], "settle", settling(only_head=task == "reds"))
        teach(task, tmp_path / "kept", method="best", epochs=1)
    return tmp_path / "kept"


def test_under_load_every_answer_is_that_of_the_version_it_names(kept, teach, photos, decoded, pictures, tmp_path):
    """Clients ask on and on, with and without a task, while tasks are learned, grown, renamed and removed."""
    files, versions, answers, unexpected = [], {}, [], []
    for task in ("reds", "greens", "blues"):
        for image in pictures(task, 2):
            out = io.BytesIO()
            image.save(out, "PNG")
            files.append(out.getvalue())

    def keep():
        version = Bundle.open(kept).manifest.version
        versions[version] = Predictor.from_bundle(shutil.copytree(kept, tmp_path / version), device="cpu")

    def asking(seed):
        chance, end = random.Random(seed), len(steps) + 1
        with httpx.Client(base_url=address, timeout=120) as client:
            while len(versions) < end:
                number, task = chance.randrange(len(files)), chance.choice(["", "", "reds", "greens", "blues", "lawns"])
                answer = client.post("/v1/predict", files=[("images", files[number])], data={"task": task, "top": 99})
                if answer.status_code == 200:
                    answers.append((number, task or None, answer.json()["predictions"][0]))
                elif answer.status_code != 404:
                    unexpected.append(answer.text)

    settings = LearnSettings(device="cpu", batch_size=4, epochs=1)
    steps = [
        lambda: teach("blues", kept, epochs=1),
        lambda: grow(photos("stripes"), "reds", kept, settings, cache_dir=decoded),
        lambda: change(kept, lambda change: change.rename_task("greens", "lawns")),
        lambda: change(kept, lambda change: change.remove_task("blues")),
        lambda: change(kept, lambda change: remove_class(change, "reds", "reds 0")),
        lambda: change(kept, lambda change: change.rename_task("lawns", "greens")),
    ]
    keep()
    with running_server(Predictor.from_bundle(kept, device="cpu")) as address:
        clients = [threading.Thread(target=asking, args=(seed,)) for seed in range(3)]
        for client in clients:
            client.start()
        for step in steps:
            step()
            keep()
        for client in clients:
            client.join()
    assert not unexpected
    assert len({answer["version"] for _, _, answer in answers}) >= 3

    @cache
    def alone(version, number, task):
        return versions[version].predict(versions[version].decode(files[number])[None], [task], top=99)[0]

    for number, task, answer in answers:
        expected = alone(answer["version"], number, task)
        assert answer["task"] == expected.task
        assert shares(answer) == pytest.approx(dict(expected.classes), abs=1e-4)
        others = {(entry["task"], entry["name"]): entry["probability"] for entry in answer["others"]}
        assert others == pytest.approx({(of, name): share for of, name, share in expected.others}, abs=1e-4)
