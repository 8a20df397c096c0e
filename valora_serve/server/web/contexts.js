// Documents that requests can ask about: listed, added, asked and deleted.

import { bytes, call, complete, el, make, milliseconds } from "./api.js";
import { confirmed } from "./dialogs.js";
import { state } from "./state.js";

const TEXT_BYTES = 64 << 20; // of a file that is read into the form
let asking = null; // AbortController of a question
let learning = null; // AbortController of a document that is being read

function fail(id, text) {
  el(id).textContent = text;
  el(id).hidden = !text;
}

// List the documents. Without a key nothing is asked for by itself.
export async function documents(quiet = true) {
  let listed;
  try {
    listed = (await (await call("v1/contexts", { quiet })).json()).data;
  } catch (error) {
    fail("contexts-error", error.message);
    return;
  }
  fail("contexts-error", "");
  const before = el("context").value;
  el("context").replaceChildren(...listed.map((one) => new Option(one.id, one.id)));
  if (listed.some((one) => one.id === before)) el("context").value = before;
  el("context").disabled = el("question-ask").disabled = !listed.length;
  el("contexts-none").hidden = listed.length > 0;
  el("contexts").hidden = !listed.length;
  el("context-rows").replaceChildren(...listed.map(row));
  choices();
}

function row(one) {
  const use = make("button", { type: "button", className: "quiet small", textContent: "Ask" });
  use.setAttribute("aria-label", `Ask ${one.id}`);
  use.addEventListener("click", () => {
    el("context").value = one.id;
    el("question").focus();
  });
  const made = [use];
  if (!one.bundle) { // those of a bundle go with it
    const remove = make("button", { type: "button", className: "quiet small", textContent: "Delete" });
    remove.setAttribute("aria-label", `Delete ${one.id}`);
    remove.addEventListener("click", () => forget(one.id));
    made.push(remove);
  }
  const cell = (text) => make("td", { className: "number", textContent: text });
  const accuracy = one.accuracy === null ? "–" : one.accuracy.toFixed(3);
  return make("tr", {}, make("th", { scope: "row", textContent: one.id }), make("td", { textContent: one.form }),
    cell(one.source_tokens.toLocaleString("en")), cell(one.tokens.toLocaleString("en")), cell(bytes(one.bytes)), cell(accuracy),
    make("td", { textContent: one.adapter || "base model" }), make("td", { textContent: one.bundle || "this server" }),
    make("td", {}, make("div", { className: "buttons" }, ...made)));
}

// Adapters and encoders that a new document can use.
function choices() {
  const fill = (select, names, first) => {
    const before = select.value;
    select.replaceChildren(new Option(first, ""), ...names.map((name) => new Option(name, name)));
    if (names.includes(before)) select.value = before;
  };
  const { models } = state;
  fill(el("learn-adapter"), models.filter((model) => model.kind === "adapter" && model.encodes === null).map((model) => model.id), "base model");
  fill(el("learn-encoder"), models.filter((model) => model.encodes !== null).map((model) => model.id), "the only one");
}

async function forget(name) {
  if (!(await confirmed(`Delete ${name}?`, "The server forgets the document and deletes its files.", "Delete"))) return;
  try {
    await call(`v1/contexts/${encodeURIComponent(name)}`, { method: "DELETE" });
    el("learn-said").textContent = `${name} is deleted.`;
  } catch (error) {
    fail("contexts-error", error.message);
    return;
  }
  await changed();
  el("refresh").focus(); // the row with the button is gone
}

async function changed() {
  await documents();
  document.dispatchEvent(new Event("models-changed"));
}

// Read a file of text into the form; its name becomes the document's.
export async function read(file) {
  if (!file) return;
  fail("learn-error", "");
  if (file.size > TEXT_BYTES) {
    fail("learn-error", `${file.name} has ${bytes(file.size)}: a document may have ${bytes(TEXT_BYTES)} of text.`);
    return;
  }
  const text = await file.text();
  if (text.includes("\u0000")) {
    fail("learn-error", `${file.name} is no text: send the text of the document.`);
    return;
  }
  el("learn-document").value = text;
  el("learn-name").value ||= file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 128);
  el("learn-file-said").textContent = `${file.name} (${bytes(file.size)})`;
  el("learn-name").focus();
}

async function learn() {
  if (learning) return;
  const body = { name: el("learn-name").value.trim(), document: el("learn-document").value, form: el("learn-form").value };
  if (body.form === "prefix" && el("learn-tokens").value) body.tokens = Number(el("learn-tokens").value);
  if (body.form === "memory_tokens" && el("learn-encoder").value) body.encoder = el("learn-encoder").value;
  if (el("learn-adapter").value) body.adapter = el("learn-adapter").value;
  if (el("learn-replace").checked) body.replace = true;
  fail("learn-error", "");
  learning = new AbortController();
  el("learn-send").disabled = true;
  el("learn-stop").hidden = false;
  el("learn-said").textContent = "The server reads the document …";
  const began = performance.now();
  try {
    const made = await (await call("v1/contexts", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: learning.signal,
    })).json();
    el("learn-said").textContent = `${made.id}: ${made.source_tokens} tokens are held in ${made.tokens} (${bytes(made.bytes)}) after ${milliseconds(performance.now() - began)}.`;
    el("learn").reset();
    el("learn-file-said").textContent = "";
    forms();
    await changed();
    el("context").value = made.id;
    el("question").focus();
  } catch (error) {
    el("learn-said").textContent = "";
    fail("learn-error", error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    learning = null;
    el("learn-send").disabled = false;
    el("learn-stop").hidden = true;
  }
}

async function ask() {
  const question = el("question").value.trim();
  if (asking || !question) return;
  asking = new AbortController();
  el("question-ask").disabled = true;
  el("question-stop").hidden = false;
  fail("question-error", "");
  const name = el("context").value;
  const answer = make("p", { className: "text" });
  const facts = make("p", { className: "hint" });
  el("context-answers").prepend(make("article", {}, make("h3", { textContent: `${name}: ${question}` }), answer, facts));
  while (el("context-answers").children.length > 20) el("context-answers").lastChild.remove();
  const began = performance.now();
  try {
    const onText = (piece) => { answer.textContent += piece; };
    // What a document says is no matter of chance: the likeliest answer.
    const found = await complete(name, [{ role: "user", content: question }], onText, asking.signal, { temperature: 0 });
    const parts = [milliseconds(performance.now() - began)];
    if (found.usage) parts.push(`${found.usage.prompt_tokens} prompt tokens with its memory`, `${found.usage.completion_tokens} generated`);
    facts.textContent = [parts.join(", "), ...found.warnings].join("; ");
    el("question").select();
  } catch (error) {
    if (!answer.textContent) answer.parentElement.remove();
    fail("question-error", error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    asking = null;
    el("question-ask").disabled = !el("context").value;
    el("question-stop").hidden = true;
  }
}

// Show the options of the form of memory that is chosen.
function forms() {
  const prefix = el("learn-form").value === "prefix";
  el("learn-tokens-field").hidden = !prefix;
  el("learn-encoder-field").hidden = prefix;
}

el("learn").addEventListener("submit", (event) => {
  event.preventDefault();
  learn();
});
el("learn-stop").addEventListener("click", () => learning?.abort());
el("learn-file").addEventListener("change", () => {
  const [file] = el("learn-file").files;
  el("learn-file").value = "";
  read(file);
});
el("learn-form").addEventListener("change", forms);
el("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
el("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    ask();
  }
});
el("question-stop").addEventListener("click", () => asking?.abort());
el("refresh").addEventListener("click", () => documents(false));
forms();
