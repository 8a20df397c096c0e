// What the engine does now and did in the last two minutes; what the bundles promise.

import { SVG, bytes, call, el, make } from "./api.js";

const SECONDS = 120;
const queue = [];

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(0)} %`;
}

export async function refresh() {
  if (el("key-dialog").open) return;
  try {
    const now = await (await call("v1/status")).json();
    const total = Math.max(1, now.pages_total);
    el("state").textContent = now.ready ? "ready" : "not ready";
    el("s-running").textContent = now.running;
    el("s-waiting").textContent = now.waiting;
    el("s-mode").textContent = now.mode;
    el("s-merged").textContent = el("s-merged").title = now.merged_adapter || "none";
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
    queue.push([now.running, now.waiting]);
    if (queue.length > SECONDS) queue.shift();
    chart();
  } catch {
    el("state").textContent = "not reachable";
  }
}

function chart() {
  const most = Math.max(1, ...queue.map(([running, waiting]) => running + waiting));
  const line = (value, name) => {
    const made = document.createElementNS(SVG, "polyline");
    const first = SECONDS - queue.length;
    made.setAttribute("points", queue.map((row, place) => `${first + place},${38 - (36 * value(row)) / most}`).join(" "));
    made.setAttribute("class", name);
    return made;
  };
  el("queue").replaceChildren(line(([running, waiting]) => running + waiting, "waiting"), line(([running]) => running, "running"));
  const peak = Math.max(...queue.map(([running, waiting]) => running + waiting));
  el("queue-said").textContent = `at most ${peak} at a time`;
}

export function promises(models) {
  const domains = models.filter((model) => model.kind === "domain" && model.accuracy !== null);
  if (!domains.length) {
    el("promised").replaceChildren(make("p", { className: "hint", textContent: "No bundle with promises is served." }));
    return;
  }
  const head = make("tr", {}, ...["domain", "task", "metric", "accuracy", "on test", "required", "teacher", "of teacher", "adapter"].map(
    (text) => make("th", { scope: "col", textContent: text }),
  ));
  const rows = domains.map((model) => {
    const teacher = model.teacher;
    const number = (value) => make("td", { className: "number", textContent: value == null ? "–" : value.toFixed(3) });
    const share = teacher ? `${((100 * model.accuracy) / teacher).toFixed(0)} %` : "–";
    const kept = model.required == null || model.accuracy >= model.required;
    const name = make("th", { scope: "row", textContent: model.id });
    if (!kept) name.append(make("span", { className: "missed", textContent: " below what was required" }));
    return make("tr", {}, name, make("td", { textContent: model.task || "" }), make("td", { textContent: model.metric || "" }),
      make("td", {}, bar(model)), number(model.accuracy), number(model.required), number(teacher),
      make("td", { className: "number", textContent: share }), make("td", { textContent: model.adapter || "none" }));
  });
  el("promised").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function bar(model) {
  const most = Math.max(1, Math.ceil(Math.max(model.accuracy, model.required || 0, model.teacher || 0)));
  const made = make("div", { className: "bar", "aria-hidden": "true" });
  const part = (name, value, property) => {
    if (value == null) return;
    const mark = make("span", { className: name });
    mark.style[property] = `${(100 * value) / most}%`;
    made.append(mark);
  };
  part("filled", model.accuracy, "width");
  part("required", model.required, "left");
  part("teacher", model.teacher, "left");
  return made;
}
