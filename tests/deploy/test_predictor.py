"""Answers from a bundle: classes, guessed tasks, any kind of image file."""

import hashlib
import io
import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from confitune.deploy import Bundle, BundleError, Predictor, changing, check_tasks
from confitune.deploy.bundle.format import StoredFile
from confitune.deploy.bundle.store import Store
from confitune.deploy.predictor import image_files, predict_files
from confitune.errors import DataError, DataMissingError, UnreadableImageError
from confitune.methods import METHODS
from deploy.shared import checked, damage_task, edited, guess, settling

TASKS = ("reds", "stripes", "greens", "checks", "blues", "yellows")


@pytest.fixture(scope="module")
def predictor(taught_once):
    return Predictor.from_bundle(taught_once[6], device="cpu")


def as_file(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def pixels(predictor, pictures):
    """By task eight new pictures, decoded."""
    return {task: torch.stack([predictor.decode(as_file(image)) for image in pictures(task)]) for task in TASKS}


def close(first, second):
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(first, second, strict=True)
    )


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_a_mixed_batch_equals_one_task_at_a_time(predictor, pixels):
    tasks = [TASKS[n % 6] for n in (0, 3, 1, 1, 5, 2, 4, 0, 3)]
    batch = torch.cat([pixels[task][n % 8 : n % 8 + 1] for n, task in enumerate(tasks)])
    mixed = predictor.logits(batch, tasks)
    assert [len(row) for row in mixed] == [3 if task == "stripes" else 2 for task in tasks]
    alone = [predictor.logits(batch[n : n + 1], [task])[0] for n, task in enumerate(tasks)]
    assert close(mixed, alone)
    swapped = predictor.logits(batch, tasks[::-1])
    assert not close(swapped[:1], mixed[:1])


def test_logits_are_the_networks_own(predictor, pixels, taught_once):
    bundle = Bundle.open(taught_once[6])
    net = bundle.load_network(["greens"]).eval()
    with torch.no_grad():
        expected = net(predictor.preprocess(pixels["greens"]), "greens")
    assert close(predictor.logits(pixels["greens"], ["greens"] * 8), list(expected))


def test_probabilities_are_sorted_and_sum_to_one(predictor, pixels):
    answers = predictor.predict(pixels["stripes"], ["stripes"] * 8, top=3)
    logits = predictor.logits(pixels["stripes"], ["stripes"] * 8)
    for answer, row in zip(answers, logits, strict=True):
        assert (answer.task, answer.task_confidence) == ("stripes", None)
        names, shares = zip(*answer.classes, strict=True)
        assert sorted(names) == ["stripes 0", "stripes 1", "stripes 2"]
        assert list(shares) == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert names[0] == f"stripes {int(row.argmax())}"
        assert shares[0] == pytest.approx(float(row.softmax(0).max()), abs=1e-6)


def test_tasks_are_answered_rightly(predictor, pixels):
    labels = [f"greens {n % 2}" for n in range(8)]
    answers = predictor.predict(pixels["greens"], ["greens"] * 8)
    right = sum(answer.classes[0][0] == label for answer, label in zip(answers, labels, strict=True))
    assert right >= 7


@pytest.mark.parametrize(("top", "count"), [(1, 1), (2, 2), (3, 3), (1000, 3), (0, 1), (-4, 1)])
def test_top_is_clipped(predictor, pixels, top, count):
    (answer,) = predictor.predict(pixels["stripes"][:1], ["stripes"], top=top)
    assert len(answer.classes) == count


def test_an_unknown_task_is_named_along_with_those_there_are(predictor, pixels):
    message = "no task 'birds'; it has 'reds', 'stripes', 'greens', 'checks', 'blues', 'yellows'"
    with pytest.raises(BundleError, match=message):
        predictor.predict(pixels["reds"][:2], ["reds", "birds"])
    with pytest.raises(BundleError, match=message):
        predictor.logits(pixels["reds"][:1], ["birds"])
    with pytest.raises(BundleError, match=message):
        predictor.network_for("birds")


def test_every_image_needs_a_task(predictor, pixels):
    with pytest.raises(DataError, match="8 images and 3 tasks: give one task for each image"):
        predictor.logits(pixels["reds"], ["reds"] * 3)
    with pytest.raises(DataError, match="8 images and 3 tasks: give one task for each image, or None"):
        predictor.predict(pixels["reds"], [None] * 3)


def test_no_images_no_answers(predictor, pixels):
    assert predictor.predict(pixels["reds"][:0], []) == []


def test_what_is_known_of_tasks(predictor, taught_once):
    bundle = Bundle.open(taught_once[6])
    assert list(predictor.tasks) == list(TASKS)
    stripes = predictor.tasks["stripes"]
    assert stripes.classes == ("stripes 0", "stripes 1", "stripes 2")
    assert (stripes.newest_accuracy, stripes.images) == (bundle.record("stripes").checked, 24)
    assert stripes.learned == bundle.record("stripes").learned
    assert predictor.name == "6"


# ---- few tasks in memory ---------------------------------------------------------------------------------------------


def test_two_ready_tasks_answer_like_all(predictor, pixels, taught_once):
    few = Predictor.from_bundle(taught_once[6], device="cpu", ready=2)
    order = [0, 3, 1, 1, 5, 2, 4, 0, 3, 2]
    for tasks in (
        [TASKS[n] for n in order],  # all six at once
        ["reds"],
        ["checks", "reds"],
        ["blues", "reds", "blues"],
        ["stripes", "greens", "yellows"],
        ["yellows"] * 3,
    ):
        batch = torch.cat([pixels[task][n % 8 : n % 8 + 1] for n, task in enumerate(tasks)])
        assert close(few.logits(batch, tasks), predictor.logits(batch, tasks))
        assert 1 <= len(few._tasks.net.tasks) <= 2
        assert set(few._tasks.net.tasks) == set(few._tasks._heads)
    images = torch.cat([pixels[task][:2] for task in TASKS])
    assert guess(few, images) == guess(predictor, images)
    assert len(few._tasks.net.tasks) == 2
    given = [*["reds", "stripes", "greens"] * 3, None, None, None]
    found, expected = few.predict(images, given), predictor.predict(images, given)
    assert [answer.task for answer in found] == [answer.task for answer in expected]
    assert [answer.classes[0][0] for answer in found if answer.classes] == [
        answer.classes[0][0] for answer in expected if answer.classes
    ]
    assert len(few._tasks.net.tasks) == 2


def test_at_least_one_task_is_ready(taught_once, pixels, predictor):
    with pytest.raises(BundleError, match="at least one task must be kept ready, got 0"):
        Predictor.from_bundle(taught_once[6], ready=0)
    one = Predictor.from_bundle(taught_once[6], device="cpu", ready=1)
    tasks = ["reds", "stripes", "reds"]
    assert close(one.logits(pixels["reds"][:3], tasks), predictor.logits(pixels["reds"][:3], tasks))
    assert len(one._tasks.net.tasks) == 1


def test_a_damaged_task_does_not_keep_others_from_answering(taught, pixels):
    path = taught(2)
    bundle = Bundle.open(path)
    file = path / "tasks" / f"{bundle.record('reds').file.sha256}.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    predictor = Predictor(bundle, device="cpu")
    assert predictor.predict(pixels["stripes"][:1], ["stripes"])[0].task == "stripes"
    with pytest.raises(BundleError, match="is damaged"):
        predictor.predict(pixels["reds"][:1], ["reds"])
    assert predictor.predict(pixels["stripes"][:1], ["stripes"])[0].task == "stripes"


# ---- guessing the task -----------------------------------------------------------------------------------------------


def test_tasks_that_look_different_are_told_apart(taught_once, pixels):
    predictor = Predictor(Bundle.open(taught_once[6]), device="cpu", unknown=False)
    guessed = {task: guess(predictor, pixels[task]) for task in TASKS}
    right = sum(found == task for task in TASKS for found, _ in guessed[task])
    assert right >= 36  # of 48; by chance 8
    assert all(1 / 6 <= share <= 1 for task in TASKS for _, share in guessed[task])


def test_images_far_from_all_tasks_are_of_none(taught_once, pixels):
    bundle = Bundle.open(taught_once[6])
    chance = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (8, 3, 224, 224), dtype=torch.uint8, generator=chance)
    usual = Predictor(bundle, device="cpu")
    assert [found for found, _ in guess(usual, noise)] == [None] * 8
    assert sum(found is None for task in TASKS for found, _ in guess(usual, pixels[task])) < 16  # of 48
    (answer,) = usual.predict(noise[:1], [None])
    assert answer.task is None
    assert answer.classes  # what it looks like most
    assert 0 <= answer.task_confidence <= 1
    always = Predictor(bundle, device="cpu", unknown=False)
    assert None not in [found for found, _ in guess(always, noise)]


def test_a_guess_gives_probabilities_of_all_classes_of_all_tasks(taught_once, pixels):
    predictor = Predictor(Bundle.open(taught_once[6]), device="cpu", unknown=False)
    for answer in predictor.predict(pixels["greens"], [None] * 8, top=1000):
        own, others = dict(answer.classes), {(task, name): share for task, name, share in answer.others}
        assert len(own) + len(others) == 13
        assert {task for task, _ in others} == set(TASKS) - {answer.task}
        assert sum(own.values()) == pytest.approx(answer.task_confidence, abs=1e-5)
        assert sum(own.values()) + sum(others.values()) == pytest.approx(1, abs=1e-5)
        assert answer.classes[0][1] >= max(others.values())


def test_the_leading_task_shares_out_its_probability(taught_once, pixels):
    predictor = Predictor(Bundle.open(taught_once[6]), device="cpu", unknown=False)
    guessed = predictor.predict(pixels["greens"], [None] * 8)
    assert sum(answer.task == "greens" for answer in guessed) >= 6
    given = predictor.predict(pixels["greens"], ["greens"] * 8)
    space, features = predictor._space, predictor._tasks.features(predictor.preprocess(pixels["greens"]))
    first = space.probabilities(features)[:, [name == "greens" for name, _ in predictor._classes]]
    for alone, among_all, shares in zip(given, guessed, first, strict=True):
        if among_all.task == "greens":
            own = dict(alone.classes)
            both = torch.tensor([own[name] for name in predictor.tasks["greens"].classes]).double() * shares
            both = among_all.task_confidence * both.sqrt() / both.sqrt().sum()
            expected = dict(zip(predictor.tasks["greens"].classes, both.tolist(), strict=True))
            assert dict(among_all.classes) == pytest.approx(expected, abs=1e-5)


def test_a_guess_takes_two_passes_however_many_tasks_there_are(taught_once, pixels, monkeypatch):
    predictor = Predictor(Bundle.open(taught_once[6]), device="cpu", unknown=False)
    clear = [n for n, (task, share) in enumerate(guess(predictor, pixels["reds"])) if task == "reds" and share > 0.9]
    assert clear
    asked = []
    logits = predictor._tasks.logits
    monkeypatch.setattr(
        predictor._tasks,
        "logits",
        lambda images, tasks, *known: asked.append((len(images), *set(tasks))) or logits(images, tasks, *known),
    )
    predictor.predict(pixels["reds"][clear], [None] * len(clear))
    assert asked == [(len(clear), "reds")]


def test_tasks_that_own_only_a_head_need_no_second_pass(teach, tmp_path, pixels, monkeypatch):
    """Nor a network of their own, whether they are guessed or given."""
    for task in ("reds", "greens"):
        monkeypatch.setattr(METHODS["best"], "settle", settling(only_head=True))
        teach(task, tmp_path / "model", method="best")
    predictor = Predictor.from_bundle(tmp_path / "model", device="cpu", unknown=False)
    x = predictor.preprocess(pixels["greens"])
    with torch.no_grad():
        expected = {task: predictor.network_for(task).eval()(x) for task in predictor.tasks}
    passes = []
    predictor._tasks.net.backbone.register_forward_pre_hook(lambda *_: passes.append("network"))
    answers = predictor.predict(pixels["greens"], [None] * 8)
    assert passes == ["network"]
    assert sum(answer.task == "greens" for answer in answers) >= 6
    for _ in range(3):
        for task, logits in expected.items():
            found = torch.stack(predictor.logits(pixels["greens"], [task] * 8))
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)
    assert len(predictor._tasks._runners._made) == 1


def test_guessed_and_given_tasks_in_one_batch(predictor, pixels):
    batch = torch.cat([pixels["reds"][:1], pixels["greens"][:1], pixels["stripes"][:1]])
    answers = predictor.predict(batch, ["blues", None, "stripes"])
    assert (answers[0].task, answers[0].task_confidence) == ("blues", None)
    ((task, confidence),) = guess(predictor, batch[1:2])
    assert answers[1].task == task
    assert answers[1].task_confidence == pytest.approx(confidence, abs=1e-5)
    (alone,) = predictor.predict(batch[2:], ["stripes"])
    assert dict(answers[2].classes) == pytest.approx(dict(alone.classes), abs=1e-5)


def test_check_tasks_counts_what_the_held_out_images_give(taught_once):
    bundle = Bundle.open(taught_once[3])
    checks = check_tasks(bundle, "cpu")
    assert checks.accuracy == pytest.approx(checked(bundle.path))
    assert 100 / 3 < checks.guessed <= 100
    assert checks.unknown >= 0
    assert checks.guessed + checks.unknown < 100.001


# ---- decoding --------------------------------------------------------------------------------------------------------


def colour(pixels, top=112, left=112):
    assert pixels.shape == (3, 224, 224)
    assert pixels.dtype == torch.uint8
    return tuple(pixels[:, top, left].tolist())


def test_plain_files_by_path_and_bytes(predictor, tmp_path):
    picture = Image.new("RGB", (300, 200), (10, 20, 30))
    picture.save(tmp_path / "a.png")
    assert colour(predictor.decode(tmp_path / "a.png")) == (10, 20, 30)
    assert torch.equal(predictor.decode((tmp_path / "a.png").read_bytes()), predictor.decode(tmp_path / "a.png"))


def test_turned_photographs_are_set_upright(predictor):
    picture = Image.new("RGB", (320, 320), "red")
    picture.paste((0, 0, 255), (0, 0, 160, 320))  # blue on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees: left becomes top
    upright = predictor.decode(as_file(picture, "JPEG", exif=exif, quality=95))
    assert colour(upright, top=30)[2] > 200
    assert colour(upright, top=190)[0] > 200


def test_grey_and_sixteen_bits(predictor):
    assert colour(predictor.decode(as_file(Image.new("L", (300, 300), 77)))) == (77, 77, 77)
    deep = Image.fromarray(np.full((300, 300), 32896, dtype=np.uint16))
    for kind in ("PNG", "TIFF"):
        assert colour(predictor.decode(as_file(deep, kind))) == (128, 128, 128)


def test_transparency_is_laid_on_white(predictor):
    assert colour(predictor.decode(as_file(Image.new("RGBA", (300, 300), (255, 0, 0, 51))))) == (255, 204, 204)
    palette = Image.new("P", (300, 300))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.paste(1, (150, 0, 300, 300))
    found = predictor.decode(as_file(palette, transparency=1))
    assert colour(found, left=30) == (10, 20, 30)
    assert colour(found, left=190) == (255, 255, 255)


def test_print_colours(predictor):
    red, green, blue = colour(predictor.decode(as_file(Image.new("CMYK", (300, 300), (0, 255, 255, 0)), "JPEG")))
    assert red > 250
    assert max(green, blue) < 5


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_the_first_frame_of_an_animation(predictor, kind):
    frames = [Image.new("RGB", (300, 300), name) for name in ("red", "blue", "lime")]
    data = as_file(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, lossless=True)
    assert colour(predictor.decode(data)) == (255, 0, 0)


def header(width, height):
    """A PNG that claims to be so large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is no image"),
        (b"not an image", "it is no image"),
        (b"\xff\xd8\xff\xe0 half a jpeg", ""),
        (as_file(Image.new("RGB", (64, 64), "red"))[:-40], ""),
        (header(100_000, 100_000), "pixels"),
        (header(8000, 8000), "8000 x 8000 pixels, more than 50 million"),
        (header(1, 2_000_000_000), "pixels"),
        (as_file(Image.new("RGB", (1, 20_000))), "too thin: 1 x 20000 pixels"),
        (as_file(Image.new("RGB", (20_000, 2))), "too thin: 20000 x 2 pixels"),
        (as_file(Image.fromarray(np.ones((20, 20), dtype=np.float32)), "TIFF"), "which of them is white"),
    ],
    ids=["empty", "text", "half a jpeg", "cut", "huge", "large", "endless", "thin", "flat", "floats"],
)
def test_what_cannot_be_decoded_is_named(predictor, tmp_path, data, why):
    with pytest.raises(UnreadableImageError, match=rf"my cat\.jpg.*{why}"):
        predictor.decode(data, "my cat.jpg")
    (tmp_path / "cat.jpg").write_bytes(data)
    with pytest.raises(UnreadableImageError, match=rf"cat\.jpg.*{why}"):
        predictor.decode(tmp_path / "cat.jpg")


@pytest.mark.parametrize("size", [(1, 1), (1, 100), (5000, 50), (7, 13)])
def test_small_and_long_images_are_answered(predictor, size):
    assert colour(predictor.decode(as_file(Image.new("RGB", size, (9, 8, 7))))) == (9, 8, 7)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, pictures):
    """A folder with pictures of three tasks, one below it, and files that are none."""
    for name, task in (("b.png", "reds"), ("a.PNG", "greens"), ("below/c.png", "blues")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pictures(task)[0].save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / ".hidden.png").write_bytes(b"none")
    return tmp_path


def test_files_folders_and_patterns(folder):
    def names(*given):
        return [path.relative_to(folder).as_posix() for path in image_files([str(folder / text) for text in given])]

    assert names("b.png", "a.PNG") == ["b.png", "a.PNG"]
    assert names("") == ["a.PNG", "b.png", "below/c.png"]
    assert names("*.png") == ["b.png"]
    assert names("**/*.png") == ["b.png", "below/c.png"]
    assert names("b.png", "", "b.png") == ["b.png", "a.PNG", "below/c.png"]
    (folder / "odd [1].png").write_bytes(b"")
    assert names("odd [1].png") == ["odd [1].png"]
    assert names("notes.txt") == ["notes.txt"]  # who names a file wants to hear what is wrong with it


@pytest.mark.parametrize(
    ("given", "message"),
    [("none.png", "there is no image"), ("bel*", "there is no image"), ("empty", "holds no images")],
)
def test_nothing_to_answer_is_said(folder, given, message):
    (folder / "empty").mkdir()
    with pytest.raises(DataMissingError, match=message):
        image_files([str(folder / given)])


def test_answers_come_in_order_with_the_errors_between(predictor, folder, pictures):
    files = []
    for n, picture in enumerate(pictures("stripes", 70)):  # more than two batches
        files.append(folder / f"s{n:02}.png")
        picture.save(files[-1])
    for broken in (0, 33, 69):
        files[broken].write_bytes(b"broken")
    answered = list(predict_files(predictor, files, "stripes", 1))
    assert [file for file, _ in answered] == files
    for n, (file, answer) in enumerate(answered):
        if n in (0, 33, 69):
            assert isinstance(answer, UnreadableImageError)
            assert str(file) in str(answer)
        else:
            (expected,) = predictor.predict(predictor.decode(file)[None], ["stripes"], top=1)
            assert answer.classes[0][0] == expected.classes[0][0]
            assert answer.classes[0][1] == pytest.approx(expected.classes[0][1], abs=1e-5)


def test_only_broken_files(predictor, folder):
    ((file, answer),) = predict_files(predictor, [folder / "notes.txt"], None, 5)
    assert file.name == "notes.txt"
    assert "notes.txt" in str(answer)


def test_reading_a_bundle_changes_nothing_in_it(taught, pixels):
    path = taught(3)

    def state():
        return {
            file: (hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns)
            for file in path.rglob("*")
            if file.is_file()
        }

    before = state()
    Predictor.from_bundle(path, device="cpu", ready=1).predict(pixels["reds"], [None] * 8)
    check_tasks(Bundle.open(path), "cpu")
    assert state() == before


def test_threads_that_ask_at_once_get_their_own_answers(taught_once):
    predictor = Predictor.from_bundle(taught_once[4], device="cpu", ready=2)
    tasks = list(predictor.tasks)
    images = torch.randint(0, 256, (8, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))

    def ask(n):
        return n, predictor.predict(images[n % 8][None], [tasks[n % 4]])[0]

    alone = [ask(n)[1] for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for n, found in pool.map(ask, range(80)):
            assert found.task == alone[n % 8].task
            assert dict(found.classes) == pytest.approx(dict(alone[n % 8].classes), abs=1e-5)


def test_a_task_whose_finite_weights_overflow_harms_no_other(taught, pixels):
    path = taught(2)
    bundle = Bundle.open(path)
    state = dict(bundle.task_state("stripes"))
    state["head.weight"] = torch.full_like(state["head.weight"], 3e38)
    with changing(bundle) as change:
        stored = change.store_task(state, bundle.record("stripes").classes)
        change.add_task("hostile", bundle.record("stripes").model_copy(update={"file": stored}))
    predictor = Predictor.from_bundle(path, device="cpu", unknown=False)
    for found in predictor.predict(pixels["reds"], [None] * 8):
        assert found.task == "reds"
        assert 0 <= found.task_confidence <= 1
    with pytest.raises(BundleError, match="'hostile' gives NaN or infinite outputs"):
        predictor.predict(pixels["reds"], ["hostile"] * 8)


def test_sums_that_give_no_probabilities_are_refused(taught, pixels):
    path = taught(2)
    files, said = Store(path), json.loads((path / "bundle.json").read_bytes())
    with files.read(StoredFile(**said["sums"])) as state:
        forged = files.store("features", {**state, "chosen": torch.zeros(3)})
    edited(path / "bundle.json", sums=forged.model_dump())
    predictor = Predictor.from_bundle(path, device="cpu")
    with pytest.raises(BundleError, match=r"sums of features .* name the task"):
        predictor.predict(pixels["reds"], [None] * 8)
    assert predictor.predict(pixels["reds"], ["reds"] * 8)


def test_pre_trained_features_answer_for_a_damaged_task(taught, pixels):
    path = taught(2)
    damage_task(path, "stripes")
    predictor = Predictor.from_bundle(path, device="cpu", unknown=False)
    assert [found.task for found in predictor.predict(pixels["reds"], [None] * 8)] == ["reds"] * 8
    found = predictor.predict(pixels["stripes"], [None] * 8)
    assert [answer.task for answer in found].count("stripes") >= 6
    assert predictor.unreadable == {"stripes"}
    damage_task(path, "stripes")  # the same bit again: it is restored
    predictor.predict(pixels["stripes"], [None] * 8)
    assert predictor.unreadable == set()
