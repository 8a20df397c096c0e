// What the engine does now and did while this page was open: mode, switches, memory, queue; of every replica.

import { bytes, call, el, make } from "./api.js";
import { band, stacked } from "./charts.js";

const EVERY_MS = 1000;
const MOST = 900; // samples that are kept of an engine: a quarter of an hour
const REPLICAS = 32; // engines whose history is kept
const ROWS = 20; // of the table
const ALL = ""; // name of all replicas together
const histories = new Map([[ALL, []]]); // samples by replica
let now = null; // the last answer
let paused = false;
let asking = false;

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(0)} %`;
}

function sample(at, facts) {
  return {
    at, running: facts.running, waiting: facts.waiting, mode: facts.mode, merged: facts.merged_adapter,
    switches: facts.switches, kv: facts.pages_kv, contexts: facts.pages_contexts, adapters: facts.pages_adapters,
    free: facts.pages_free, total: facts.pages_total,
  };
}

function keep(name, made) {
  if (!histories.has(name)) {
    if (histories.size > REPLICAS) return;
    histories.set(name, []);
  }
  const samples = histories.get(name);
  samples.push(made);
  if (samples.length > MOST) samples.shift();
}

// Ask for the state once, quietly: nobody has asked for it.
export async function refresh() {
  if (asking) return;
  asking = true;
  try {
    now = await (await call("v1/status", { quiet: true })).json();
    const at = Date.now();
    keep(ALL, sample(at, now));
    for (const [name, facts] of Object.entries(now.replicas || {})) keep(name, sample(at, facts));
    for (const [name, samples] of histories) { // replicas that ended long ago
      if (name !== ALL && at - samples.at(-1).at > MOST * EVERY_MS) histories.delete(name);
    }
    el("state").textContent = now.ready ? "ready" : "not ready";
    if (!paused) redraw();
  } catch (error) {
    const said = { 401: "key needed", 403: "not shown to this key" };
    el("state").textContent = said[error.status] || "not reachable";
    el("enter-key").hidden = error.status !== 401;
  } finally {
    asking = false;
  }
}

// Ask every second for as long as the page is seen.
export function watch() {
  refresh();
  setInterval(() => document.hidden || refresh(), EVERY_MS);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
}

export function redraw() {
  if (!now) return;
  if (!el("aside").hidden) summary();
  if (!el("engine").hidden) details();
}

// The panel beside the other views

function summary() {
  el("s-running").textContent = now.running;
  el("s-waiting").textContent = now.waiting;
  el("s-mode").textContent = now.mode;
  el("s-merged").textContent = el("s-merged").title = now.merged_adapter || "none";
  el("s-switches").textContent = now.switches;
  el("s-adapters").textContent = `${now.adapters_resident.length} of ${now.adapters_known}`;
  el("s-prefix").textContent = percent(now.prefix_hit_ratio);
  el("s-image").textContent = percent(now.image_hit_ratio);
  el("s-memory").textContent = bytes(now.memory_bytes);
  pagesBar(el("pages"), now);
  el("pages-said").textContent = pagesSaid(sample(0, now));
  const recent = within(histories.get(ALL), 120);
  stacked(el("queue"), recent, 120, QUEUE);
  el("queue-said").textContent = `at most ${peak(recent)} at a time`;
}

const QUEUE = [["running", (one) => one.running], ["waiting", (one) => one.waiting]];
const PAGES = [["kv", (one) => one.kv], ["contexts", (one) => one.contexts], ["adapters", (one) => one.adapters]];

function within(samples, seconds) {
  const last = samples.at(-1);
  return last ? samples.filter((one) => last.at - one.at <= seconds * 1000) : [];
}

const peak = (samples) => Math.max(0, ...samples.map((one) => one.running + one.waiting));

function pagesSaid(one) {
  return `${one.kv} KV cache, ${one.contexts} documents, ${one.adapters} adapters, ${one.free} free of ${one.total} pages`;
}

function pagesBar(bar, facts) {
  const total = Math.max(1, facts.pages_total);
  for (const name of ["kv", "contexts", "adapters"]) {
    bar.querySelector(`.${name}`).style.width = `${(100 * facts[`pages_${name}`]) / total}%`;
  }
}

// The view of its own

function details() {
  replicas();
  const samples = within(histories.get(el("replica").value) || [], Number(el("span").value));
  const span = Number(el("span").value);
  const last = samples.at(-1);
  if (!last) return;
  const name = el("span").selectedOptions[0].textContent;
  el("e-queue-top").textContent = stacked(el("e-queue"), samples, span, QUEUE);
  el("e-queue-said").textContent = `${last.running} running and ${last.waiting} waiting now; in the ${name} at most ${peak(samples)} at a time.`;
  el("e-pages-top").textContent = stacked(el("e-pages"), samples, span, PAGES);
  el("e-pages-said").textContent = `Now ${pagesSaid(last)}.`;
  band(el("e-mode"), samples, span, (one) => `mode-${one.mode}`, (one) => one.switches);
  const switched = last.switches - samples[0].switches;
  const shares = ["merged", "mixture", "unmerged"].map((mode) => [mode, samples.filter((one) => one.mode === mode).length / samples.length]);
  const said = shares.filter(([, share]) => share).map(([mode, share]) => `${mode} ${percent(share)}`).join(", ");
  el("e-mode-said").textContent = `${last.mode} now, ${last.merged ? `${last.merged} is merged` : "no adapter is merged"}; ${said} of the time, `
    + `switched ${switched} ${switched === 1 ? "time" : "times"} (${last.switches} since the start).`;
  figures();
  if (el("e-table").open) table(samples);
}

function figures() {
  const facts = now.replicas?.[el("replica").value] || now;
  const rows = [
    ["Running", facts.running], ["Waiting", facts.waiting], ["Mode", facts.mode], ["Merged adapter", facts.merged_adapter || "none"],
    ["Mode switches", facts.switches], ["Steps", facts.steps], ["Resident adapters", `${facts.adapters_resident.length} of ${facts.adapters_known}`],
    ["Resident documents", `${facts.contexts_resident} of ${facts.contexts_known}`],
    ["Prefix cache hits", percent(facts.prefix_hit_ratio)], ["Image cache hits", percent(facts.image_hit_ratio)],
    ["Prompt tokens", facts.prompt_tokens], ["Generated tokens", facts.generated_tokens], ["Preemptions", facts.preemptions], ["Prepared graphs and kernels", `${facts.prepared} of ${facts.preparations}`],
  ];
  if (facts === now) rows.push(["Process memory", bytes(now.memory_bytes)]);
  const text = (value) => (typeof value === "number" ? value.toLocaleString("en") : value);
  el("e-figures").replaceChildren(...rows.map(([name, value]) => make("div", {},
    make("dt", { textContent: name }), make("dd", { textContent: text(value), title: text(value) }))));
}

// The choice of a replica, and a row for each, where there are several engines.
function replicas() {
  const names = Object.keys(now.replicas || {}).sort();
  el("replicas").hidden = el("replica-field").hidden = !now.replicas;
  if (!now.replicas) return;
  const listed = [ALL, ...new Set([...names, ...histories.keys()].filter((name) => name !== ALL))];
  const before = [...el("replica").options].map((option) => option.value);
  if (listed.join("\n") !== before.join("\n")) {
    const chosen = el("replica").value;
    el("replica").replaceChildren(...listed.map((name) => new Option(name || "all together", name)));
    if (listed.includes(chosen)) el("replica").value = chosen;
  }
  el("replica-rows").replaceChildren(...names.map((name) => {
    const facts = now.replicas[name];
    const bar = make("div", { className: "pages", "aria-hidden": "true" },
      ...["kv", "contexts", "adapters"].map((part) => make("span", { className: part })));
    pagesBar(bar, facts);
    const used = facts.pages_total - facts.pages_free;
    const cell = (value) => make("td", { className: "number", textContent: value });
    return make("tr", {}, make("th", { scope: "row", textContent: name }), cell(facts.running), cell(facts.waiting),
      make("td", { textContent: facts.mode }), make("td", { textContent: facts.merged_adapter || "none" }), cell(facts.switches),
      make("td", {}, bar, make("span", { className: "number", textContent: `${used} of ${facts.pages_total}` })));
  }));
}

function table(samples) {
  const step = Math.max(1, Math.ceil(samples.length / ROWS));
  const rows = samples.filter((one, place) => (samples.length - 1 - place) % step === 0).reverse();
  const time = (one) => new Date(one.at).toLocaleTimeString("en-GB");
  el("e-rows").replaceChildren(...rows.map((one) => make("tr", {}, make("th", { scope: "row", textContent: time(one) }),
    ...[one.running, one.waiting, one.mode, one.merged || "none", one.switches, one.kv, one.contexts, one.adapters, one.free]
      .map((value) => make("td", { textContent: value })))));
}

el("pause").addEventListener("click", () => {
  paused = !paused;
  el("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) redraw();
});
for (const id of ["span", "replica"]) el(id).addEventListener("change", redraw);
el("e-table").addEventListener("toggle", redraw);
