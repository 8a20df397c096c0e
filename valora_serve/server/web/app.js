"use strict";
// The console uses the same API as any other client.

const el = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const HUES = [165, 25, 265, 200, 330, 55, 95, 230];
let models = [];
let media = null; // {file, url, video}
let running = null; // AbortController of the running request

function headers(extra = {}) {
  const key = sessionStorage.getItem("valora-key");
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) {
    askForKey();
    throw new Error("This server requires an API key.");
  }
  if (!response.ok) {
    let said = `${response.status} ${response.statusText}`;
    try {
      said = (await response.json()).error.message;
    } catch { /* not JSON: the status is shown */ }
    throw new Error(said);
  }
  return response;
}

function askForKey() {
  if (!el("key-dialog").open) el("key-dialog").showModal();
}

el("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("valora-key", el("key").value.trim());
  el("key").value = "";
  el("key-dialog").close();
  start();
});

// The models

async function loadModels() {
  const listed = (await (await call("v1/models")).json()).data;
  const before = el("model").value;
  models = listed;
  el("model").replaceChildren();
  for (const [kind, title] of [["domain", "Domains"], ["context", "Documents"], ["adapter", "Adapters"], ["base", "Base model"]]) {
    const group = document.createElement("optgroup");
    group.label = title;
    for (const model of listed.filter((item) => (item.form ? "context" : item.kind) === kind)) {
      group.append(new Option(model.id, model.id));
    }
    if (group.children.length) el("model").append(group);
  }
  if (listed.some((item) => item.id === before)) el("model").value = before;
  el("base").textContent = `on ${listed[0].id}`;
  describe();
}

function chosen() {
  return models.find((item) => item.id === el("model").value);
}

function describe() {
  const model = chosen();
  if (!model) return;
  const parts = [];
  if (model.task) parts.push(model.task);
  parts.push(model.head ? `${model.head} head` : "language model");
  if (model.kind === "domain") parts.push(model.adapter || "no adapter");
  if (model.form) parts.push(`${model.source_tokens} tokens of a document, held in ${model.memory_tokens}`);
  if (model.accuracy !== null) parts.push(`${model.metric} ${model.accuracy.toFixed(3)} promised`);
  if (model.teacher) parts.push(`teacher ${model.teacher.toFixed(3)}`);
  if (model.labels.length) parts.push(model.labels.slice(0, 12).join(", "));
  el("about").textContent = parts.join(" · ");
  el("prompt").placeholder = model.form ? "ask about the document" : model.prompt || (model.kind === "domain" ? "the domain's own prompt" : "write a prompt");
  el("least-field").hidden = !model.boxes;
}

el("model").addEventListener("change", describe);

// Least confidence of a box; the domain's own until the slider is moved.
let least = null;
el("least").value = 0.5;
el("least-value").textContent = "the domain's own";
el("least").addEventListener("input", () => {
  least = Number(el("least").value);
  el("least-value").textContent = least.toFixed(2);
});

// The image or video

function take(file) {
  if (!file) return;
  if (!/^(image|video)\//.test(file.type)) {
    fail(`${file.name} is neither an image nor a video.`);
    return;
  }
  if (media) URL.revokeObjectURL(media.url);
  media = { file, url: URL.createObjectURL(file), video: file.type.startsWith("video/") };
  el("chosen").textContent = `${file.name} (${bytes(file.size)})`;
  el("error").hidden = true;
  show();
}

function show() {
  el("figure").hidden = false;
  el("boxes").replaceChildren();
  el("timing").textContent = "";
  el("said").replaceChildren();
  el("picture").hidden = media.video;
  el("clip").hidden = !media.video;
  if (media.video) el("clip").src = media.url;
  else el("picture").src = media.url;
}

el("file").addEventListener("change", () => take(el("file").files[0]));
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
  take(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));

// Requests

el("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    ask();
  }
  if (event.key === "Escape" && running) running.abort();
});
el("stop").addEventListener("click", () => running && running.abort());

async function ask() {
  const model = chosen();
  if (!model || running) return;
  const prompt = el("prompt").value.trim();
  if (!media && (model.head || !prompt)) {
    fail(model.head ? "Choose an image or a video first." : "Write a prompt or choose an image first.");
    return;
  }
  running = new AbortController();
  el("run").disabled = true;
  el("stop").hidden = false;
  el("error").hidden = true;
  if (media) show();
  else el("figure").hidden = true;
  el("said").replaceChildren();
  const began = performance.now();
  try {
    if (model.head) await askHead(model, prompt, began);
    else await askLanguageModel(model, prompt, began);
  } catch (error) {
    fail(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    running = null;
    el("run").disabled = false;
    el("stop").hidden = true;
    refresh();
  }
}

async function askHead(model, prompt, began) {
  const form = new FormData();
  form.append(media.video ? "video" : "image", media.file, media.file.name);
  if (prompt) form.append("prompt", prompt);
  if (least !== null && model.boxes) form.append("min_score", String(least));
  const path = `v1/vision/${encodeURIComponent(model.id)}`;
  const response = await call(path, { method: "POST", body: form, signal: running.signal });
  const answer = await response.json();
  const result = answer.results[0];
  if (result.detections) {
    drawBoxes(result);
  } else {
    listLabels(result);
  }
  warn(answer.warnings);
  took(began, `${milliseconds(answer.seconds * 1000)} in the server, ${answer.mode} mode`);
}

async function askLanguageModel(model, prompt, began) {
  const content = [];
  if (prompt) content.push({ type: "text", text: prompt });
  if (media) {
    const kind = media.video ? "video_url" : "image_url";
    content.push({ type: kind, [kind]: { url: await dataUrl(media.file) } });
  }
  const body = {
    model: model.id,
    messages: [{ role: "user", content }],
    stream: true,
    stream_options: { include_usage: true },
  };
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  const text = document.createElement("p");
  text.className = "text";
  el("said").append(text);
  let first = null;
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) usage = event.usage;
    if (event.valora) warn(event.valora.warnings);
    const delta = event.choices.length ? event.choices[0].delta.content : "";
    if (delta && first === null) first = performance.now() - began;
    text.textContent += delta || "";
  }
  const parts = [];
  if (first !== null) parts.push(`first token after ${milliseconds(first)}`);
  if (usage) parts.push(`${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} generated`);
  el("figure").hidden = false;
  if (!media) {
    el("picture").hidden = true;
    el("clip").hidden = true;
  }
  took(began, parts.join(", "));
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

// The result

function colour(label) {
  const labels = chosen().labels;
  const number = Math.max(0, labels.indexOf(label));
  return `hsl(${HUES[number % HUES.length]} 85% 55%)`;
}

function drawBoxes(result) {
  const svg = el("boxes");
  svg.setAttribute("viewBox", `0 0 ${result.width} ${result.height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const shown = el("picture").clientWidth || result.width;
  const size = (14 * result.width) / shown; // 14 pixels on the screen
  if (!media.video) {
    for (const found of result.detections) {
      const [x0, y0, x1, y1] = found.box;
      const box = document.createElementNS(SVG, "rect");
      box.setAttribute("x", x0);
      box.setAttribute("y", y0);
      box.setAttribute("width", Math.max(0, x1 - x0));
      box.setAttribute("height", Math.max(0, y1 - y0));
      box.setAttribute("stroke", colour(found.label));
      const name = document.createElementNS(SVG, "text");
      name.setAttribute("x", x0 + size / 4);
      name.setAttribute("y", y0 + size > result.height ? y0 : y0 + size);
      name.setAttribute("font-size", size);
      name.setAttribute("stroke-width", size / 7);
      name.textContent = `${found.label} ${found.confidence.toFixed(2)}`;
      svg.append(box, name);
    }
  }
  const rows = result.detections.map((found) => [
    found.label, found.confidence, found.box.map((value) => value.toFixed(1)).join(", "),
  ]);
  if (!rows.length) say("No object was found at this confidence.");
  else table(["label", "confidence", "box (x0, y0, x1, y1)"], rows);
}

function listLabels(result) {
  const rows = Object.entries(result.confidences || {});
  rows.sort((a, b) => b[1] - a[1]);
  table(["label", "confidence"], rows.slice(0, 20));
}

function table(titles, rows) {
  const made = document.createElement("table");
  const head = made.createTHead().insertRow();
  for (const title of titles) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = title;
    head.append(cell);
  }
  const body = made.createTBody();
  for (const [label, confidence, ...more] of rows) {
    const row = body.insertRow();
    const name = row.insertCell();
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colour(label);
    name.append(swatch, label);
    const sure = row.insertCell();
    sure.className = "number";
    const bar = document.createElement("meter");
    bar.value = confidence;
    bar.setAttribute("aria-hidden", "true");
    sure.append(bar, ` ${confidence.toFixed(3)}`);
    for (const item of more) {
      const cell = row.insertCell();
      cell.className = "number";
      cell.textContent = item;
    }
  }
  el("said").append(made);
}

function say(text) {
  const line = document.createElement("p");
  line.textContent = text;
  el("said").append(line);
}

function took(began, more) {
  el("timing").textContent = `${milliseconds(performance.now() - began)} in total${more ? `; ${more}` : ""}`;
}

function warn(warnings) {
  for (const warning of warnings || []) {
    const line = document.createElement("p");
    line.className = "hint";
    line.textContent = warning;
    el("said").append(line);
  }
}

function fail(text) {
  el("error").textContent = text;
  el("error").hidden = false;
}

function milliseconds(value) {
  return value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(2)} s`;
}

function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${(value / 2 ** (10 * step)).toFixed(step ? 1 : 0)} ${units[step]}`;
}

// The live panel

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(0)} %`;
}

async function refresh() {
  if (el("key-dialog").open) return;
  try {
    const now = await (await call("v1/status")).json();
    const total = Math.max(1, now.pages_total);
    el("state").textContent = now.ready ? "ready" : "not ready";
    el("s-running").textContent = now.running;
    el("s-waiting").textContent = now.waiting;
    el("s-mode").textContent = now.mode;
    el("s-merged").textContent = now.merged_adapter || "none";
    el("s-switches").textContent = now.switches;
    el("s-adapters").textContent = `${now.adapters_resident.length} of ${now.adapters_known}`;
    el("s-prefix").textContent = percent(now.prefix_hit_ratio);
    el("s-image").textContent = percent(now.image_hit_ratio);
    el("s-memory").textContent = bytes(now.memory_bytes);
    el("p-kv").style.width = `${(100 * now.pages_kv) / total}%`;
    el("p-contexts").style.width = `${(100 * now.pages_contexts) / total}%`;
    el("p-adapters").style.width = `${(100 * now.pages_adapters) / total}%`;
    el("pages-said").textContent =
      `${now.pages_kv} KV cache, ${now.pages_contexts} documents, ${now.pages_adapters} adapters, ${now.pages_free} free of ${now.pages_total} pages`;
  } catch {
    el("state").textContent = "not reachable";
  }
}

async function start() {
  try {
    await loadModels();
    await refresh();
  } catch (error) {
    fail(error.message);
  }
}

start();
setInterval(() => document.hidden || refresh(), 1000);
