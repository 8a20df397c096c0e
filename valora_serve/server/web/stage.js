// The picture with its boxes: right proportions, zoom, labels beside what they name.

import { SVG, el } from "./api.js";

const HUES = [165, 25, 265, 200, 330, 55, 95, 230, 300, 0];
const LARGEST = 8; // times that a small picture is enlarged
const TEXT = 13; // pixels on the screen
let zoom = 1;
let shown = { width: 1, height: 1, boxes: [] };

export function colour(number) {
  const round = Math.floor(number / HUES.length);
  return `hsl(${HUES[number % HUES.length]} 85% ${round % 2 ? 70 : 55}%)`;
}

// boxes: {x0, y0, x1, y1, label, confidence, colour}
export function draw(width, height, boxes) {
  shown = { width, height, boxes };
  layout();
}

export function resetZoom() {
  setZoom(1);
}

function setZoom(value) {
  zoom = Math.min(16, Math.max(1, value));
  layout();
}

function layout() {
  const { width, height } = shown;
  const port = el("viewport");
  if (!port.clientWidth) return; // in a view that is not shown
  const room = { width: port.clientWidth, height: Math.max(240, 0.62 * innerHeight) };
  const scale = Math.min(room.width / width, room.height / height, LARGEST) * zoom;
  const centre = {
    x: (port.scrollLeft + port.clientWidth / 2) / Math.max(1, port.scrollWidth),
    y: (port.scrollTop + port.clientHeight / 2) / Math.max(1, port.scrollHeight),
  };
  el("stage").style.width = `${width * scale}px`;
  el("stage").style.height = `${height * scale}px`;
  el("scale").textContent = `${Math.round(100 * zoom)} %`;
  el("smaller").disabled = el("fit").disabled = zoom <= 1;
  port.scrollLeft = centre.x * port.scrollWidth - port.clientWidth / 2;
  port.scrollTop = centre.y * port.scrollHeight - port.clientHeight / 2;
  drawBoxes(scale);
}

function drawBoxes(scale) {
  const { width, height, boxes } = shown;
  const svg = el("boxes");
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const size = TEXT / scale;
  const rects = [];
  const names = [];
  const placed = [];
  for (const found of boxes) {
    const box = document.createElementNS(SVG, "rect");
    const across = Math.max(0, found.x1 - found.x0);
    const down = Math.max(0, found.y1 - found.y0);
    for (const [name, value] of [["x", found.x0], ["y", found.y0], ["width", across], ["height", down]]) {
      box.setAttribute(name, value);
    }
    box.setAttribute("stroke", found.colour);
    rects.push(box);
    const text = `${found.label} ${found.confidence.toFixed(2)}`;
    const wide = 0.62 * size * text.length;
    const x = Math.max(0, Math.min(found.x0, width - wide));
    const y = place(found, x, wide, size, height, placed);
    placed.push({ x, y, wide });
    const name = document.createElementNS(SVG, "text");
    name.setAttribute("x", x);
    name.setAttribute("y", y);
    name.setAttribute("font-size", size);
    name.setAttribute("stroke-width", size / 4);
    name.textContent = text;
    names.push(name);
  }
  svg.append(...rects, ...names);
}

// Baseline of a label: above its box, below it or inside, where no other label is.
function place(found, x, wide, size, height, placed) {
  const places = [found.y0 - 0.3 * size, found.y1 + size, found.y0 + size, found.y1 - 0.3 * size];
  const fits = places.filter((y) => y >= 0.95 * size && y <= height - 0.1 * size);
  const free = fits.find((y) => !placed.some((other) => Math.abs(other.y - y) < size && other.x < x + wide && x < other.x + other.wide));
  return free ?? fits[0] ?? Math.min(height - 0.2 * size, found.y0 + size);
}

el("larger").addEventListener("click", () => setZoom(zoom * 1.5));
el("smaller").addEventListener("click", () => setZoom(zoom / 1.5));
el("fit").addEventListener("click", () => setZoom(1));
el("viewport").addEventListener("keydown", (event) => {
  const step = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 }[event.key];
  if (step) setZoom(zoom * step);
  else if (event.key === "0") setZoom(1);
  else return;
  event.preventDefault();
});
el("viewport").addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return; // a plain wheel scrolls
  event.preventDefault();
  setZoom(zoom * (event.deltaY < 0 ? 1.2 : 1 / 1.2));
}, { passive: false });

let held = null;
el("viewport").addEventListener("pointerdown", (event) => {
  if (zoom <= 1 || event.pointerType !== "mouse") return; // fingers scroll by themselves
  held = { x: event.clientX + el("viewport").scrollLeft, y: event.clientY + el("viewport").scrollTop };
  el("viewport").setPointerCapture(event.pointerId);
});
el("viewport").addEventListener("pointermove", (event) => {
  if (held) el("viewport").scrollTo(held.x - event.clientX, held.y - event.clientY);
});
for (const name of ["pointerup", "pointercancel"]) {
  el("viewport").addEventListener(name, () => { held = null; });
}
new ResizeObserver(() => layout()).observe(el("viewport"));
