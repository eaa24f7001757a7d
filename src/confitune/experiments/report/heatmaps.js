// Accuracy matrices at a moment of the sequence, and bars of what is stored.

const LEVELS = 8;
const LABELS = 40; // pixels left of the cells
const READABLE_CELL = 26;

// One scale for all methods and seeds, spread over the means: a single seed may lie below it.
function heatFloor(data) {
  return axisFloor(data.methods.flatMap((method) => known(method.views.mean.cells.flat())), 10);
}

function heatLevel(value, lowest) {
  return Math.max(0, Math.min(LEVELS - 1, Math.floor((value - lowest) / (100 - lowest) * LEVELS)));
}

function accuracyText(value) {
  return value === 100 ? "100" : value.toFixed(1);
}

function drawScale(box, lowest) {
  const steps = Array.from({ length: LEVELS }, (_, level) => element("span", { class: `step h${level}` }));
  const words = [lowest ? `${lowest} % or less` : "0 %", "100 %"].map((text) => element("span", {}, text));
  box.replaceChildren(words[0], ...steps, words[1]);
}

// `after` counts the tasks learned so far: columns of later tasks stay blank.
function drawHeatmaps(box, data, chosen, after) {
  const lowest = heatFloor(data);
  box.style.setProperty("--panel", `max(21rem, ${READABLE_CELL * data.tasks + LABELS}px)`);
  box.replaceChildren(...data.methods.map((method, index) => {
    const view = method.views[chosen];
    const heading = element("figcaption", {}, swatch(index), ` ${method.name} `);
    if (!view) {
      return element("figure", {}, heading, element("p", { class: "muted" }, `no finished run with seed ${chosen}`));
    }
    const average = view.averages[after - 1];
    const words = average && average !== "-" ? `average ${average}` : `not measured after task ${after}`;
    heading.append(element("span", { class: "muted average" }, words));
    const map = heatmap(method.name, view.cells, after, lowest);
    const attributes = { class: "scroll" };
    const label = `Accuracy matrix of ${method.name}`;
    if (view.cells.length > 12) Object.assign(attributes, { tabindex: 0, role: "region", "aria-label": label });
    return element("figure", {}, heading, element("div", attributes, map));
  }));
}

function heatmap(name, cells, after, lowest) {
  const tasks = cells.length;
  const side = tasks > 12 ? 30 : 34;
  const [left, top] = [LABELS, 6];
  const [width, height] = [left + side * tasks + 4, top + side * tasks + 38];
  const now = cells.map((row) => row[after - 1] ?? null);
  const seen = now.flatMap((value, task) => value === null ? [] : [`task ${task + 1} ${accuracyText(value)}`]);
  const drawing = picture(width, height, `${name} after task ${after}: ${seen.join(", ") || "not measured"}`);
  drawing.style.minWidth = `${Math.min(width, READABLE_CELL * tasks + left)}px`;
  drawing.style.maxWidth = `${Math.max(1.25 * width, 260)}px`;
  for (let task = 0; task < tasks; task += 1) {
    for (let column = task; column < tasks; column += 1) {
      const value = cells[task][column];
      const place = { x: left + column * side, y: top + task * side, width: side - 2, height: side - 2, rx: 3 };
      if (column >= after || value === null) drawing.append(svg("rect", { class: "blank", ...place }));
      else drawing.append(cell(task, column, value, place, lowest, column === after - 1));
    }
    const label = { class: "tick", "dominant-baseline": "central" };
    const middle = (side - 2) / 2 + task * side;
    drawing.append(
      svg("text", { ...label, x: left - 6, y: top + middle, "text-anchor": "end" }, String(task + 1)),
      svg("text", { ...label, x: left + middle, y: top + side * tasks + 9, "text-anchor": "middle" }, String(task + 1)),
    );
  }
  const ends = top + side * tasks;
  drawing.append(
    svg("text", { class: "axis", x: left + side * tasks / 2, y: ends + 30, "text-anchor": "middle" }, "after task"),
    svg("text", {
      class: "axis", transform: `translate(12,${top + side * tasks / 2}) rotate(-90)`, "text-anchor": "middle",
    }, "task"),
  );
  return drawing;
}

function cell(task, column, value, place, lowest, now) {
  const level = heatLevel(value, lowest);
  const middle = { x: place.x + place.width / 2, y: place.y + place.height / 2 };
  return svg(
    "g", { class: `cell h${level}${now ? " now" : ""}`, "data-task": task + 1, "data-after": column + 1 },
    svg("title", {}, `task ${task + 1} after task ${column + 1}: ${accuracyText(value)}`),
    svg("rect", place),
    svg("text", { ...middle, "text-anchor": "middle", "dominant-baseline": "central" }, accuracyText(value)),
  );
}

// Logarithmic where the largest is more than 50 times the smallest: the small ones would be lost.
function drawStorage(box, note, data) {
  const stored = data.methods.map((method) => method.stored);
  const [smallest, largest] = [Math.min(...stored.filter((count) => count > 0)), Math.max(...stored)];
  const logarithmic = largest > 50 * smallest;
  const start = Math.floor(Math.log10(smallest));
  const share = (count) => {
    if (count <= 0) return 0;
    return logarithmic ? (Math.log10(count) - start) / (Math.log10(largest) - start) : count / largest;
  };
  const from = (10 ** start).toLocaleString("en");
  const words = `The scale is logarithmic: a bar starts at ${from}, and tenfold is always as long.`;
  note.textContent = logarithmic ? words : "";
  box.replaceChildren(...data.methods.map((method, index) => {
    const width = Math.max(0.4, 100 * share(method.stored));
    const label = `${method.name}: ${method.stored_text} numbers`;
    const bar = svg(
      "svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("rect", { class: "bar", x: 0, y: 0, height: 10, width, fill: seriesColour(index) }),
    );
    const name = element("span", { class: "name" }, swatch(index), ` ${method.name}`);
    return element("div", { class: "row" }, name, bar, element("span", { class: "number" }, method.stored_text));
  }));
}
