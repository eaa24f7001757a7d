// What can be touched: theme, sorting, legend, slider, seeds, play.

const PLAY_MILLISECONDS = 700;
const THEME_KEY = "confitune-theme";

function stored(action) {
  try {
    return action(window.localStorage);
  } catch {
    return null; // some browsers keep nothing for files, or forbid it
  }
}

function setUpTheme(button) {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const remembered = stored((storage) => storage.getItem(THEME_KEY));
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const show = () => { button.textContent = dark() ? "☀ Light theme" : "☾ Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    stored((storage) => storage.setItem(THEME_KEY, root.dataset.theme));
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();
}

// First click: best or largest first (names: A to Z); a second one turns the order round. Undefined stays last.
function setUpSorting(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const first = column === 0 || heading.textContent.includes("↓") ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = now === first ? other : first;
      headings.forEach((each) => each.setAttribute("aria-sort", each === heading ? order : "none"));
      const value = (row) => row.cells[column].dataset.value;
      const compared = column === 0 ? (a, b) => a.localeCompare(b) : (a, b) => Number(a) - Number(b);
      const sorted = [...table.tBodies[0].rows].sort((a, b) => {
        if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
        return (order === "ascending" ? 1 : -1) * compared(value(a), value(b));
      });
      table.tBodies[0].append(...sorted);
    });
  });
}

function setUpCurves(section, data) {
  const hidden = new Set();
  const box = section.querySelector(".curves");
  const draw = () => drawCurves(box, data, hidden);
  section.querySelector(".legend").append(...data.methods.map((method, index) => {
    const button = element("button", { type: "button", "aria-pressed": "true" }, swatch(index), ` ${method.name}`);
    button.addEventListener("click", () => {
      if (!hidden.delete(index)) hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      draw();
    });
    return button;
  }));
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth === width) return; // drawing changes the height only
    width = box.clientWidth;
    draw();
  }).observe(box);
  draw();
}

function setUpHeatmaps(section, data) {
  const find = (name) => section.querySelector(name);
  const [slider, reached, view, play] = [".after", ".reached", ".view", ".play"].map(find);
  let timer = null;
  const draw = () => {
    const words = `after task ${slider.value} of ${data.tasks}`;
    reached.textContent = words;
    slider.setAttribute("aria-valuetext", words);
    drawHeatmaps(find(".heatmaps"), data, view.value, Number(slider.value));
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const step = () => {
    slider.value = Number(slider.value) + 1;
    draw();
    if (slider.value === slider.max) stop();
  };
  slider.addEventListener("input", () => { stop(); draw(); });
  view.addEventListener("change", draw);
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (slider.value === slider.max) slider.value = 1;
    draw();
    play.textContent = "Pause";
    timer = setInterval(step, PLAY_MILLISECONDS);
  });
  play.hidden = data.tasks === 1;
  drawScale(find(".scale"), heatFloor(data));
  draw();
}

const report = JSON.parse(document.getElementById("data").textContent);
setUpTheme(document.getElementById("theme"));
document.querySelectorAll("table.sortable").forEach(setUpSorting);
document.querySelectorAll("section.dataset").forEach((section, index) => {
  const data = report.datasets[index];
  setUpCurves(section, data);
  drawLost(section.querySelector(".lost"), data);
  setUpHeatmaps(section, data);
  drawStorage(section.querySelector(".storage"), section.querySelector(".storage-scale"), data);
});
