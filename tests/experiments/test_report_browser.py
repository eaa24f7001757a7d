"""The report's page in a browser: what is drawn, what moves, and that nothing is asked of the network."""

import math
import shutil

import numpy as np
import pytest

from confitune.engine import RunResult
from confitune.engine.result import summary_of
from confitune.experiments import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (its own browsers are not needed)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; on Debian: apt install chromium")

NAN = math.nan
EVIL = "<!--<script><img src=x onerror=window.hacked=1>"
LONG = "a-method-whose-name-goes-on-for-longer-than-any-telephone-is-wide"


def result(dataset, method, seed, matrix, stored=1000):
    tasks = [
        {
            "name": f"t{i}",
            "classes": ["</script><img src=x onerror=window.hacked=1>"],
            "train_images": 7,
            "test_images": 2,
            "norm_numbers": stored,
            "head_numbers": 34,
        }
        for i in range(1 if method == "joint" else len(matrix))
    ]
    return RunResult(
        dataset=dataset,
        method=method,
        seed=seed,
        **summary_of(np.array(matrix, dtype=float)),
        tasks=tasks,
        config={"model": "net", "seed": seed, "dataset": "folder:" + "very-long-" * 20},
        versions={"torch": "2"},
        device="cpu",
        weights="w",
        weights_sha256="ab" * 32,
        final_sha256="cd" * 32,
        seconds=30.0 - seed,
        images_per_second=1.0,
        command="confitune run " + "--option value " * 30,
    )


def confit(seed):
    return ((90.0 + seed, 88.0, 85.25 - seed), (NAN, 95.0, 94.0 + seed), (NAN, NAN, 97.0))


FINETUNE = ((92.0, 70.0, 60.0), (NAN, 96.0, 71.5), (NAN, NAN, 98.0))
JOINT = ((NAN, NAN, 99.0), (NAN, NAN, 98.0), (NAN, NAN, 97.0))
TWENTY = np.where(np.tri(20, dtype=bool).T, 99.0 - 5 * np.arange(20)[:, None], NAN)
RESULTS = [
    *(result("digits", "confit", seed, confit(seed)) for seed in range(3)),
    result("digits", "finetune", 0, FINETUNE),
    result("digits", "joint", 0, JOINT),
    result("digits", EVIL, 0, FINETUNE, stored=10**7),
    result("many", "confit", 0, TWENTY),
    result("many", LONG, 0, TWENTY),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    for r in RESULTS:
        folder = out / r.dataset / r.method / f"seed-{r.seed}"
        folder.mkdir(parents=True)
        r.save(folder / "result.json")
    return write_report(out)[0].as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, address):
    """Opens the page; afterwards nothing was said on the console, and nothing was asked for but the page."""
    contexts, said, asked = [], [], []

    def open_page(width=1280, scheme="light", script=None):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        if script:
            page.add_init_script(script)
        page.goto(address)
        return page

    yield open_page
    hacked = [page.evaluate("window.hacked") for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} == {address}
    assert not any(hacked)


def digits(page):
    return page.locator("section.dataset").nth(0)


def cells(page, panel):
    """Shown cells of a heatmap: (task, after) -> text."""
    found = digits(page).locator(".heatmaps figure").nth(panel).locator(".cell")
    read = "nodes => nodes.map(n => [+n.dataset.task, +n.dataset.after, n.querySelector('text').textContent])"
    return {(task, after): text for task, after, text in found.evaluate_all(read)}


def names(page, place):
    return [text.strip() for text in digits(page).locator(place).all_text_contents()]


# Methods stand in the order of their accuracy.
ORDER = ["joint", "confit", EVIL, "finetune"]
CONFIT_MEAN = {(1, 1): "91.0", (1, 2): "88.0", (1, 3): "84.2", (2, 2): "95.0", (2, 3): "95.0", (3, 3): "97.0"}


def test_every_picture_is_drawn(opened):
    page = opened()
    section = digits(page)
    assert names(page, ".legend button") == ORDER
    assert section.locator(".curves .series").count() == 4
    assert section.locator(".curves .line").count() == 4
    assert section.locator(".curves .band").count() == 1  # the others have one seed
    assert [section.locator(f".curves [data-index='{i}'] .marker").count() for i in range(4)] == [1, 3, 3, 3]
    assert section.locator(".lost figure").count() == 4
    assert section.locator(".lost .kept").count() == 12
    assert section.locator(".lost .learned").count() == 3 * 3 + 1  # joint learned only the last one last
    assert [len(cells(page, panel)) for panel in range(4)] == [3, 6, 6, 6]
    assert section.locator(".storage .bar").count() == 4
    assert names(page, ".storage .number") == ["1,034", "3,102", "30,000,102", "3,102"]
    for svg in page.locator("main svg:visible").all():
        box = svg.bounding_box()
        assert box["width"] > 10
        assert box["height"] > 5
        assert svg.locator("*").count() > 0
    assert page.locator("section.dataset").nth(1).locator(".heatmaps figure").nth(0).locator(".cell").count() == 210


def test_lines_run_through_the_measured_values(opened):
    page = opened()
    levels = digits(page).locator(".curves .grid text[text-anchor=end]")
    scale = levels.evaluate_all("nodes => nodes.map(n => [+n.textContent, +n.getAttribute('y')])")
    values, heights = np.array(scale).T
    slope, start = np.polyfit(heights, values, 1)
    points = digits(page).locator(".curves [data-index='1'] .line").get_attribute("points").split()
    drawn = [start + slope * float(point.split(",")[1]) for point in points]
    assert drawn == pytest.approx([91.0, 91.5, (84.25 + 95 + 97) / 3], abs=1e-3)
    titles = digits(page).locator(".curves [data-index='1'] .marker title").all_text_contents()
    assert titles[1] == "confit, after task 2: 91.5 ± 0.0"


def test_bars_are_as_long_as_what_they_show_on_the_scale_that_is_named(opened):
    page = opened()
    note = digits(page).locator(".storage-scale").text_content()
    assert note == "The scale is logarithmic: a bar starts at 1,000, and tenfold is always as long."
    widths = [float(bar.get_attribute("width")) for bar in digits(page).locator(".storage .bar").all()]
    shares = [math.log10(count / 1000) for count in (1034, 3102, 30_000_102, 3102)]
    assert widths == pytest.approx([max(0.4, 100 * share / shares[2]) for share in shares])


def test_the_legend_hides_and_shows_methods(opened):
    page = opened()
    button = digits(page).locator(".legend button").nth(1)
    series = digits(page).locator(".curves .series")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert [each.get_attribute("data-index") for each in series.all()] == ["0", "2", "3"]
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert series.count() == 4


def test_the_slider_goes_through_time_by_keys_and_by_mouse(opened):
    page = opened()
    slider = digits(page).locator(".after")
    assert cells(page, 1) == CONFIT_MEAN
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert digits(page).locator(".reached").text_content() == "after task 2 of 3"
    assert slider.get_attribute("aria-valuetext") == "after task 2 of 3"
    assert cells(page, 1) == {place: text for place, text in CONFIT_MEAN.items() if place[1] <= 2}
    assert cells(page, 0) == {}  # joint was not measured before the end
    averages = names(page, ".heatmaps .average")
    assert averages == ["not measured after task 2", "average 91.5 ± 0.0", "average 83.0", "average 83.0"]
    label = digits(page).locator(".heatmaps figure").nth(1).get_by_role("img").get_attribute("aria-label")
    assert label == "confit after task 2: task 1 88.0, task 2 95.0"
    page.keyboard.press("Home")
    assert cells(page, 1) == {(1, 1): "91.0"}
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    assert cells(page, 1) == CONFIT_MEAN
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert len(cells(page, 1)) == 3


def test_one_seed_can_be_looked_at(opened):
    page = opened()
    view = digits(page).locator(".view")
    assert view.locator("option").all_text_contents() == ["mean over seeds", "seed 0", "seed 1", "seed 2"]
    view.select_option("2")
    assert cells(page, 1)[1, 3] == "83.2"
    assert cells(page, 1)[2, 3] == "96.0"
    assert "no finished run with seed 2" in digits(page).locator(".heatmaps figure").nth(3).text_content()
    view.select_option("mean")
    assert cells(page, 1) == CONFIT_MEAN


def test_play_runs_from_the_first_task_to_the_last_and_stops(opened):
    page = opened()
    page.clock.install()
    page.reload()
    play = digits(page).locator(".play")
    reached = digits(page).locator(".reached")
    play.click()
    assert (play.text_content(), reached.text_content()) == ("Pause", "after task 1 of 3")
    page.clock.run_for(700)
    assert reached.text_content() == "after task 2 of 3"
    play.click()
    page.clock.run_for(2000)
    assert (play.text_content(), reached.text_content()) == ("Play", "after task 2 of 3")
    play.click()
    page.clock.run_for(700)
    assert (play.text_content(), reached.text_content()) == ("Play", "after task 3 of 3")


def test_the_table_is_sorted_by_click_and_by_key(opened):
    page = opened()
    table = digits(page).locator("table.sortable")

    def order():
        return [text.removesuffix(" ★ best ACC") for text in table.locator("tbody th").all_text_contents()]

    def heading(text):
        return table.get_by_role("button", name=text)

    assert order() == ORDER
    heading("ACC").click()
    assert order() == [*ORDER[2:], "confit", "joint"]
    heading("FGT").click()  # less is better, and joint has none
    assert order()[0] == "confit"
    assert order()[-1] == "joint"
    heading("FGT").press("Enter")
    assert order()[-2:] == ["confit", "joint"]
    assert table.locator("th[aria-sort=descending]").all_text_contents() == ["FGT ↓"]
    heading("method").press("Space")
    assert sorted(order()) == sorted(ORDER)
    assert order()[1:] == ["confit", "finetune", "joint"]
    heading("numbers a task").click()
    assert order()[0] == EVIL


BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 28)"


def test_the_theme_follows_the_system_until_it_is_chosen_and_is_remembered(opened):
    assert opened(scheme="light").evaluate(BACKGROUND) == LIGHT
    page = opened(scheme="dark")
    assert page.evaluate(BACKGROUND) == DARK
    toggle = page.locator("#theme")
    assert toggle.text_content() == "☀ Light theme"
    toggle.press("Enter")
    assert page.evaluate(BACKGROUND) == LIGHT
    assert toggle.text_content() == "☾ Dark theme"
    page.reload()
    assert page.evaluate(BACKGROUND) == LIGHT
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(BACKGROUND) == LIGHT


def test_the_theme_changes_where_nothing_can_be_remembered(opened):
    forbidden = (
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError') }})"
    )
    page = opened(script=forbidden)
    page.locator("#theme").click()
    assert page.evaluate(BACKGROUND) == DARK
    assert digits(page).locator(".curves .series").count() == 4


def test_paper_is_light(opened):
    page = opened(scheme="dark", width=720)  # A4 between its margins
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(BACKGROUND) == LIGHT
    assert page.evaluate("document.documentElement.scrollWidth") == 720
    assert digits(page).locator(".runs summary").nth(0).is_visible()
    assert not digits(page).locator(".controls").is_visible()
    assert digits(page).locator(".curves svg").is_visible()


CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
    const v = c[i] / 255; return sum + share * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); }, 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c[3] === 255) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || ['title', 'OPTION'].includes(node.tagName)) continue;
    const inSvg = node instanceof SVGElement;
    const style = getComputedStyle(node);
    const cell = inSvg && node.closest('.cell');
    const around = inSvg ? node.closest('svg').parentElement : node;
    const below = cell ? rgb(getComputedStyle(cell.querySelector('rect')).fill) : ground(around);
    const [a, b] = [light(rgb(inSvg ? style.fill : style.color)), light(below)];
    const kind = cell ? cell.getAttribute('class') : node.tagName;
    found.push([text.data.trim(), kind, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(opened, scheme):
    page = opened(scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    digits(page).locator(".legend button").nth(0).click()  # one that is switched off
    found = page.evaluate(CONTRASTS)
    assert len(found) > 500
    levels = {kind.split()[1] for _, kind, _ in found if kind.startswith("cell")}
    assert levels == {f"h{level}" for level in range(8)}
    assert [entry for entry in found if entry[2] < 4.5] == []


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_screens_scroll_tables_and_not_the_page(opened, width):
    page = opened(width=width)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        f"""[...document.querySelectorAll('main *')].filter(n => !n.closest('.scroll') && !(n instanceof SVGElement)
        && n.getBoundingClientRect().right > {width} + 1).map(n => n.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    if width == 360:
        scrolled = "n => n.scrollWidth > n.clientWidth"
        assert digits(page).locator(".scroll").nth(0).evaluate(scrolled)
        maps = page.locator("section.dataset").nth(1).locator(".heatmaps .scroll")
        assert maps.nth(0).evaluate(scrolled)


def test_pictures_follow_the_width(opened):
    page = opened()
    assert digits(page).locator(".curves .end").count() == 4
    page.set_viewport_size({"width": 400, "height": 900})
    page.wait_for_function("document.querySelectorAll('.curves .end').length === 0")
    box = digits(page).locator(".curves svg").bounding_box()
    assert box["width"] < 400
    assert digits(page).locator(".curves svg").get_attribute("viewBox").split()[2] == f"{box['width']:.0f}"


def test_the_keyboard_reaches_everything_and_shows_where_it_is(opened):
    page = opened()
    wanted = "button:not([hidden]), input, select, summary, a[href], [tabindex='0']"
    visible = f'[...document.querySelectorAll("{wanted}")].filter(n => n.checkVisibility())'
    expected = page.evaluate(f"{visible}.forEach((n, i) => {{ n.dataset.stop = i }}); {visible}.length")
    assert expected > 40
    reached = []
    for _ in range(expected):
        page.keyboard.press("Tab")
        stop, outline = page.evaluate(
            """(at => [at.dataset.stop, getComputedStyle(at).outlineStyle + ' ' + getComputedStyle(at).outlineWidth])
            (document.activeElement)"""
        )
        reached.append(stop)
        assert outline == "solid 3px"
    assert reached == [str(index) for index in range(expected)]
    summary = digits(page).locator("details:has(dl) summary").nth(0)
    summary.press("Enter")
    inner = digits(page).locator("details details summary").nth(0)
    inner.press("Enter")
    assert digits(page).locator("dl").nth(0).is_visible()


def test_everything_that_can_be_touched_has_a_name(opened):
    page = opened()
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, [role=img], [role=region], [role=group]')].filter(n =>
        !(n.textContent.trim() && n.tagName === 'BUTTON') && !n.getAttribute('aria-label') && !n.labels?.length)
        .map(n => n.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    assert (
        page.evaluate("new Set([...document.querySelectorAll('[id]')].map(n => n.id)).size")
        == page.locator("[id]").count()
    )
    assert page.title() == page.locator("h1").text_content()
