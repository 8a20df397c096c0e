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

// Every domain about every file, some files at a time.
async function askHeads(asked, prompt, least, began) {
  const { items, running } = state;
  const jobs = [...items];
  const failures = [];
  const took = [];
  const work = async () => {
    while (jobs.length && !running.signal.aborted) {
      const item = jobs.shift();
      try {
        const answer = await look(item, asked, prompt, least, running.signal);
        took.push(answer.seconds);
        for (const { id } of asked) {
          const { error, results, seconds, mode, warnings } = answer.domains[id];
          if (error) {
            item.failed = error.message;
            failures.push(error);
            continue;
          }
          const [result] = results;
          item.width = result.width;
          item.height = result.height;
          item.answers.push({ domain: id, seconds, mode, warnings, ...result });
          item.corrections.take(id, result.detections || []);
        }
      } catch (error) {
        if (error.name === "AbortError") throw error;
        item.failed = error.message;
        failures.push(...asked.map(() => error));
      }
      if (shownItem() === item) tell();
      else strip();
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, items.length) }, work));
  const answers = items.flatMap((item) => item.answers);
  const modes = [...new Set(answers.map((answer) => answer.mode))].join(", ");
  const parts = [`${milliseconds(performance.now() - began)} in total`];
  if (answers.length > 1) parts.push(`${answers.length} answers`);
  const each = (took.reduce((sum, seconds) => sum + seconds, 0) * 1000) / took.length;
  if (took.length) parts.push(`${milliseconds(each)} in the server${took.length > 1 ? " each" : ""}, ${modes} mode`);
  el("timing").textContent = parts.join("; ");
  const total = items.length * asked.length;
  if (failures.length) fail(total === 1 ? failures[0].message : `${failures.length} of ${total} answers failed: ${failures[0].message}`);
}

async function look(item, asked, prompt, least, signal) {
  const form = new FormData();
  if (item.frames) for (const frame of item.frames) form.append("frames", frame, frame.name);
  else form.append(item.video ? "video" : "image", item.file, item.name);
  form.append("domains", asked.map((model) => model.id).join(","));
  if (prompt) form.append("prompt", prompt);
  if (least !== null && asked.some((model) => model.boxes)) form.append("min_score", String(least));
  return (await call("v1/vision", { method: "POST", body: form, signal })).json();
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
