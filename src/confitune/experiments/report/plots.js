"use strict";
// Pictures as inline SVG. Names come from people's folders: they are only ever set as text, never parsed as HTML.

const MARKERS = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.2 * r}L${1.2 * r},${r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`,
  (r) => `M0,${1.2 * r}L${1.2 * r},${-r}H${-1.2 * r}Z`,
  star(4, 1.45, 0.4, 0),
  star(5, 1.35, 0.55, 0),
  star(4, 1.5, 0.35, 0.25),
];
// Points on the way round, by turns far out and near the middle; `turn` is the share of a half circle to start at.
function star(points, far, near, turn) {
  const corner = (i, r) => {
    const [size, angle] = [r * (i % 2 ? near : far), Math.PI * (i / points - 0.5 + turn)];
    return `${(size * Math.cos(angle)).toFixed(2)},${(size * Math.sin(angle)).toFixed(2)}`;
  };
  return (r) => `M${Array.from({ length: 2 * points }, (_, i) => corner(i, r)).join("L")}Z`;
}

const DASHES = ["", "7 3", "2 3"];
const COLOURS = 7;
const LONGEST_LABEL = 20;

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function picture(width, height, label, ...children) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);
}

// 7 colours, 8 markers and 3 kinds of line: methods differ in more than their colour.
function seriesColour(index) {
  return `var(--series-${index % COLOURS})`;
}

function marker(index, x, y, r) {
  return svg("path", {
    class: "marker", d: MARKERS[index % MARKERS.length](r), fill: seriesColour(index),
    transform: `translate(${x},${y})`,
  });
}

function swatch(index) {
  const line = svg("line", { x1: 0, x2: 26, y1: 7, y2: 7, ...stroke(index) });
  const size = { viewBox: "0 0 26 14", width: 26, height: 14 };
  return svg("svg", { ...size, "aria-hidden": "true" }, line, marker(index, 13, 7, 4));
}

function stroke(index) {
  return {
    stroke: seriesColour(index), "stroke-width": 2, fill: "none",
    "stroke-dasharray": DASHES[Math.floor(index / COLOURS) % DASHES.length],
  };
}

function shortened(name) {
  return name.length > LONGEST_LABEL ? `${name.slice(0, LONGEST_LABEL - 1)}…` : name;
}

function known(values) {
  return values.filter((value) => value !== null);
}

// A round number below all values, far enough from 100 to leave the axis a range.
function axisFloor(values, step) {
  return Math.max(0, Math.min(90, step * Math.floor(Math.min(...values) / step)));
}

function ticks(lowest, most) {
  const step = [1, 2, 5, 10, 20, 25, 50].find((size) => (100 - lowest) / size <= most);
  const found = [];
  for (let value = 100; value >= lowest; value -= step) found.push(value);
  return found;
}

// Every task while there is room, else the first and every fifth.
function taskTicks(tasks, most) {
  const all = Array.from({ length: tasks }, (_, index) => index + 1);
  return tasks <= most ? all : all.filter((task) => task === 1 || task % 5 === 0);
}

// The frame of a picture over tasks: places of tasks and accuracies, grid and labels.
function frame({ width, height, left, right, top, bottom, tasks, lowest, levels, most }) {
  const share = (task) => tasks === 1 ? 0.5 : (task - 1) / (tasks - 1);
  const x = (task) => left + share(task) * (width - left - right);
  const y = (value) => top + (100 - value) / (100 - lowest) * (height - top - bottom);
  const grid = svg("g", { class: "grid" });
  for (const value of ticks(lowest, levels)) {
    grid.append(
      svg("line", { x1: left - 8, x2: width - right + 8, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 13, y: y(value), "text-anchor": "end", "dominant-baseline": "central" }, String(value)),
    );
  }
  for (const task of taskTicks(tasks, most)) {
    grid.append(svg("text", { x: x(task), y: height - bottom + 20, "text-anchor": "middle" }, String(task)));
  }
  return { x, y, grid };
}

function drawCurves(box, data, hidden) {
  const width = Math.max(box.clientWidth, 260);
  const labelled = width >= 700;
  const longest = Math.max(...data.methods.map((method) => shortened(method.name).length));
  const height = Math.max(labelled ? 360 : 280, labelled ? 17 * data.methods.length + 70 : 0);
  const size = { width, height, left: 44, right: labelled ? 7.4 * longest + 120 : 20, top: 14, bottom: 46 };
  const lowest = axisFloor(data.methods.flatMap((method) => known(method.curve.lowest)).map((value) => value - 1), 5);
  const most = (width - size.left - size.right) / 26;
  const { x, y, grid } = frame({ ...size, tasks: data.tasks, lowest, levels: 6, most });
  const clip = `${box.parentElement.id}-clip`;
  const inner = { width: width - size.left - size.right, height: height - size.top - size.bottom };
  const edges = { x: size.left - 8, y: size.top - 6, width: inner.width + 16, height: inner.height + 12 };
  const middle = (size.left + width - size.right) / 2;
  const drawing = picture(
    width, height, `Average accuracy on the tasks learned so far, ${data.name}. The numbers are in the table below.`,
    svg("clipPath", { id: clip }, svg("rect", edges)), grid,
    svg("text", { x: middle, y: height - 8, "text-anchor": "middle", class: "axis" }, "tasks learned"),
  );
  const ends = [];
  data.methods.forEach((method, index) => {
    if (hidden.has(index)) return;
    const { mean, half, texts } = method.curve;
    const points = mean.flatMap((value, task) => value === null ? [] : [{ task, value, half: half[task] }]);
    const group = svg("g", { class: "series", "data-index": index });
    const banded = points.filter((point) => point.half !== null);
    if (banded.length > 1) {
      const upper = banded.map((p) => `${x(p.task + 1)},${y(p.value + p.half)}`);
      const lower = banded.map((p) => `${x(p.task + 1)},${y(p.value - p.half)}`).reverse();
      group.append(svg("polygon", {
        class: "band", points: [...upper, ...lower].join(" "), fill: seriesColour(index), "clip-path": `url(#${clip})`,
      }));
    }
    group.append(svg("polyline", {
      class: "line", points: points.map((p) => `${x(p.task + 1)},${y(p.value)}`).join(" "), ...stroke(index),
    }));
    for (const { task, value } of points) {
      const point = marker(index, x(task + 1), y(value), 4.2);
      point.append(svg("title", {}, `${method.name}, after task ${task + 1}: ${texts[task]}`));
      group.append(point);
    }
    drawing.append(group);
    const last = points[points.length - 1];
    const text = `${shortened(method.name)} ${texts[last.task]}`;
    ends.push({ index, text, x: x(last.task + 1), y: y(last.value), place: y(last.value) });
  });
  if (labelled) drawing.append(...endLabels(ends, width - size.right, height - size.bottom));
  box.replaceChildren(drawing);
}

// Every line's name beside its end, moved apart where lines end together.
function endLabels(ends, edge, lowest) {
  const gap = 16;
  ends.sort((a, b) => a.place - b.place);
  ends.forEach((end, i) => { if (i) end.place = Math.max(end.place, ends[i - 1].place + gap); });
  for (let i = ends.length - 1, limit = lowest; i >= 0; i -= 1) {
    ends[i].place = Math.min(ends[i].place, limit);
    limit = ends[i].place - gap;
  }
  return ends.map((end) => svg(
    "g", { class: "end" },
    svg("polyline", {
      class: "leader", stroke: seriesColour(end.index),
      points: `${end.x + 7},${end.y} ${edge + 14},${end.place} ${edge + 22},${end.place}`,
    }),
    svg("text", { x: edge + 26, y: end.place, "dominant-baseline": "central" }, end.text),
  ));
}

function drawLost(box, data) {
  const values = data.methods.flatMap((method) => known([...method.tasks.learned, ...method.tasks.kept]));
  const lowest = axisFloor(values, 10);
  const size = { width: 360, height: 170, left: 42, right: 18, top: 12, bottom: 34 };
  box.replaceChildren(...data.methods.map((method, index) => {
    const { x, y, grid } = frame({ ...size, tasks: data.tasks, lowest, levels: 4, most: 12 });
    const { learned, kept, texts } = method.tasks;
    const colour = seriesColour(index);
    const drawing = picture(size.width, size.height, `${method.name}: each task when learned and at the end`, grid);
    kept.forEach((end, task) => {
      const at = x(task + 1);
      const start = learned[task];
      const text = texts[task];
      const words = `task ${task + 1}: learned ${text.learned}, at the end ${text.kept}, lost ${text.lost}`;
      const pair = svg("g", { class: "pair" }, svg("title", {}, words));
      if (start !== null) {
        pair.append(
          svg("line", { x1: at, x2: at, y1: y(start), y2: y(end), stroke: colour, "stroke-width": 5, opacity: 0.4 }),
          svg("circle", { class: "learned", cx: at, cy: y(start), r: 4.6, stroke: colour, "stroke-width": 1.6 }),
        );
      }
      pair.append(svg("circle", { class: "kept", cx: at, cy: y(end), r: 4.6, fill: colour }));
      drawing.append(pair);
    });
    return element("figure", {}, element("figcaption", {}, swatch(index), ` ${method.name}`), drawing);
  }));
}
