// The console: models, files, examples, and the views.

import { bytes, call, el, make } from "./api.js";
import { ask, fail, mayLose } from "./ask.js";
import { attach, offer } from "./chat.js";
import { documents, read } from "./contexts.js";
import { Corrections } from "./corrections.js";
import { onKey } from "./dialogs.js";
import { redraw, watch } from "./engine.js";
import { promises } from "./promises.js";
import { show } from "./results.js";
import { state } from "./state.js";

const EVERY = "*"; // every domain that finds boxes
const INVITATION = el("chosen").textContent;
let least = null; // least confidence of a box; each domain's own until the slider is moved

// The models

async function loadModels() {
  const listed = (await (await call("v1/models")).json()).data;
  const before = el("model").value;
  state.models = listed;
  el("model").replaceChildren();
  const finding = listed.filter((model) => model.boxes);
  if (finding.length > 1) el("model").append(new Option(`Every domain with boxes (${finding.length})`, EVERY));
  for (const [kind, title] of [["domain", "Domains"], ["context", "Documents"], ["adapter", "Adapters"], ["base", "Base model"]]) {
    const group = document.createElement("optgroup");
    group.label = title;
    for (const model of listed.filter((item) => item.encodes == null && (item.form ? "context" : item.kind) === kind)) {
      group.append(new Option(model.id, model.id));
    }
    if (group.children.length) el("model").append(group);
  }
  if ([...el("model").options].some((option) => option.value === before)) el("model").value = before;
  const base = listed.find((model) => model.kind === "base"); // which a key may not see
  el("base").textContent = base ? `on ${base.id}` : "";
  describe();
  offer(listed);
  promises(listed);
}

function targets() {
  if (el("model").value === EVERY) return state.models.filter((model) => model.boxes);
  return state.models.filter((model) => model.id === el("model").value);
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

el("model").addEventListener("change", describe);

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

// Take files in place of those before; gives whether it did.
async function take(files) {
  const given = [...files];
  el("file").value = ""; // the same files can be chosen again
  if (!given.length) return false;
  const wrong = given.find((file) => !/^(image|video)\//.test(file.type));
  if (wrong) {
    fail(`${wrong.name} is neither an image nor a video.`);
    return false;
  }
  if (state.running) {
    fail("Wait for the answers, or stop them, before you choose other files.");
    return false;
  }
  if (!(await mayLose())) return false;
  drop();
  state.items = given.map((file) => ({
    file, url: URL.createObjectURL(file), name: file.name, video: file.type.startsWith("video/"),
    frames: null, width: 0, height: 0, asked: [], answers: [], corrections: new Corrections(), teacher: null, failed: null,
  }));
  const total = given.reduce((sum, file) => sum + file.size, 0);
  el("chosen").textContent = given.length === 1 ? `${given[0].name} (${bytes(total)})` : `${given.length} files (${bytes(total)})`;
  el("error").hidden = el("saving").hidden = true;
  el("timing").textContent = "";
  show(0);
  return true;
}

function drop() {
  for (const item of state.items) URL.revokeObjectURL(item.url);
  state.items = [];
  state.current = 0;
  state.hidden.clear();
}

el("clear").addEventListener("click", async () => {
  if (!(await mayLose())) return;
  if (state.running) state.running.abort();
  drop();
  el("chosen").textContent = INVITATION;
  for (const id of ["figure", "strip", "saving", "clear", "error"]) el(id).hidden = true;
  el("gallery").hidden = false;
  el("said").replaceChildren();
  el("model").focus();
});

// What is dropped or pasted goes to the view that is open.
function receive(files) {
  if (!el("talk").hidden) attach([...files]);
  else if (!el("documents").hidden) read(files[0]);
  else if (!el("look").hidden) take(files);
}

el("file").addEventListener("change", () => take(el("file").files));
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  if (event.dataTransfer.files.length) receive(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) receive(event.clipboardData.files);
});
addEventListener("beforeunload", (event) => {
  if (state.items.some((item) => item.corrections.unsaved)) event.preventDefault();
});

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
    const model = state.models.find((one) => one.id === example.domain);
    const all = model && model.boxes && [...el("model").options].some((option) => option.value === EVERY);
    el("model").value = all ? EVERY : example.domain;
    el("prompt").value = example.question || "";
    describe();
    if (!(await take(example.video ? [files[0]] : files))) return;
    if (example.video) state.items[0].frames = files;
    if (example.teacher) state.items[0].teacher = { domain: example.domain, ...example.teacher };
    await request();
  } catch (error) {
    fail(error.message);
  }
}

// Requests

function request() {
  return ask(targets(), el("prompt").value.trim(), least);
}

el("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  request();
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !el("look").hidden) {
    event.preventDefault();
    request();
  }
  if (event.key === "Escape" && state.running) state.running.abort();
});
el("stop").addEventListener("click", () => state.running && state.running.abort());

// Views

const tabs = [...el("tabs").children];
function open(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    el(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  el("aside").hidden = tab === el("tab-engine");
  document.body.classList.toggle("wide", tab === el("tab-engine"));
  if (tab === el("tab-documents")) documents(false);
  redraw();
}
for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(tab);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    open(tabs[next % tabs.length]);
    tabs[next % tabs.length].focus();
  });
}
el("more").addEventListener("click", () => {
  open(el("tab-engine"));
  el("tab-engine").focus();
});
document.addEventListener("models-changed", () => loadModels().catch(() => {}));

async function start() {
  try {
    await loadModels();
    await Promise.all([loadExamples(), documents()]);
  } catch (error) {
    fail(error.message);
  }
}

onKey(() => {
  el("error").hidden = true;
  start();
});
start();
watch();
