// The answers about the files: boxes over pictures, their corrections, the teacher beside, tables and text.

import { el, make } from "./api.js";
import { edit, editing, isChosen, render, seen } from "./editor.js";
import { save } from "./save.js";
import { View, colour, resetZoom } from "./stage.js";
import { shownItem, state } from "./state.js";

const AGREE = 0.5; // overlap (IoU) from which two boxes are the same object, as the promises count
const mine = new View(el("viewport"), el("stage"), el("boxes"));
const teachers = new View(el("beside-viewport"), el("beside-stage"), el("beside-boxes"));

// Show one of the files with what was answered so far.
export function show(place) {
  state.current = place;
  const item = shownItem();
  el("gallery").hidden = true;
  el("clear").hidden = false;
  el("figure").hidden = el("views").hidden = el("tools").hidden = false;
  el("picture").hidden = item.video;
  el("clip").hidden = !item.video;
  el("zoom").hidden = item.video;
  const ready = () => {
    const picture = item.video ? el("clip") : el("picture");
    item.width ||= item.video ? picture.videoWidth : picture.naturalWidth;
    item.height ||= item.video ? picture.videoHeight : picture.naturalHeight;
    if (shownItem() === item) {
      resetZoom();
      tell();
    }
  };
  if (item.video) {
    el("clip").onloadedmetadata = ready;
    el("clip").src = item.url;
  } else {
    el("picture").onload = ready;
    el("picture").src = el("beside-picture").src = item.url;
    el("picture").alt = item.name;
    el("beside-picture").alt = `${item.name} again`;
  }
  tell();
}

export function strip() {
  const { items, current } = state;
  el("strip").hidden = items.length < 2;
  if (items.length < 2) return;
  const at = [...el("strip").children].indexOf(document.activeElement);
  el("strip").replaceChildren(...items.map((item, place) => {
    const said = item.failed ? "failed" : item.answers.length ? String(item.answers[0].label ?? item.corrections.boxes.length) : "";
    const changed = item.corrections.changed;
    const picture = item.video ? make("span", { className: "film", textContent: "▶" }) : make("img", { src: item.url, alt: "" });
    const made = make("button", { type: "button", className: "thumb", title: item.name }, picture,
      make("span", { textContent: changed ? `${said} ✎` : said }));
    made.setAttribute("aria-label", [item.name, said, changed ? "corrected" : ""].filter(Boolean).join(" "));
    made.setAttribute("aria-pressed", String(place === current));
    made.addEventListener("click", () => show(place));
    return made;
  }));
  if (at >= 0) el("strip").children[at]?.focus({ preventScroll: true });
}

// The name in the legend and the number of the colour: of the domain where several were asked, of the label otherwise.
function kindOf(item, { domain, label }) {
  const asked = item.asked;
  if (asked.length > 1) return { name: domain, number: asked.findIndex((model) => model.id === domain) };
  const labels = asked.length ? asked[0].labels : [];
  if (labels.includes(label)) return { name: label, number: labels.indexOf(label) };
  const more = [...new Set(item.corrections.boxes.map((one) => one.label))].filter((other) => !labels.includes(other)).sort();
  return { name: label, number: labels.length + Math.max(0, more.indexOf(label)) };
}

const comparing = (item) => Boolean(item.teacher?.detections) && el("compare").getAttribute("aria-pressed") === "true";

function visible(item, one) {
  if (comparing(item) && one.domain !== item.teacher.domain) return false;
  return !state.hidden.has(kindOf(item, one).name);
}

function labelsOf(item) {
  const pairs = item.asked.flatMap((model) => (model.labels.length ? model.labels : [model.id]).map((label) => ({ domain: model.id, label })));
  const shared = (label) => pairs.filter((one) => one.label === label).length > 1;
  return pairs.map((one) => ({ ...one, text: shared(one.label) ? `${one.domain}: ${one.label}` : one.label }));
}

// Show what was answered about the current file; while a box is dragged, only what is drawn.
export function tell(drawn = false) {
  const item = shownItem();
  if (!item) return;
  const { corrections, answers } = item;
  const finds = answers.some((answer) => answer.detections);
  const correctable = finds && !item.video && !state.running;
  el("correct").hidden = item.video || !item.asked.some((model) => model.boxes);
  el("correct").disabled = !correctable;
  el("compare").hidden = !item.teacher?.detections;
  const boxes = seen(corrections).filter((one) => visible(item, one));
  mine.draw(item.width || 1, item.height || 1, item.video ? [] : boxes.map((one) => ({
    ...one, colour: colour(kindOf(item, one).number), change: corrections.changeOf(one), chosen: isChosen(one.id),
  })));
  if (drawn) {
    render();
    return;
  }
  edit(correctable ? {
    corrections, width: item.width || 1, height: item.height || 1, view: mine, labels: labelsOf(item), told: tell,
    visible: (one) => visible(item, one), reveal: (one) => state.hidden.delete(kindOf(item, one).name),
  } : null);
  legend(item);
  beside(item);
  strip();
  el("said").replaceChildren();
  if (!answers.length) {
    if (item.failed) el("said").append(make("p", { className: "wrong", textContent: item.failed }));
    return;
  }
  if (finds) boxTable(item, boxes);
  for (const answer of answers) {
    if (answer.confidences) {
      const rows = Object.entries(answer.confidences).map(([label, sure], number) => [label, sure, number]);
      rows.sort((a, b) => b[1] - a[1]);
      table(["label", "confidence"], rows.slice(0, 20));
    } else if (answer.text !== undefined && answer.text !== null) {
      el("said").append(make("p", { className: "text", textContent: answer.text }));
    }
  }
  const taught = item.teacher;
  if (taught && (taught.label ?? taught.text) != null) {
    const sure = taught.confidence == null ? "" : ` (${taught.confidence.toFixed(3)})`;
    say(`The teacher of ${taught.domain} answers: ${taught.label ?? taught.text}${sure}`);
  }
  warn([...new Set(answers.flatMap((answer) => answer.warnings || []))]);
}

function boxTable(item, boxes) {
  const { corrections } = item;
  if (!corrections.found.length && !corrections.boxes.length) {
    say("No object was found at this confidence.");
    return;
  }
  const changed = corrections.changed;
  const gone = editing() || changed ? corrections.deleted.filter((one) => visible(item, one)) : [];
  const sure = (one) => one.confidence ?? 2;
  const row = (one, change) => [one.label, one.confidence, kindOf(item, one).number,
    ...(changed ? [change] : []), one.box.map((value) => value.toFixed(1)).join(", ")];
  const rows = [...boxes].sort((a, b) => sure(b) - sure(a)).map((one) => row(one, corrections.changeOf(one)));
  table(["label", "confidence", ...(changed ? ["correction"] : []), "box (x0, y0, x1, y1)"],
    [...rows, ...gone.map((one) => row(one, "deleted"))]);
}

// Counts by colour; each can be switched off.
function legend(item) {
  const several = item.asked.length > 1;
  const found = item.corrections.boxes.map((one) => kindOf(item, one));
  const names = several ? item.asked.map((model, number) => [model.id, number])
    : [...new Map(found.map((one) => [one.name, one.number]))];
  const waited = (name) => several && !item.answers.some((answer) => answer.domain === name);
  const at = [...el("legend").children].findIndex((entry) => entry.contains(document.activeElement));
  el("legend").replaceChildren(...names.map(([name, number]) => {
    const count = waited(name) ? (state.running ? "…" : "–") : found.filter((one) => one.name === name).length;
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = colour(number);
    const made = make("button", { type: "button", className: "chip" }, swatch, `${name} ${count}`);
    made.setAttribute("aria-pressed", String(!state.hidden.has(name)));
    made.addEventListener("click", () => {
      if (!state.hidden.delete(name)) state.hidden.add(name);
      tell();
    });
    return make("li", {}, made);
  }));
  if (at >= 0) el("legend").children[at]?.firstChild.focus({ preventScroll: true });
}

// The same picture with the boxes of the small model that taught the domain.
function beside(item) {
  const shown = comparing(item);
  el("views").classList.toggle("two", shown);
  el("beside").hidden = el("mine-said").hidden = el("agreement").hidden = !shown;
  if (!shown) return;
  const { domain, detections } = item.teacher;
  const ours = item.corrections.boxes.filter((one) => one.domain === domain);
  const many = (count) => `${count} ${count === 1 ? "box" : "boxes"}`;
  el("mine-said").textContent = `VaLoRA, domain ${domain}: ${many(ours.length)}`;
  el("beside-said").textContent = `Its teacher, the small model: ${many(detections.length)}`;
  teachers.draw(item.width || 1, item.height || 1, detections.map((one) => ({
    ...one, colour: colour(kindOf(item, { domain, label: one.label }).number), change: "", chosen: false,
  })));
  mine.layout();
  const both = agreeing(ours, detections);
  el("agreement").textContent = `In common: ${both} (overlap of at least ${AGREE}). Only VaLoRA's: ${ours.length - both}. Only the teacher's: ${detections.length - both}.`;
}

// How many boxes two lists have in common, each counted once, the best overlaps first.
function agreeing(ours, theirs) {
  const pairs = ours.flatMap((one) => theirs.map((other) => [overlap(one.box, other.box), one, other]))
    .filter(([share, one, other]) => share >= AGREE && one.label === other.label).sort((a, b) => b[0] - a[0]);
  const used = new Set();
  let both = 0;
  for (const [, one, other] of pairs) {
    if (used.has(one) || used.has(other)) continue;
    used.add(one).add(other);
    both += 1;
  }
  return both;
}

function overlap(a, b) {
  const area = ([x0, y0, x1, y1]) => Math.max(0, x1 - x0) * Math.max(0, y1 - y0);
  const both = area([Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3])]);
  return both / Math.max(1e-9, area(a) + area(b) - both);
}

function table(titles, rows) {
  const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col", textContent: title })));
  const body = rows.map(([label, confidence, number, ...more]) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = colour(number);
    const sure = confidence === null ? ["–"] : [make("meter", { value: confidence, "aria-hidden": "true" }), ` ${confidence.toFixed(3)}`];
    return make("tr", { className: more[0] === "deleted" ? "deleted" : "" }, make("td", {}, swatch, label),
      make("td", { className: "number" }, ...sure),
      ...more.map((text) => make("td", { className: "number", textContent: text })));
  });
  el("said").append(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function say(text) {
  el("said").append(make("p", { textContent: text }));
}

export function warn(warnings) {
  for (const warning of warnings || []) el("said").append(make("p", { className: "hint", textContent: warning }));
}

el("compare").addEventListener("click", () => {
  el("compare").setAttribute("aria-pressed", String(el("compare").getAttribute("aria-pressed") !== "true"));
  tell();
});

el("save").addEventListener("click", () => {
  const answered = state.items.filter((item) => item.answers.length);
  save(el("format").value, answered);
  for (const item of answered) item.corrections.saved = item.corrections.boxes;
});
