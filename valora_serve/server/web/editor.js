// Boxes of the picture that are moved, resized, drawn, relabelled and deleted: by mouse, touch and keyboard.

import { el, make } from "./api.js";

const EDGES = ["nw", "n", "ne", "e", "se", "s", "sw", "w"];
const LEAST = 4; // pixels on the screen that a pointer must move before something is drawn
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const OTHER = "\n"; // value of the choice of another label

// What it edits and whom it tells: {corrections, width, height, view, labels: [{domain, label, text}],
// visible(box), reveal(box), told(only what is drawn)}.
let work = null;
let chosen = null; // id of a box
let active = null; // what a pointer is doing: {id, pointer, edge, from, box}
let drawing = false; // the next press draws a box, wherever it is
const grips = new Map(); // button of each box, by id
const handles = EDGES.map((edge) => make("span", { className: `handle ${edge}` }));
handles.forEach((handle, place) => { handle.dataset.edge = EDGES[place]; });

export const editing = () => el("correct").getAttribute("aria-pressed") === "true";

// Show the boxes of a picture for correction, or none.
export function edit(on) {
  if (on?.corrections !== work?.corrections) {
    chosen = active = null;
    press(false);
  }
  work = on;
  render();
}

// The boxes as they are on the screen, with what a pointer is about to do.
export function seen(corrections) {
  if (!active || corrections !== work?.corrections) return corrections.boxes;
  if (active.id === null) {
    const first = work.labels[0];
    return [...corrections.boxes, { id: null, ...first, confidence: null, box: active.box }];
  }
  return corrections.boxes.map((one) => (one.id === active.id ? { ...one, box: active.box } : one));
}

export const isChosen = (id) => editing() && id === chosen;

export function render() {
  const shown = Boolean(work) && editing();
  el("edit").hidden = !shown;
  el("editing").hidden = !shown;
  if (!shown) return;
  const boxes = seen(work.corrections).filter((one) => one.id !== null && work.visible(one));
  if (!boxes.some((one) => one.id === chosen)) chosen = null;
  for (const [id, grip] of grips) {
    if (boxes.some((one) => one.id === id)) continue;
    const had = grip === document.activeElement;
    grip.remove();
    grips.delete(id);
    if (had) (el("edit").querySelector(".grip") || el("new-box")).focus();
  }
  const area = (one) => (one.box[2] - one.box[0]) * (one.box[3] - one.box[1]);
  const order = [...boxes].sort((a, b) => area(b) - area(a)); // small ones lie above large ones
  boxes.forEach((one, place) => {
    const grip = grips.get(one.id) || grow(one.id, boxes.slice(place + 1).find((later) => grips.has(later.id)));
    const change = work.corrections.changeOf(one);
    const [x0, y0, x1, y1] = one.box.map(Math.round);
    const facts = [one.label, one.confidence === null ? "" : `confidence ${one.confidence.toFixed(2)}`, change].filter(Boolean);
    grip.setAttribute("aria-label", `${facts.join(", ")}: at ${x0}, ${y0}, size ${x1 - x0} by ${y1 - y0}`);
    grip.setAttribute("aria-pressed", String(one.id === chosen));
    grip.style.zIndex = order.indexOf(one) + 1;
    lay(grip, one.box);
  });
  const target = boxes.find((one) => one.id === chosen);
  el("frame").hidden = !target;
  if (target) lay(el("frame"), target.box);
  el("edit").classList.toggle("drawing", drawing);
  const { corrections } = work;
  el("undo").disabled = !corrections.past.length;
  el("redo").disabled = !corrections.future.length;
  el("reset").disabled = !corrections.changed;
  el("delete").disabled = el("label").disabled = !target;
  offerLabels(target);
}

function lay(node, [x0, y0, x1, y1]) {
  const { width, height } = work;
  Object.assign(node.style, {
    left: `${(100 * x0) / width}%`, top: `${(100 * y0) / height}%`,
    width: `${(100 * (x1 - x0)) / width}%`, height: `${(100 * (y1 - y0)) / height}%`,
  });
}

// The button of a box, before that of a later one: Tab goes through them in order.
function grow(id, later) {
  const grip = make("button", { type: "button", className: "grip" });
  grip.dataset.id = id;
  grip.addEventListener("focus", () => choose(id));
  grip.addEventListener("click", (event) => event.detail || el("label").focus()); // Enter or space
  grips.set(id, grip);
  el("edit").insertBefore(grip, later ? grips.get(later.id) : null);
  return grip;
}

function choose(id) {
  if (chosen === id) return;
  chosen = id;
  el("label-other").hidden = true;
  work.told();
}

function offerLabels(target) {
  const labels = [...work.labels];
  const key = (one) => `${one.domain}\t${one.label}`;
  if (target && !labels.some((one) => key(one) === key(target))) labels.push({ ...target, text: target.label });
  el("label").replaceChildren(...labels.map((one) => new Option(one.text, key(one))), new Option("Another label…", OTHER));
  if (target) el("label").value = key(target);
  else el("label").selectedIndex = -1;
}

function say(text) {
  el("edit-said").textContent = text;
}

function press(on) {
  drawing = on;
  el("new-box").setAttribute("aria-pressed", String(on));
  el("edit").classList.toggle("drawing", on);
}

// What buttons and keys do

function undo() {
  if (!work.corrections.past.length) return;
  work.corrections.undo();
  say("Undone.");
  work.told();
  stay("undo", "redo");
}

function redo() {
  if (!work.corrections.future.length) return;
  work.corrections.redo();
  say("Done again.");
  work.told();
  stay("redo", "undo");
}

// A button that had the focus and is disabled now gives it to another one.
function stay(from, to) {
  const at = document.activeElement;
  if (at === document.body || (at === el(from) && at.disabled)) el(to).focus();
}

function remove() {
  const target = work.corrections.get(chosen);
  if (!target) return;
  work.corrections.remove(chosen);
  chosen = null;
  say(`${target.label} deleted.`);
  work.told();
  stay("delete", "new-box");
}

function insert(box) {
  const first = work.labels[0];
  const before = work.corrections.get(chosen);
  const { domain, label } = before || first;
  const id = work.corrections.add(domain, label, box);
  chosen = id;
  work.reveal({ domain, label });
  say(`${label} added: choose its label.`);
  work.told();
  grips.get(id)?.focus({ preventScroll: true });
}

// A box in the middle of what is seen of the picture, for those who have no pointer.
function insertInTheMiddle() {
  const { view, width, height } = work;
  const { port, scale } = view;
  const across = Math.min(width, port.clientWidth / scale);
  const down = Math.min(height, port.clientHeight / scale);
  const x = Math.min(Math.max(0, port.scrollLeft / scale) + across / 2, width - across / 2);
  const y = Math.min(Math.max(0, port.scrollTop / scale) + down / 2, height - down / 2);
  insert([x - across / 8, y - down / 8, x + across / 8, y + down / 8]);
}

function relabel(domain, label) {
  const target = work.corrections.get(chosen);
  if (!target || (target.domain === domain && target.label === label)) return;
  work.corrections.put(chosen, { domain, label });
  work.reveal({ domain, label });
  say(`${target.label} is now ${label}.`);
  work.told();
}

// A box that moves or whose edges move, and stays in the picture. Edges may cross.
function dragged([x0, y0, x1, y1], edge, across, down) {
  const { width, height } = work;
  if (edge === "move") {
    const dx = Math.min(Math.max(across, -x0), width - x1);
    const dy = Math.min(Math.max(down, -y0), height - y1);
    return [x0 + dx, y0 + dy, x1 + dx, y1 + dy];
  }
  const at = (value, size) => Math.min(Math.max(value, 0), size);
  const xs = [edge.includes("w") ? at(x0 + across, width) : x0, edge.includes("e") ? at(x1 + across, width) : x1];
  const ys = [edge.includes("n") ? at(y0 + down, height) : y0, edge.includes("s") ? at(y1 + down, height) : y1];
  return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
}

// Pointers

function point(event) {
  const place = el("edit").getBoundingClientRect();
  const at = (value, size) => Math.min(Math.max(value, 0), size);
  return [
    at(((event.clientX - place.left) / place.width) * work.width, work.width),
    at(((event.clientY - place.top) / place.height) * work.height, work.height),
  ];
}

el("edit").addEventListener("pointerdown", (event) => {
  event.stopPropagation(); // the viewport does not pan
  if (event.button || !work) return;
  if (active) { // a second finger
    stop();
    return;
  }
  const { edge } = event.target.dataset;
  const grip = event.target.closest(".grip");
  const pointer = event.pointerId;
  const from = point(event);
  if (!drawing && edge) active = { id: chosen, pointer, edge, from };
  else if (!drawing && grip) active = { id: Number(grip.dataset.id), pointer, edge: "move", from };
  else if (drawing || event.pointerType === "mouse") active = { id: null, pointer, edge: "se", from };
  else return; // a finger on the ground scrolls
  event.preventDefault();
  if (active.id !== null) {
    active.start = work.corrections.get(active.id).box;
    active.box = active.start;
    grips.get(active.id).focus({ preventScroll: true });
  } else {
    active.start = active.box = [...from, ...from];
  }
  el("edit").setPointerCapture(pointer);
});

el("edit").addEventListener("pointermove", (event) => {
  if (!active || event.pointerId !== active.pointer) return;
  const [x, y] = point(event);
  const [across, down] = [x - active.from[0], y - active.from[1]];
  active.far ||= Math.hypot(across, down) * work.view.scale >= LEAST;
  if (!active.far) return;
  active.box = dragged(active.start, active.edge, across, down);
  work.told(true);
});

el("edit").addEventListener("pointerup", (event) => {
  if (!active || event.pointerId !== active.pointer) return;
  const { id, box, far } = active;
  active = null;
  const thin = Math.min(box[2] - box[0], box[3] - box[1]) * work.view.scale < LEAST;
  if (id === null) {
    if (far && !thin) {
      press(false);
      insert(box);
      return;
    }
  } else if (far && !thin) {
    work.corrections.put(id, { box });
    say(`${work.corrections.get(id).label} moved.`);
  }
  work.told();
});

function stop() {
  active = null;
  work.told();
}
el("edit").addEventListener("pointercancel", stop);

// Keys

el("edit").addEventListener("keydown", (event) => {
  const grip = event.target.closest(".grip");
  const arrow = ARROWS[event.key];
  if (event.key === "Escape" && (active || drawing)) {
    press(false);
    stop();
  } else if (arrow && grip && !event.altKey && !event.metaKey) {
    const id = Number(grip.dataset.id);
    const step = Math.max(1, 1 / work.view.scale) * (event.ctrlKey ? 10 : 1);
    const edge = event.shiftKey ? "se" : "move";
    const before = work.corrections.get(id).box;
    const box = dragged(before, edge, arrow[0] * step, arrow[1] * step);
    const least = 1; // pixel: edges do not cross by keys
    if (edge === "se" && (box[0] !== before[0] || box[1] !== before[1] || box[2] - box[0] < least || box[3] - box[1] < least)) return;
    work.corrections.put(id, { box }, `${edge} ${id}`);
    work.told();
  } else if ((event.key === "Delete" || event.key === "Backspace") && grip) {
    remove();
  } else {
    return;
  }
  event.preventDefault();
  event.stopPropagation();
});

document.addEventListener("keydown", (event) => {
  if (!work || !editing() || el("look").hidden || document.querySelector("dialog[open]")) return;
  if (/^(INPUT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range") return;
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (command && key === "z") event.shiftKey ? redo() : undo();
  else if (command && key === "y") redo();
  else if (!command && !event.altKey && key === "n" && event.target.tagName !== "SELECT") insertInTheMiddle();
  else return;
  event.preventDefault();
});

el("new-box").addEventListener("click", (event) => {
  if (event.detail) press(!drawing);
  else insertInTheMiddle(); // by the keyboard
});
el("delete").addEventListener("click", remove);
el("undo").addEventListener("click", undo);
el("redo").addEventListener("click", redo);
el("reset").addEventListener("click", () => {
  work.corrections.reset();
  say("The model's boxes are back; undo brings yours again.");
  work.told();
  stay("reset", "undo");
});
el("label").addEventListener("change", () => {
  const other = el("label").value === OTHER;
  el("label-other").hidden = !other;
  if (other) {
    el("label-text").value = "";
    el("label-text").focus();
    return;
  }
  relabel(...el("label").value.split("\t"));
});
el("label-text").addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    el("label-other").hidden = true;
    render();
    el("label").focus();
  }
  if (event.key !== "Enter") return;
  event.preventDefault();
  event.stopPropagation();
  const text = el("label-text").value.trim().replace(/\s+/g, " ");
  el("label-other").hidden = true;
  const target = work.corrections.get(chosen);
  if (text && target) relabel(target.domain, text);
  else render();
  el("label").focus();
});
el("correct").addEventListener("click", () => {
  el("correct").setAttribute("aria-pressed", String(!editing()));
  press(false);
  work?.told();
  if (!work) render();
});
el("frame").append(...handles);
