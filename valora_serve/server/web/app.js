// The console: what is asked, of whom, and what came back.

import { call, complete, dataUrl, el, make, milliseconds, bytes, onKey } from "./api.js";
import { offer } from "./chat.js";
import { promises, refresh } from "./panels.js";
import { save } from "./save.js";
import { colour, draw, resetZoom } from "./stage.js";

const EVERY = "*"; // every domain that finds boxes
const AT_ONCE = 4; // requests
let models = [];
let items = []; // {file, url, name, video, frames, width, height, answers}
let current = 0;
let running = null; // AbortController of the running requests
let least = null; // least confidence of a box; each domain's own until the slider is moved
const hidden = new Set(); // names in the legend that are switched off

// The models

async function loadModels() {
  const listed = (await (await call("v1/models")).json()).data;
  const before = el("model").value;
  models = listed;
  el("model").replaceChildren();
  const finding = listed.filter((model) => model.boxes);
  if (finding.length > 1) el("model").append(new Option(`Every domain with boxes (${finding.length})`, EVERY));
  for (const [kind, title] of [["domain", "Domains"], ["context", "Documents"], ["adapter", "Adapters"], ["base", "Base model"]]) {
    const group = document.createElement("optgroup");
    group.label = title;
    for (const model of listed.filter((item) => (item.form ? "context" : item.kind) === kind)) {
      group.append(new Option(model.id, model.id));
    }
    if (group.children.length) el("model").append(group);
  }
  if ([...el("model").options].some((option) => option.value === before)) el("model").value = before;
  el("base").textContent = `on ${listed[0].id}`;
  describe();
  offer(models);
  promises(models);
}

function targets() {
  if (el("model").value === EVERY) return models.filter((model) => model.boxes);
  return models.filter((model) => model.id === el("model").value);
}

function describe() {
  const asked = targets();
  if (!asked.length) return;
  const [model] = asked;
  const parts = [];
  if (asked.length > 1) {
    parts.push("all domains over one picture, by colour", asked.map((one) => one.id).join(", "));
  } else {
    if (model.task) parts.push(model.task);
    parts.push(model.head ? `${model.head} head` : "language model");
    if (model.kind === "domain") parts.push(model.adapter || "no adapter");
    if (model.form) parts.push(`${model.source_tokens} tokens of a document, held in ${model.memory_tokens}`);
    if (model.accuracy !== null) parts.push(`${model.metric} ${model.accuracy.toFixed(3)} promised`);
    if (model.teacher) parts.push(`teacher ${model.teacher.toFixed(3)}`);
    if (model.labels.length) parts.push(model.labels.slice(0, 12).join(", "));
  }
  el("about").textContent = parts.join(" · ");
  el("prompt").placeholder = asked.length > 1 ? "each domain's own prompt" : model.form ? "ask about the document"
    : model.prompt || (model.kind === "domain" ? "the domain's own prompt" : "write a prompt");
  el("least-field").hidden = !model.boxes;
}

el("model").addEventListener("change", () => {
  describe();
  hidden.clear();
});

function setLeast(value) {
  least = value;
  el("least-value").textContent = value === null ? "each domain's own" : value.toFixed(2);
  el("least-reset").disabled = value === null;
  el("least").classList.toggle("unset", value === null);
}
el("least").value = 0.5;
setLeast(null);
el("least").addEventListener("input", () => setLeast(Number(el("least").value)));
el("least-reset").addEventListener("click", () => {
  el("least").value = 0.5;
  setLeast(null);
  el("least").focus();
});

// Images and videos

function take(files) {
  const given = [...files];
  if (!given.length) return;
  const wrong = given.find((file) => !/^(image|video)\//.test(file.type));
  if (wrong) {
    fail(`${wrong.name} is neither an image nor a video.`);
    return;
  }
  drop();
  items = given.map((file) => ({
    file, url: URL.createObjectURL(file), name: file.name, video: file.type.startsWith("video/"),
    frames: null, width: 0, height: 0, answers: [],
  }));
  const total = given.reduce((sum, file) => sum + file.size, 0);
  el("chosen").textContent = given.length === 1 ? `${given[0].name} (${bytes(total)})` : `${given.length} files (${bytes(total)})`;
  el("error").hidden = true;
  show(0);
}

function drop() {
  for (const item of items) URL.revokeObjectURL(item.url);
  items = [];
  current = 0;
}

el("clear").addEventListener("click", () => {
  drop();
  el("file").value = "";
  el("chosen").textContent = "Drop images or a short video here, paste one, or choose files";
  for (const id of ["figure", "strip", "saving", "clear"]) el(id).hidden = true;
  el("gallery").hidden = false;
  el("said").replaceChildren();
  el("model").focus();
});

// Show one of the files with what was answered so far.
function show(place) {
  current = place;
  const item = items[place];
  el("gallery").hidden = true;
  el("clear").hidden = false;
  el("figure").hidden = el("viewport").hidden = el("tools").hidden = false;
  el("timing").textContent = "";
  el("picture").hidden = item.video;
  el("clip").hidden = !item.video;
  el("zoom").hidden = item.video;
  strip();
  const ready = () => {
    const seen = item.video ? el("clip") : el("picture");
    item.width ||= item.video ? seen.videoWidth : seen.naturalWidth;
    item.height ||= item.video ? seen.videoHeight : seen.naturalHeight;
    if (items[current] === item) {
      resetZoom();
      tell();
    }
  };
  if (item.video) {
    el("clip").onloadedmetadata = ready;
    el("clip").src = item.url;
  } else {
    el("picture").onload = ready;
    el("picture").src = item.url;
    el("picture").alt = item.name;
  }
  tell();
}

function strip() {
  el("strip").hidden = items.length < 2;
  if (items.length < 2) return;
  el("strip").replaceChildren(...items.map((item, place) => {
    const count = item.answers.flatMap((answer) => answer.detections || []).length;
    const said = item.failed ? "failed" : item.answers.length ? String(item.answers[0].label ?? count) : "";
    const picture = item.video ? make("span", { className: "film", textContent: "▶" }) : make("img", { src: item.url, alt: "" });
    const made = make("button", { type: "button", className: "thumb", title: item.name }, picture, make("span", { textContent: said }));
    made.setAttribute("aria-label", `${item.name} ${said}`);
    made.setAttribute("aria-pressed", String(place === current));
    made.addEventListener("click", () => show(place));
    return made;
  }));
}

el("file").addEventListener("change", () => take(el("file").files));
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    el("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) el("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  el("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));

// Examples of the bundles

async function loadExamples() {
  const listed = (await (await call("v1/examples")).json()).data;
  if (!listed.length) return;
  el("gallery-title").textContent = "Try an example, or drop your own images";
  el("examples").replaceChildren(...listed.slice(0, 24).map((example) => {
    const picture = make("img", { alt: "", width: 120, height: 120 });
    const made = make("button", { type: "button", className: "example" }, picture, make("span", { textContent: example.domain }));
    made.setAttribute("aria-label", `Example of ${example.domain}`);
    made.addEventListener("click", () => tryExample(example));
    blob(example.images[0]).then((content) => { picture.src = URL.createObjectURL(content); }, () => made.remove());
    return make("li", {}, made);
  }));
}

async function blob(path) {
  return (await call(path)).blob();
}

async function tryExample(example) {
  try {
    const contents = await Promise.all(example.images.map(blob));
    const name = (place) => `${example.domain}-${example.number}${place ? `-${place}` : ""}.png`;
    const files = contents.map((content, place) => new File([content], name(place), { type: "image/png" }));
    const model = models.find((one) => one.id === example.domain);
    const all = model && model.boxes && [...el("model").options].some((option) => option.value === EVERY);
    el("model").value = all ? EVERY : example.domain;
    el("prompt").value = example.question || "";
    describe();
    take(example.video ? [files[0]] : files);
    if (example.video) items[0].frames = files;
    await ask();
  } catch (error) {
    fail(error.message);
  }
}

// Requests

el("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !el("look").hidden) {
    event.preventDefault();
    ask();
  }
  if (event.key === "Escape" && running) running.abort();
});
el("stop").addEventListener("click", () => running && running.abort());

async function ask() {
  const asked = targets();
  if (!asked.length || running) return;
  const prompt = el("prompt").value.trim();
  const heads = asked.every((model) => model.head);
  if (!items.length && (heads || !prompt)) {
    fail(heads ? "Choose an image or a video first." : "Write a prompt or choose an image first.");
    return;
  }
  running = new AbortController();
  el("run").disabled = true;
  el("stop").hidden = false;
  el("error").hidden = true;
  el("said").replaceChildren();
  for (const item of items) Object.assign(item, { answers: [], failed: null, took: "" });
  if (items.length) show(Math.min(current, items.length - 1));
  else el("gallery").hidden = true;
  const began = performance.now();
  try {
    if (heads) await askHeads(asked, prompt, began);
    else await askLanguageModel(asked[0], prompt, began);
  } catch (error) {
    fail(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    running = null;
    el("run").disabled = false;
    el("stop").hidden = true;
    el("saving").hidden = !items.some((item) => item.answers.length);
    refresh();
  }
}

// Every domain about every file, some requests at a time.
async function askHeads(asked, prompt, began) {
  const jobs = items.flatMap((item) => asked.map((model) => ({ item, model })));
  const failures = [];
  let done = 0;
  const work = async () => {
    while (jobs.length && !running.signal.aborted) {
      const { item, model } = jobs.shift();
      try {
        const answer = await askHead(item, model, prompt);
        const result = answer.results[0];
        item.width = result.width;
        item.height = result.height;
        item.answers.push({ domain: model.id, seconds: answer.seconds, mode: answer.mode, warnings: answer.warnings, ...result });
        item.answers.sort((a, b) => order(asked, a) - order(asked, b));
      } catch (error) {
        if (error.name === "AbortError") throw error;
        item.failed = error.message;
        failures.push(error);
      }
      done += 1;
      if (items[current] === item) tell();
      else strip();
    }
  };
  const total = jobs.length;
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, total) }, work));
  const seconds = items.flatMap((item) => item.answers).reduce((sum, answer) => sum + answer.seconds, 0);
  const modes = [...new Set(items.flatMap((item) => item.answers.map((answer) => answer.mode)))].join(", ");
  const many = done > 1 ? `${done} answers; ` : "";
  el("timing").textContent = `${milliseconds(performance.now() - began)} in total; ${many}${milliseconds((seconds * 1000) / Math.max(1, done))} in the server${done > 1 ? " each" : ""}, ${modes} mode`;
  if (failures.length) fail(total === 1 ? failures[0].message : `${failures.length} of ${total} answers failed: ${failures[0].message}`);
}

const order = (asked, answer) => asked.findIndex((model) => model.id === answer.domain);

async function askHead(item, model, prompt) {
  const form = new FormData();
  if (item.frames) for (const frame of item.frames) form.append("frames", frame, frame.name);
  else form.append(item.video ? "video" : "image", item.file, item.name);
  if (prompt) form.append("prompt", prompt);
  if (least !== null && model.boxes) form.append("min_score", String(least));
  const path = `v1/vision/${encodeURIComponent(model.id)}`;
  return (await call(path, { method: "POST", body: form, signal: running.signal })).json();
}

async function askLanguageModel(model, prompt, began) {
  const content = [];
  if (prompt) content.push({ type: "text", text: prompt });
  const item = items[current];
  if (item) {
    const kind = item.video ? "video_url" : "image_url";
    content.push({ type: kind, [kind]: { url: await dataUrl(item.file) } });
  }
  const text = make("p", { className: "text" });
  el("said").replaceChildren(text);
  let first = null;
  const found = await complete(model.id, [{ role: "user", content }], (piece) => {
    first ??= performance.now() - began;
    text.textContent += piece;
  }, running.signal);
  const parts = [`${milliseconds(performance.now() - began)} in total`];
  if (first !== null) parts.push(`first token after ${milliseconds(first)}`);
  if (found.usage) parts.push(`${found.usage.prompt_tokens} prompt tokens, ${found.usage.completion_tokens} generated`);
  if (item) item.answers = [{ domain: model.id, text: text.textContent }];
  el("figure").hidden = false;
  el("viewport").hidden = el("tools").hidden = !item;
  warn(found.warnings);
  el("timing").textContent = parts.join("; ");
}

// The result

// The number of a box's colour: of its domain where several were asked, of its label otherwise.
function kindOf(answer, found) {
  const asked = targets();
  if (asked.length > 1) return { name: answer.domain, number: order(asked, answer) };
  return { name: found.label, number: Math.max(0, asked[0] ? asked[0].labels.indexOf(found.label) : 0) };
}

// Show what was answered about the current file.
function tell() {
  const item = items[current];
  if (!item) return;
  const found = item.answers.flatMap((answer) => (answer.detections || []).map((one) => ({ ...one, ...kindOf(answer, one) })));
  legend(item, found);
  const visible = found.filter((one) => !hidden.has(one.name));
  const [width, height] = [item.width || 1, item.height || 1];
  draw(width, height, item.video ? [] : visible.map((one) => {
    const [x0, y0, x1, y1] = one.box;
    return { x0, y0, x1, y1, label: one.label, confidence: one.confidence, colour: colour(one.number) };
  }));
  strip();
  const answers = item.answers;
  if (!answers.length) {
    el("said").replaceChildren(...(item.failed ? [make("p", { className: "wrong", textContent: item.failed })] : []));
    return;
  }
  el("said").replaceChildren();
  if (answers.some((answer) => answer.detections)) {
    visible.sort((a, b) => b.confidence - a.confidence);
    const rows = visible.map((one) => [one.label, one.confidence, one.number, one.box.map((value) => value.toFixed(1)).join(", ")]);
    if (!found.length) say("No object was found at this confidence.");
    else table(["label", "confidence", "box (x0, y0, x1, y1)"], rows);
  }
  for (const answer of answers) {
    if (answer.confidences) {
      const rows = Object.entries(answer.confidences).map(([label, sure], number) => [label, sure, number]);
      rows.sort((a, b) => b[1] - a[1]);
      table(["label", "confidence"], rows.slice(0, 20));
    } else if (answer.text !== undefined && answer.text !== null) {
      el("said").append(make("p", { className: "text", textContent: answer.text }));
    }
  }
  warn([...new Set(answers.flatMap((answer) => answer.warnings || []))]);
}

// Counts by colour; each can be switched off.
function legend(item, found) {
  const asked = targets();
  const several = asked.length > 1;
  const names = several ? item.answers.map((answer) => [answer.domain, order(asked, answer)])
    : [...new Map(found.map((one) => [one.name, one.number]))];
  el("legend").replaceChildren(...names.map(([name, number]) => {
    const count = found.filter((one) => one.name === name).length;
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = colour(number);
    const made = make("button", { type: "button", className: "chip" }, swatch, `${name} ${count}`);
    made.setAttribute("aria-pressed", String(!hidden.has(name)));
    made.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      tell();
    });
    return make("li", {}, made);
  }));
}

function table(titles, rows) {
  const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col", textContent: title })));
  const body = rows.map(([label, confidence, number, ...more]) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = colour(number);
    const bar = make("meter", { value: confidence, "aria-hidden": "true" });
    return make("tr", {}, make("td", {}, swatch, label),
      make("td", { className: "number" }, bar, ` ${confidence.toFixed(3)}`),
      ...more.map((text) => make("td", { className: "number", textContent: text })));
  });
  el("said").append(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function say(text) {
  el("said").append(make("p", { textContent: text }));
}

function warn(warnings) {
  for (const warning of warnings || []) el("said").append(make("p", { className: "hint", textContent: warning }));
}

function fail(text) {
  el("error").textContent = text;
  el("error").hidden = false;
}

el("save").addEventListener("click", () => {
  save(el("format").value, items.filter((item) => item.answers.length));
});

// Views

const tabs = [...el("tabs").children];
function open(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    el(other.getAttribute("aria-controls")).hidden = !chosen;
  }
}
for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    open(next);
    next.focus();
  });
}

async function start() {
  try {
    await loadModels();
    await Promise.all([refresh(), loadExamples()]);
  } catch (error) {
    fail(error.message);
  }
}

onKey(start);
start();
setInterval(() => document.hidden || refresh(), 1000);
