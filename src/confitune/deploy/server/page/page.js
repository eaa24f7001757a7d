// Sends images, each in a request of its own, and shows what comes back. Text from files and from the server becomes text, never markup.

const find = (id) => document.getElementById(id);
const [drop, input, preview, invitation, chosen, choice, result] =
  ["drop", "file", "preview", "invitation", "chosen", "task", "result"].map(find);
const TOP = 5;

let limits = null; // what the server takes, once it has said so
let images = []; // the files that were chosen; the first is shown
let asking = null; // the request under way

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function count(number, word) {
  const ending = number === 1 ? "" : word.endsWith("s") ? "es" : "s";
  return `${number.toLocaleString("en")} ${word}${ending}`;
}

function size(bytes) {
  const rounded = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });
  if (bytes < 1e3) return count(bytes, "byte");
  return bytes < 1e6 ? `${rounded(bytes / 1e3)} kB` : `${rounded(bytes / 1e6)} MB`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

// Errors

const TITLES = {
  408: "The upload took too long",
  413: "This image is too large",
  415: "This file is not an image",
  422: "This image cannot be read",
  429: "The server is busy",
  500: "The model failed on this image",
  503: "The server is busy or being stopped",
  504: "The answer took too long",
};
const AGAIN = new Set([0, 408, 429, 500, 503, 504]);

function showError(status, detail, retry = () => ask()) {
  const title = status === 0 ? "The server does not answer" : TITLES[status] ?? `The server said no (${status})`;
  const box = element("div", { class: "error", role: "alert" }, element("h2", {}, title), element("p", {}, detail));
  if (AGAIN.has(status)) {
    const button = element("button", { type: "button" }, "Try again");
    button.addEventListener("click", retry);
    box.append(button);
  }
  result.classList.remove("waits");
  result.replaceChildren(box);
}

function sentence(text) {
  const words = text.trim();
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

async function whatWasWrong(answer) {
  let detail = answer.statusText;
  try {
    detail = (await answer.json()).detail ?? detail;
  } catch { /* not ours: a proxy's page, or cut off */ }
  const wait = Number(answer.headers.get("Retry-After"));
  return sentence(detail || "It gave no reason") + (wait ? ` It may go better in ${count(wait, "second")}.` : "");
}

const GONE = "Is it still running, and is this device still connected? It is started with confitune serve.";

// Results

function showPrediction(prediction, server, total) {
  const taken = `${server.toFixed(0)} ms on the server, ${total.toFixed(0)} ms in all`;
  const parts = prediction.unknown ? unknownParts(prediction) : knownParts(prediction);
  result.classList.remove("waits");
  result.replaceChildren(...parts, element("p", { class: "took" }, taken));
}

function unknownParts(prediction) {
  return [
    element("p", { class: "best" }, "Unknown"),
    element("p", { class: "by" }, "It looks like nothing that was learned. What comes nearest:"),
    scores(prediction),
  ];
}

function knownParts(prediction) {
  const guessed = prediction.task_confidence !== null;
  const how = guessed ? `, guessed with ${percent(prediction.task_confidence)} confidence` : ", as you chose";
  return [
    element("p", { class: "best" }, prediction.classes[0]?.name ?? "No class"),
    element("p", { class: "by" }, "Task ", element("b", {}, prediction.task), how),
    scores(prediction),
  ];
}

// The most probable classes of all tasks; those of others say whose they are.
function scores(prediction) {
  const others = prediction.others.map(({ task, ...score }) => ({ ...score, name: `${score.name} (${task})` }));
  const best = [...prediction.classes, ...others].sort((a, b) => b.probability - a.probability);
  const rows = best.slice(0, prediction.classes.length).map(({ name, probability }) => {
    const bar = element("div", { class: "bar" });
    bar.style.width = `${100 * probability}%`;
    return element(
      "li", {},
      element("span", {}, name),
      element("span", { class: "share" }, percent(probability)),
      element("div", { class: "track", "aria-hidden": "true" }, bar),
    );
  });
  return element("ol", { class: "classes", "aria-label": "Classes, most probable first" }, ...rows);
}

// Asking

class Refused {
  constructor(status, detail) {
    Object.assign(this, { status, detail });
  }
}

async function answerFor(image, signal) {
  if (limits && image.size > limits.image_bytes) {
    const most = size(limits.image_bytes);
    throw new Refused(413, `It has ${size(image.size)}, and the server takes up to ${most}. Choose a smaller one.`);
  }
  const form = new FormData();
  form.append("images", image, image.name || "image");
  form.append("task", choice.value);
  form.append("top", TOP);
  const answer = await fetch("v1/predict", { method: "POST", body: form, signal });
  if (!answer.ok) throw new Refused(answer.status, await whatWasWrong(answer));
  return answer.json();
}

async function showOne(image, signal) {
  const began = performance.now();
  const { predictions, milliseconds } = await answerFor(image, signal);
  showPrediction(predictions[0], milliseconds, performance.now() - began);
}

// One line an image; one that is refused does not stop the others.
async function showEach(signal) {
  const rows = images.map((image) => element("li", {}, element("b", {}, image.name), " …"));
  result.classList.remove("waits");
  result.replaceChildren(element("ol", { class: "photos", "aria-label": "Images" }, ...rows));
  for (const [place, image] of images.entries()) {
    let words;
    try {
      const [found] = (await answerFor(image, signal)).predictions;
      const [best] = found.classes;
      words = found.unknown ? "Unknown" : `${best.name}, ${percent(best.probability)} (${found.task})`;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      words = error.detail;
    }
    rows[place].replaceChildren(element("b", {}, image.name), " ", words);
  }
}

async function ask() {
  asking?.abort();
  if (!images.length) return;
  const mine = new AbortController();
  asking = mine;
  result.classList.add("waits");
  result.setAttribute("aria-busy", "true");
  try {
    await (images.length === 1 ? showOne(images[0], mine.signal) : showEach(mine.signal));
  } catch (error) {
    if (mine.signal.aborted) return; // another image or task was chosen meanwhile
    if (error instanceof Refused) showError(error.status, error.detail);
    else showError(0, GONE);
  } finally {
    if (asking === mine) result.removeAttribute("aria-busy");
  }
}

// Choosing

function take(files) {
  if (!files.length) return;
  images = files;
  const [image] = images;
  URL.revokeObjectURL(preview.src);
  preview.hidden = true;
  invitation.hidden = false;
  drop.classList.remove("filled");
  preview.src = URL.createObjectURL(image);
  preview.alt = `Preview of ${image.name}`;
  const bytes = images.reduce((sum, each) => sum + each.size, 0);
  chosen.textContent = `${images.length > 1 ? count(images.length, "image") : image.name}, ${size(bytes)}`;
  ask();
}

preview.addEventListener("load", () => {
  preview.hidden = false;
  invitation.hidden = true;
  drop.classList.add("filled");
});
input.addEventListener("change", () => {
  take([...input.files]);
  input.value = ""; // or the same file could not be chosen again
});
choice.addEventListener("change", ask);
document.addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])]));
// Anywhere: a file dropped beside the box would otherwise replace the page.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
for (const end of ["dragleave", "drop", "dragend"]) {
  document.addEventListener(end, () => drop.classList.remove("over"));
}
document.addEventListener("drop", (event) => {
  event.preventDefault();
  take([...(event.dataTransfer?.files ?? [])]);
});

// Tasks

function taskRow(task) {
  const classes = element(
    "details", {},
    element("summary", {}, count(task.classes.length, "class")),
    element("p", {}, task.classes.join(", ")),
  );
  return element(
    "tr", {},
    element("th", { scope: "row" }, task.name),
    element("td", {}, classes),
    element("td", { class: "number" }, task.accuracy === null ? "not measured" : `${task.accuracy.toFixed(1)} %`),
    element("td", { class: "number wide" }, task.images.toLocaleString("en")),
    element("td", { class: "number wide" }, task.learned.slice(0, 10)),
  );
}

async function showTasks() {
  try {
    const answer = await fetch("v1/tasks");
    if (!answer.ok) {
      showError(answer.status, await whatWasWrong(answer), showTasks);
      return;
    }
    const model = await answer.json();
    limits = model.limits;
    document.title = `${model.name}: confitune`;
    find("model").textContent = model.name;
    const classes = model.tasks.reduce((sum, task) => sum + task.classes.length, 0);
    find("what").textContent = `One network, ${count(model.tasks.length, "task")}, ${count(classes, "class")}`;
    choice.append(...model.tasks.map((task) => element("option", { value: task.name }, task.name)));
    find("task-rows").replaceChildren(...model.tasks.map(taskRow));
    find("tasks").hidden = model.tasks.length === 0;
  } catch {
    showError(0, GONE, () => window.location.reload());
  }
}

showTasks();
