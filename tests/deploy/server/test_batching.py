"""Images of many requests in few batches: who is asked for what, and who gets which answer."""

import io
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from confitune.deploy import Prediction
from confitune.deploy.server import Limits, batching
from confitune.deploy.server.batching import Batcher
from confitune.deploy.server.limits import Refusal
from confitune.errors import ConfituneError, UnreadableImageError
from deploy.shared import FakePredictor, until


class Fake(FakePredictor):
    """An image is its first byte; its best class says which byte that was."""

    name = "fake"

    def __init__(self):
        self.batches, self.decoded, self.threads = [], [], set()
        self.gate = threading.Event()
        self.gate.set()
        self.fails = None

    def decode(self, data, name="image"):
        self.decoded.append(name)
        if data == b"bad":
            raise UnreadableImageError(f"cannot read the image {name}: no")
        if data == b"worse":
            raise ZeroDivisionError("at 0x7f00")
        return torch.full((3, 2, 2), data[0], dtype=torch.uint8)

    def predict(self, pixels, tasks, top=5):
        self.threads.add(threading.current_thread().name)
        self.batches.append([(int(image[0, 0, 0]), task) for image, task in zip(pixels, tasks, strict=True)])
        assert self.gate.wait(60)
        if self.fails:
            raise self.fails
        return [
            Prediction(task, None, tuple((f"{byte}-{n}", 1 / top) for n in range(top)))
            for byte, task in self.batches[-1]
        ]


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def started(fake):
    """Starts a batcher; afterwards its threads are gone."""
    batchers, before = [], set(threading.enumerate())

    def start(**limits):
        limits.setdefault("max_wait_ms", 20)
        batcher = Batcher(fake, Limits(**limits))
        batcher.start()
        batchers.append(batcher)
        return batcher

    yield start
    fake.gate.set()
    for batcher in batchers:
        batcher.close()
    assert set(threading.enumerate()) <= before


def files(*numbers):
    return [(f"{number}.png", bytes([number])) for number in numbers]


def best(answers):
    return [answer.result(60).classes[0][0] for answer in answers]


def test_a_request_is_answered_in_its_order_with_each_images_task(started, fake):
    answers = started(decoders=1).submit(files(7, 9, 8), ["pets", None, "birds"], 2)
    found = [answer.result(60) for answer in answers]
    assert [(f.task, f.classes[0][0]) for f in found] == [("pets", "7-0"), (None, "9-0"), ("birds", "8-0")]
    assert fake.batches == [[(7, "pets"), (9, None), (8, "birds")]]


def test_what_waits_while_a_batch_is_predicted_makes_the_next_one(started, fake):
    batcher = started(max_batch=8)
    fake.gate.clear()
    first = batcher.submit(files(1), ["pets"], 1)
    until(lambda: fake.batches)
    others = [batcher.submit(files(number), [None], 1)[0] for number in range(2, 8)]
    until(lambda: len(batcher._ready) == 6)
    assert batcher.waiting == 6
    fake.gate.set()
    assert best([*first, *others]) == [f"{number}-0" for number in range(1, 8)]
    assert [len(batch) for batch in fake.batches] == [1, 6]
    assert fake.threads == {"confitune-predict"}


def test_a_large_request_is_split_over_batches(started, fake):
    answers = started(max_batch=4, decoders=1).submit(files(*range(10)), ["pets"] * 10, 1)
    assert best(answers) == [f"{number}-0" for number in range(10)]
    assert [len(batch) for batch in fake.batches] == [4, 4, 2]


def test_a_full_batch_does_not_wait_and_a_small_one_waits_for_others(started, fake):
    batcher = started(max_batch=2, max_wait_ms=3_600_000)
    assert best(batcher.submit(files(1, 2), ["pets"] * 2, 1)) == ["1-0", "2-0"]
    first = batcher.submit(files(3), ["pets"], 1)
    until(lambda: len(batcher._ready) == 1)
    assert not first[0].done()
    assert best([*first, *batcher.submit(files(4), ["pets"], 1)]) == ["3-0", "4-0"]
    assert [len(batch) for batch in fake.batches] == [2, 2]


def test_a_small_batch_waits_no_longer_than_it_may(started, fake):
    assert best(started(max_batch=2, max_wait_ms=50).submit(files(1), ["pets"], 1)) == ["1-0"]


def test_what_has_waited_for_the_last_batch_does_not_wait_again(started, fake, monkeypatch):
    batcher = started(max_batch=2, max_wait_ms=3_600_000)
    fake.gate.clear()
    first = batcher.submit(files(1, 2), ["pets"] * 2, 1)
    until(lambda: fake.batches)
    second = batcher.submit(files(3), ["pets"], 1)
    until(lambda: len(batcher._ready) == 1)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3601, perf_counter=time.perf_counter)
    monkeypatch.setattr(batching, "time", later)
    fake.gate.set()
    assert best([*first, *second]) == ["1-0", "2-0", "3-0"]


def test_everyone_gets_at_least_as_many_classes_as_they_asked_for(started, fake):
    batcher = started(max_batch=2, max_wait_ms=1000)
    few, many = batcher.submit(files(1), ["pets"], 1), batcher.submit(files(2), ["pets"], 7)
    assert len(many[0].result(60).classes) == 7
    assert len(few[0].result(60).classes) == 7  # the answer to the client is cut where it is written
    assert len(fake.batches) == 1


def test_a_request_that_does_not_fit_into_the_queue_is_refused_whole(started, fake):
    batcher = started(images=3, queue_images=4, max_batch=1)
    fake.gate.clear()
    running = batcher.submit(files(1), ["pets"], 1)
    until(lambda: fake.batches)
    waiting = batcher.submit(files(2, 3, 4), ["pets"] * 3, 1)
    with pytest.raises(Refusal, match="3 images are waiting, and the queue takes 4") as refused:
        batcher.submit(files(5, 6), ["pets"] * 2, 1)
    assert (refused.value.status, refused.value.retry_after) == (429, 1)
    last = batcher.submit(files(7), ["pets"], 1)
    with pytest.raises(Refusal):
        batcher.check_room()
    fake.gate.set()
    assert best([*running, *waiting, *last]) == ["1-0", "2-0", "3-0", "4-0", "7-0"]
    until(lambda: batcher.waiting == 0)
    batcher.check_room(4)


def test_only_the_unreadable_image_fails_and_gives_its_place_back(started, fake):
    batcher = started()
    good, bad, worse = batcher.submit([("a", b"\x05"), ("b.jpg", b"bad"), ("c.jpg", b"worse")], ["pets"] * 3, 1)
    assert best([good]) == ["5-0"]
    with pytest.raises(Refusal, match=r"^cannot read the image b\.jpg: no$") as refused:
        bad.result(60)
    assert (refused.value.status, refused.value.image) == (422, "b.jpg")
    # What a decoder says that was not meant for people stays here.
    with pytest.raises(Refusal, match=r"^cannot read the image c\.jpg: ZeroDivisionError$"):
        worse.result(60)
    until(lambda: batcher.waiting == 0)


@pytest.mark.parametrize(
    ("error", "reason", "healthy"),
    [
        (ConfituneError("/srv/model/x is damaged"), "task 'pets' cannot be used; the server's log says why", True),
        (RuntimeError("CUDA out of memory at 0x7f00"), "the prediction failed; the server's log says why", False),
    ],
)
def test_a_failed_batch_fails_its_images_and_no_others(started, fake, error, reason, healthy):
    fake.tasks = {"pets": None}
    batcher = started(max_batch=2)
    fake.fails = error
    for answer in batcher.submit(files(1, 2), ["pets"] * 2, 1):
        with pytest.raises(Refusal) as refused:
            answer.result(60)
        assert (refused.value.status, refused.value.detail) == (500, reason)
    until(lambda: batcher.healthy == healthy)
    fake.fails = None
    assert best(batcher.submit(files(3), ["pets"], 1)) == ["3-0"]
    until(lambda: batcher.healthy)


def test_a_task_that_fails_or_is_gone_fails_alone(started, fake):
    fake.tasks = {"pets": None, "broken": None}
    real = fake.predict

    def predict(pixels, tasks, top):
        if {"broken", "removed"} & set(tasks):
            raise ConfituneError("/srv/model/tasks/1.safetensors is damaged")
        return real(pixels, tasks, top)

    fake.predict = predict
    batcher = started(max_batch=4, max_wait_ms=1000)
    answers = batcher.submit(files(1, 2, 3, 4), ["pets", "broken", "removed", None], 1)
    assert best([answers[0], answers[3]]) == ["1-0", "4-0"]
    for answer, error in ((answers[1], "unreadable-task"), (answers[2], "unknown-task")):
        with pytest.raises(Refusal) as refused:
            answer.result(60)
        assert refused.value.error == error
        assert "/srv" not in refused.value.detail


def test_too_few_predictions_fail_the_batch_rather_than_go_to_the_wrong_image(started, fake):
    fake.tasks = {"pets": None}
    batcher = started()
    fake.predict = lambda pixels, tasks, top: []
    with pytest.raises(Refusal, match="the prediction failed; the server's log"):
        batcher.submit(files(1), ["pets"], 1)[0].result(60)


def test_images_nobody_waits_for_are_neither_decoded_nor_predicted(started, fake):
    batcher = started(max_batch=1, decoders=1)
    fake.gate.clear()
    running = batcher.submit(files(1), ["pets"], 1)
    until(lambda: fake.batches)
    given_up = batcher.submit(files(*range(2, 30)), ["pets"] * 28, 1)
    assert all(answer.cancel() for answer in given_up)
    fake.gate.set()
    assert best(running) == ["1-0"]
    assert best(batcher.submit(files(40), ["pets"], 1)) == ["40-0"]
    assert fake.batches == [[(1, "pets")], [(40, "pets")]]
    assert len(fake.decoded) < 28
    assert batcher.waiting == 0


def test_many_threads_at_once_get_their_own_answers(started, fake):
    batcher = started(max_batch=7, max_wait_ms=1, queue_images=4000, images=8)
    wrong = []

    def client(seed):
        numbers = [(seed * 31 + step) % 256 for step in range(40)]
        for at in range(0, 40, 8):
            chunk = numbers[at : at + 8]
            if best(batcher.submit(files(*chunk), [str(seed)] * 8, 1)) != [f"{number}-0" for number in chunk]:
                wrong.append(seed)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert sum(map(len, fake.batches)) == 480
    assert max(map(len, fake.batches)) == 7
    assert batcher.waiting == 0


def test_no_wait_at_all_is_a_limit(started):
    assert best(started(max_wait_ms=0).submit(files(3), ["pets"], 1)) == ["3-0"]


def png(width, height):
    out = io.BytesIO()
    Image.new("1", (width, height)).save(out, "PNG")
    return out.getvalue()


def test_the_pixels_of_a_request_are_counted_before_they_are_decoded(started, fake):
    batcher = started(pixels=1_000_000, decoders=1)
    answers = batcher.submit([(str(n), png(600, 600)) for n in range(5)], ["pets"] * 5, 1)
    found = [answer.exception(60) for answer in answers]
    assert [error is None for error in found] == [True, True, False, False, False]
    assert {(error.status, error.error) for error in found[2:]} == {(413, "too-many-pixels")}
    assert fake.decoded == ["0", "1"]
    assert batcher.waiting == 0
    assert best(batcher.submit(files(7), ["pets"], 1)) == ["7-0"]


def test_a_request_of_many_images_does_not_hold_up_another(started, fake):
    batcher, first, go_on = started(decoders=1), threading.Event(), threading.Event()
    real = fake.decode

    def decode(data, name):
        first.set()
        assert go_on.wait(60)
        return real(data, name)

    fake.decode = decode
    many = batcher.submit(files(*range(1, 30)), ["pets"] * 29, 1)
    assert first.wait(60)
    few = batcher.submit([("other", b"x")], ["pets"], 1)
    go_on.set()
    assert best(few)
    assert best(many)
    assert fake.decoded.index("other") <= 2
