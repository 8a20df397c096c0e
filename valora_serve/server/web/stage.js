// Pictures with their boxes: right proportions, one zoom for all of them, labels beside what they name.

import { SVG, el } from "./api.js";

const HUES = [165, 25, 265, 200, 330, 55, 95, 230, 300, 0];
const LARGEST = 8; // times that a small picture is enlarged
const TEXT = 12; // pixels on the screen
const LINE = 1.45; // height of a label's plate, in text sizes
const pen = document.createElement("canvas").getContext("2d"); // measures labels
pen.font = `600 ${TEXT}px system-ui, sans-serif`;
const views = [];
let zoom = 1;

export function colour(number) {
  const round = Math.floor(number / HUES.length);
  return `hsl(${HUES[number % HUES.length]} 85% ${round % 2 ? 70 : 55}%)`;
}

export function resetZoom() {
  setZoom(1);
}

function setZoom(value) {
  zoom = Math.min(16, Math.max(1, value));
  for (const view of views) view.layout();
  el("scale").textContent = `${Math.round(100 * zoom)} %`;
  el("smaller").disabled = el("fit").disabled = zoom <= 1;
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A picture with its boxes in a viewport that scrolls.
export class View {
  constructor(port, stage, boxes) {
    Object.assign(this, { port, stage, boxes, width: 1, height: 1, shown: [], scale: 1 });
    views.push(this);
    this.listen();
  }

  // boxes: [{box: [x0, y0, x1, y1], label, confidence, colour, change, chosen}]
  draw(width, height, boxes) {
    Object.assign(this, { width, height, shown: boxes });
    this.layout();
  }

  layout() {
    const { port, width, height } = this;
    if (!port.clientWidth) return; // in a view that is not shown
    const room = { width: port.clientWidth, height: Math.max(240, 0.62 * innerHeight) };
    this.scale = Math.min(room.width / width, room.height / height, LARGEST) * zoom;
    const centre = {
      x: (port.scrollLeft + port.clientWidth / 2) / Math.max(1, port.scrollWidth),
      y: (port.scrollTop + port.clientHeight / 2) / Math.max(1, port.scrollHeight),
    };
    this.stage.style.width = `${width * this.scale}px`;
    this.stage.style.height = `${height * this.scale}px`;
    port.scrollLeft = centre.x * port.scrollWidth - port.clientWidth / 2;
    port.scrollTop = centre.y * port.scrollHeight - port.clientHeight / 2;
    this.drawBoxes();
  }

  drawBoxes() {
    const { width, height, scale } = this;
    this.boxes.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.boxes.setAttribute("preserveAspectRatio", "none");
    const size = TEXT / scale;
    const beside = Math.max(0, (this.port.clientWidth / scale - width) / 2); // room left and right of the picture
    const rects = [];
    const names = [];
    const placed = [];
    for (const { box: [x0, y0, x1, y1], label, confidence, colour: stroke, change, chosen } of this.shown) {
      const rect = svg("rect", { x: x0, y: y0, width: Math.max(0, x1 - x0), height: Math.max(0, y1 - y0), stroke });
      rect.classList.toggle("changed", Boolean(change));
      rect.classList.toggle("chosen", Boolean(chosen));
      rects.push(rect);
      const text = confidence === null ? label : `${label} ${confidence.toFixed(2)}`;
      const plate = { wide: (pen.measureText(text).width + 0.9 * TEXT) / scale, high: LINE * size };
      const at = place([x0, y0, x1, y1], plate, { width, height, beside }, placed, this.shown);
      placed.push(at);
      names.push(
        svg("path", { class: "plate", d: `M${at[0]} ${at[1]}H${at[2]}V${at[3]}H${at[0]}Z` }),
        svg("path", { class: "edge", fill: stroke, d: `M${at[0]} ${at[1]}h${0.25 * size}V${at[3]}H${at[0]}Z` }),
      );
      const name = svg("text", { x: at[0] + 0.5 * size, y: at[1] + 1.08 * size, "font-size": size });
      name.textContent = text;
      names.push(name);
    }
    this.boxes.replaceChildren(...rects, ...names);
  }

  listen() {
    const { port } = this;
    port.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own zoom
      const step = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 }[event.key];
      if (step) setZoom(zoom * step);
      else if (event.key === "0") setZoom(1);
      else return;
      event.preventDefault();
    });
    port.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // a plain wheel scrolls
      event.preventDefault();
      setZoom(zoom * (event.deltaY < 0 ? 1.2 : 1 / 1.2));
    }, { passive: false });
    port.addEventListener("scroll", () => {
      for (const other of views) {
        if (other !== this) other.port.scrollTo(port.scrollLeft, port.scrollTop);
      }
    });
    let held = null;
    port.addEventListener("pointerdown", (event) => {
      if (zoom <= 1 || event.pointerType !== "mouse" || event.button) return; // fingers scroll by themselves
      held = { x: event.clientX + port.scrollLeft, y: event.clientY + port.scrollTop };
      port.setPointerCapture(event.pointerId);
    });
    port.addEventListener("pointermove", (event) => {
      if (held) port.scrollTo(held.x - event.clientX, held.y - event.clientY);
    });
    for (const name of ["pointerup", "pointercancel"]) port.addEventListener(name, () => { held = null; });
    new ResizeObserver(() => this.layout()).observe(port);
  }
}

// Where a label's plate goes, [x0, y0, x1, y1]: beside what it names, off other labels, and off other boxes if there is room.
function place([x0, y0, x1, y1], { wide, high }, { width, height, beside }, placed, boxes) {
  const gap = 0.1 * high;
  const ways = [
    [x0, y0 - high - gap], [x1 - wide, y0 - high - gap], [x0, y1 + gap], [x1 - wide, y1 + gap],
    [x1 + gap, y0], [x0 - wide - gap, y0], [x1 + gap, y1 - high], [x0 - wide - gap, y1 - high],
    [x0, y0 + gap], [x0, y1 - high - gap],
  ];
  let best = null;
  ways.forEach(([left, top], number) => {
    const x = Math.max(-beside, Math.min(left, width + beside - wide));
    const y = Math.max(0, Math.min(top, height - high));
    const plate = [x, y, x + wide, y + high];
    const area = wide * high;
    const labels = placed.reduce((sum, other) => sum + common(plate, other), 0) / area;
    const own = common(plate, [x0, y0, x1, y1]) / area;
    const others = boxes.reduce((sum, other) => sum + common(plate, other.box), 0) / area - own;
    const cost = 8 * labels + 4 * own + others + 0.02 * number;
    if (!best || cost < best.cost) best = { cost, plate };
  });
  return best.plate;
}

function common(a, b) {
  const across = Math.min(a[2], b[2]) - Math.max(a[0], b[0]);
  const down = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
  return across > 0 && down > 0 ? across * down : 0;
}

el("larger").addEventListener("click", () => setZoom(zoom * 1.5));
el("smaller").addEventListener("click", () => setZoom(zoom / 1.5));
el("fit").addEventListener("click", () => setZoom(1));
