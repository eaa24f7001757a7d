"""The server's page in a browser: an image goes in, what is in it comes out, and errors are explained in words."""

import base64
import io
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from PIL import Image

from confitune.deploy import Prediction
from confitune.deploy.server import Limits
from confitune.tasks.decode import open_rgb
from deploy.server.running import running_server
from deploy.shared import FakePredictor, known, until

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (its own browsers are not needed)")
httpx = pytest.importorskip("httpx", reason="pip install httpx")
pytest.importorskip("fastapi", reason="pip install 'confitune[serve]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt install chromium")

EVIL = "<img src=x onerror=window.hacked=1>"
LONG = "a bird with a name that is longer than a telephone is wide"


class Colours(FakePredictor):
    """Red, green and blue are classes; a guess is 'pets', unless the image is black."""

    name = "my model"
    tasks = {  # noqa: RUF012
        "pets": known(("cat", EVIL, "fish"), 93.46, 6400, "2026-05-01T10:00:00"),
        "birds": known(("robin", LONG, "wren"), None, 12, "2026-05-02"),
    }

    def __init__(self):
        self.asked, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def decode(self, data, name="image"):
        return torch.from_numpy(np.array(open_rgb(io.BytesIO(data), name=name).resize((4, 4)))).permute(2, 0, 1)

    def predict(self, pixels, tasks, top=5):
        self.asked.set()
        assert self.gate.wait(120)
        return [self.answer(image.float().mean((1, 2)), task) for image, task in zip(pixels, tasks, strict=True)]

    def answer(self, channels, task):
        if task is None and channels.max() < 5:
            return Prediction(None, 0.5, (("cat", 0.25), ("dog", 0.05)), others=(("plants", "tree", 0.2),))
        share = channels / channels.sum().clamp_min(1)
        classes = self.tasks[task or "pets"].classes
        order = share.argsort(descending=True, stable=True).tolist()
        chosen = tuple((classes[n], float(share[n])) for n in order)
        return Prediction(task or "pets", None if task else 0.875, chosen)


def picture(colour, size=(60, 40)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def upload(name, data):
    return {"name": name, "mimeType": "image/png", "buffer": data}


BLUE = picture((0, 0, 200))
RED, BLACK = picture((180, 60, 0)), picture((0, 0, 0))  # red: 75 % the first class, 25 % the second


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address():
    with running_server(Colours(), limits=Limits(image_bytes=200_000)) as address:
        yield address


@pytest.fixture
def opened(browser, address):
    """Opens the page; afterwards the console was silent but for failed requests, and only the server was asked."""
    contexts, said, asked = [], [], set()

    def open_page(width=1280, scheme="light", at=address):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on(
            "request", lambda request: asked.add(request.url.split("/")[2 if request.url.startswith("http") else 0])
        )
        page.goto(at)
        page.wait_for_selector("#task-rows tr")
        return page

    yield open_page
    hacked = [page.evaluate("window.hacked") for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    # The browser itself reports every answer that is an error.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []
    assert all(host.startswith("127.0.0.1:") or host == "blob:http:" for host in asked)
    assert not any(hacked)


def give(page, event, *files):
    """Drops or pastes files as the browser would."""
    page.evaluate(
        """([kind, files]) => {
          const data = new DataTransfer();
          for (const [name, type, text] of files) {
            data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
          }
          const given = kind === "drop"
            ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
          document.getElementById("drop").dispatchEvent(given);
        }""",
        [event, [(name, "image/png", base64.b64encode(data).decode()) for name, data in files]],
    )


def classes(page):
    page.wait_for_selector(".classes li")
    return [tuple(row.locator("span").all_text_contents()) for row in page.locator(".classes li").all()]


def shown(page, text):
    sync_api.expect(page.locator("#result")).to_contain_text(text)


def test_drop_an_image_and_see_what_it_is_then_switch_the_task(opened, tmp_path):
    page = opened()
    shown(page, "What the model sees in the image appears here.")
    page.screenshot(path=tmp_path / "empty.png", full_page=True)
    give(page, "drop", ("red.png", RED))
    assert classes(page) == [("cat", "75.0 %"), (EVIL, "25.0 %"), ("fish", "0.0 %")]
    assert page.locator(".best").text_content() == "cat"
    assert page.locator(".by").text_content() == "Task pets, guessed with 87.5 % confidence"
    widths = [bar.bounding_box()["width"] for bar in page.locator(".track").all()]
    bars = [bar.bounding_box()["width"] for bar in page.locator(".bar").all()]
    assert [bar / width for bar, width in zip(bars, widths, strict=True)] == pytest.approx([0.75, 0.25, 0], abs=0.01)
    assert page.locator("#chosen").text_content().startswith("red.png, ")
    sync_api.expect(page.locator("#preview")).to_be_visible()
    assert page.locator("#preview").evaluate("image => image.naturalWidth") == 60
    milliseconds = page.locator(".took").text_content()
    assert milliseconds.endswith(" ms in all")
    assert "ms on the server" in milliseconds
    page.screenshot(path=tmp_path / "result.png", full_page=True)
    page.get_by_label("Task", exact=True).select_option("birds")
    shown(page, "Task birds, as you chose")
    assert classes(page)[0] == ("robin", "75.0 %")


def test_several_images_are_answered_one_by_one(opened):
    page = opened()
    give(page, "drop", ("red.png", RED), ("other.png", BLACK), ("broken.png", b"no image"), ("blue.png", BLUE))
    rows = page.locator(".photos li")
    sync_api.expect(rows.nth(3)).to_have_text("blue.png fish, 100.0 % (pets)")
    sync_api.expect(rows).to_have_count(4)
    assert rows.nth(0).text_content() == "red.png cat, 75.0 % (pets)"
    assert rows.nth(1).text_content() == "other.png Unknown"
    assert "annot read the image broken.png" in rows.nth(2).text_content()
    assert page.locator("#chosen").text_content().startswith("4 images, ")
    page.get_by_label("Task", exact=True).select_option("birds")
    sync_api.expect(rows.nth(0)).to_have_text("red.png robin, 75.0 % (birds)")


def test_the_api_is_described_without_asking_anyone_else(opened, address):
    page = opened()
    page.get_by_role("link", name="docs").click()
    page.wait_for_selector("h2")
    headings = page.locator("h2").all_text_contents()
    assert {"POST /v1/predict", "GET /v1/tasks", "GET /healthz"} <= set(headings)
    assert "true if the image looks like nothing that was learned" in page.locator("main").text_content()


def test_choose_and_paste(opened):
    page = opened()
    page.get_by_label("Choose an image").set_input_files(upload("red.png", RED))
    assert classes(page)[0] == ("cat", "75.0 %")
    give(page, "paste", ("image.png", picture((0, 0, 200))))
    shown(page, "fish")
    sync_api.expect(page.locator(".best")).to_have_text("fish")
    assert classes(page)[0] == ("fish", "100.0 %")
    page.get_by_label("Choose an image").set_input_files(upload("red.png", RED))
    sync_api.expect(page.locator(".best")).to_have_text("cat")


def test_an_image_of_no_task_is_unknown(opened):
    page = opened()
    page.locator("#file").set_input_files(upload("black.png", BLACK))
    shown(page, "Unknown")
    shown(page, "It looks like nothing that was learned. What comes nearest:")
    assert classes(page) == [("cat", "25.0 %"), ("tree (plants)", "20.0 %")]
    page.locator("#task").select_option("pets")
    shown(page, "as you chose")
    assert classes(page)[0] == ("cat", "0.0 %")


def test_the_tasks_are_listed(opened):
    page = opened()
    assert page.title() == "my model: confitune"
    assert page.locator("h1").text_content() == "my model"
    assert page.locator("#what").text_content() == "One network, 2 tasks, 6 classes"
    assert page.locator("#task option").all_text_contents() == ["guess it", "pets", "birds"]
    cells = [row.locator("th, summary, td.number").all_text_contents() for row in page.locator("#task-rows tr").all()]
    assert cells == [
        ["pets", "3 classes", "93.5 %", "6,400", "2026-05-01"],
        ["birds", "3 classes", "not measured", "12", "2026-05-02"],
    ]
    page.locator("summary").nth(0).press("Enter")
    assert page.locator("details p").nth(0).text_content() == f"cat, {EVIL}, fish"
    assert page.locator("details p").nth(0).is_visible()


def test_an_unreadable_image_is_explained(opened):
    page = opened()
    page.locator("#file").set_input_files(upload("red.png", RED))
    classes(page)
    page.locator("#file").set_input_files(upload("notes.png", b"not an image"))
    alert = page.get_by_role("alert")
    sync_api.expect(alert.locator("h2")).to_have_text("This image cannot be read")
    assert "Cannot read the image notes.png" in alert.locator("p").text_content()
    assert alert.get_by_role("button").count() == 0  # to try again would not help
    assert not page.locator("#preview").is_visible()
    page.locator("#file").set_input_files(upload("red.png", RED))
    assert classes(page)[0] == ("cat", "75.0 %")
    assert alert.count() == 0


def test_an_image_that_is_too_large_is_explained_without_sending_it(opened):
    page = opened()
    page.on("request", lambda request: pytest.fail(request.url) if "predict" in request.url else None)
    page.locator("#file").set_input_files(upload("large.png", RED + b"x" * 1_500_000))
    alert = page.get_by_role("alert")
    assert alert.locator("h2").text_content() == "This image is too large"
    assert (
        alert.locator("p").text_content() == "It has 1.5 MB, and the server takes up to 200 kB. Choose a smaller one."
    )


@pytest.mark.parametrize(
    ("status", "title"),
    [(413, "This image is too large"), (503, "The server is busy or being stopped"), (418, "The server said no (418)")],
)
def test_what_the_server_or_something_before_it_says_is_explained(opened, status, title):
    page = opened()
    page.route("**/v1/predict", lambda route: route.fulfill(status=status, body="<h1>no</h1>"))
    page.locator("#file").set_input_files(upload("red.png", RED))
    sync_api.expect(page.get_by_role("alert").locator("h2")).to_have_text(title)


def test_a_busy_server_and_one_that_is_gone_are_explained_and_can_be_asked_again(opened):
    colours = Colours()
    colours.gate.clear()
    with ThreadPoolExecutor(2) as pool, ExitStack() as server:
        limits = Limits(images=1, queue_images=1, max_batch=1, max_wait_ms=0)
        address = server.enter_context(running_server(colours, limits=limits))
        page = opened(at=address)
        server.callback(colours.gate.set)
        for _ in range(2):  # the first is in the network when the second comes, which waits in the queue
            pool.submit(httpx.post, f"{address}/v1/predict", files={"images": RED}, timeout=120)
            assert colours.asked.wait(60)
        until(lambda: httpx.get(f"{address}/healthz", timeout=60).json()["queue_images"] == 1)
        page.locator("#file").set_input_files(upload("red.png", RED))
        alert = page.get_by_role("alert")
        sync_api.expect(alert.locator("h2")).to_have_text("The server is busy")
        words = "1 images are waiting, and the queue takes 1: try again later. It may go better in 1 second."
        assert alert.locator("p").text_content() == words
        colours.gate.set()
        until(lambda: httpx.get(f"{address}/healthz", timeout=60).json()["queue_images"] == 0)
        alert.get_by_role("button", name="Try again").press("Enter")
        assert classes(page)[0] == ("cat", "75.0 %")
        server.close()
        page.locator("#task").select_option("birds")
        sync_api.expect(alert.locator("h2")).to_have_text("The server does not answer")
        assert "Is it still running" in alert.locator("p").text_content()


def test_only_the_last_choice_is_shown(opened):
    """An answer that comes late must not replace a later one."""
    page = opened()
    held = []
    page.route("**/v1/predict", lambda route: held.append(route))
    page.locator("#file").set_input_files(upload("red.png", RED))
    page.wait_for_function("document.getElementById('result').getAttribute('aria-busy') === 'true'")
    page.unroute("**/v1/predict")
    page.locator("#task").select_option("birds")
    shown(page, "Task birds, as you chose")
    sync_api.expect(page.locator("#result")).not_to_have_attribute("aria-busy", "true")
    assert page.get_by_role("alert").count() == 0


READABLE = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
    const v = c[i] / 255; return sum + share * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); }, 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgba(getComputedStyle(node).backgroundColor);
      if (c[3] === 255) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.tagName === 'OPTION') continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))];
    found.push([text.data.trim(), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_can_be_read_at_every_width_and_in_both_themes(opened, scheme, width, tmp_path):
    page = opened(width=width, scheme=scheme)
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[scheme]
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    page.locator("#task").select_option("birds")
    for name, data in (("red", RED), ("broken", b"no")):
        page.locator("#file").set_input_files(upload(f"{name}.png", data))
        page.wait_for_selector(".error" if name == "broken" else ".classes li")
        page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        found = page.evaluate(READABLE)
        assert len(found) > 15
        assert [entry for entry in found if entry[1] < 4.5] == []


def test_the_keyboard_reaches_everything_and_shows_where_it_is(opened):
    page = opened()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """(at => [at.id || at.tagName.toLowerCase(),
                getComputedStyle(at.closest('.drop') ?? at).outlineStyle])(document.activeElement)"""
            )
        )
    names = ["file", "task", "summary", "summary", "a", "a"]
    assert reached == [[name, "solid"] for name in names]
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, img, section')].filter(n => n.checkVisibility() &&
        !n.labels?.length && !n.getAttribute('aria-label') && !n.getAttribute('aria-labelledby') && !n.alt
        && !n.textContent.trim()).map(n => n.outerHTML)"""
    )
    assert unnamed == []
