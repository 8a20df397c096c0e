// What the bundles promise: accuracy on test beside what was required and what the teacher reaches.

import { el, make } from "./api.js";

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
