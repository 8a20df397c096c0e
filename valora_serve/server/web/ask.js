// Requests about the files: every domain with a head that is asked, or the language model.

import { call, complete, dataUrl, el, make, milliseconds } from "./api.js";
import { Corrections } from "./corrections.js";
import { confirmed } from "./dialogs.js";
import { refresh } from "./engine.js";
import { show, strip, tell, warn } from "./results.js";
import { shownItem, state } from "./state.js";

const AT_ONCE = 4; // requests

export function fail(text) {
  el("error").textContent = text;
  el("error").hidden = false;
}

// Whether corrections that were not saved may be lost; asks if there are any.
export async function mayLose() {
  const many = state.items.filter((item) => item.corrections.unsaved).length;
  if (!many) return true;
  const what = many === 1 ? "one picture" : `${many} pictures`;
  return confirmed("Discard corrections?", `The corrections of ${what} were not saved.`, "Discard them");
}

// Ask models, [{id, head, boxes, …}], about the files, or the language model without one.
export async function ask(asked, prompt, least) {
  if (!asked.length || state.running) return;
  const heads = asked.every((model) => model.head);
  const { items } = state;
  if (!items.length && (heads || !prompt)) {
    fail(heads ? "Choose an image or a video first." : "Write a prompt or choose an image first.");
    return;
  }
  if (!(await mayLose()) || state.running) return;
  state.running = new AbortController();
  el("run").disabled = true;
  el("stop").hidden = false;
  el("error").hidden = true;
  el("said").replaceChildren();
  el("timing").textContent = "";
  const subject = heads ? items : items.slice(state.current, state.current + 1);
  for (const item of subject) Object.assign(item, { asked, answers: [], corrections: new Corrections(), failed: null });
  if (items.length) show(Math.min(state.current, items.length - 1));
  else el("gallery").hidden = true;
  if (matchMedia("(max-width: 52rem)").matches) el("answer").scrollIntoView({ block: "start" }); // it lies below the form
  const began = performance.now();
  try {
    if (heads) await askHeads(asked, prompt, least, began);
    else await askLanguageModel(asked[0], prompt, began);
  } catch (error) {
    fail(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    state.running = null;
    el("run").disabled = false;
    el("stop").hidden = true;
    el("saving").hidden = !items.some((item) => item.answers.length);
    if (heads) tell(); // boxes can be corrected now
    refresh();
  }
}

// Every domain about every file, some requests at a time.
async function askHeads(asked, prompt, least, began) {
  const { items, running } = state;
  const jobs = items.flatMap((item) => asked.map((model) => ({ item, model })));
  const order = (answer) => asked.findIndex((model) => model.id === answer.domain);
  const failures = [];
  let done = 0;
  const work = async () => {
    while (jobs.length && !running.signal.aborted) {
      const { item, model } = jobs.shift();
      try {
        const answer = await askHead(item, model, prompt, least, running.signal);
        const result = answer.results[0];
        item.width = result.width;
        item.height = result.height;
        item.answers.push({ domain: model.id, seconds: answer.seconds, mode: answer.mode, warnings: answer.warnings, ...result });
        item.answers.sort((a, b) => order(a) - order(b));
        item.corrections.take(model.id, result.detections || []);
      } catch (error) {
        if (error.name === "AbortError") throw error;
        item.failed = error.message;
        failures.push(error);
      }
      done += 1;
      if (shownItem() === item) tell();
      else strip();
    }
  };
  const total = jobs.length;
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, total) }, work));
  const answers = items.flatMap((item) => item.answers);
  const seconds = answers.reduce((sum, answer) => sum + answer.seconds, 0);
  const modes = [...new Set(answers.map((answer) => answer.mode))].join(", ");
  const parts = [`${milliseconds(performance.now() - began)} in total`];
  if (done > 1) parts.push(`${answers.length} answers`);
  if (answers.length) parts.push(`${milliseconds((seconds * 1000) / answers.length)} in the server${done > 1 ? " each" : ""}, ${modes} mode`);
  el("timing").textContent = parts.join("; ");
  if (failures.length) fail(total === 1 ? failures[0].message : `${failures.length} of ${total} answers failed: ${failures[0].message}`);
}

async function askHead(item, model, prompt, least, signal) {
  const form = new FormData();
  if (item.frames) for (const frame of item.frames) form.append("frames", frame, frame.name);
  else form.append(item.video ? "video" : "image", item.file, item.name);
  if (prompt) form.append("prompt", prompt);
  if (least !== null && model.boxes) form.append("min_score", String(least));
  const path = `v1/vision/${encodeURIComponent(model.id)}`;
  return (await call(path, { method: "POST", body: form, signal })).json();
}

async function askLanguageModel(model, prompt, began) {
  const content = [];
  if (prompt) content.push({ type: "text", text: prompt });
  const item = shownItem();
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
  }, state.running.signal);
  const parts = [`${milliseconds(performance.now() - began)} in total`];
  if (first !== null) parts.push(`first token after ${milliseconds(first)}`);
  if (found.usage) parts.push(`${found.usage.prompt_tokens} prompt tokens, ${found.usage.completion_tokens} generated`);
  if (item) item.answers = [{ domain: model.id, text: text.textContent }];
  el("figure").hidden = false;
  el("views").hidden = el("tools").hidden = !item;
  warn(found.warnings);
  el("timing").textContent = parts.join("; ");
}
