// A conversation with the language model, with images.

import { complete, dataUrl, el, make } from "./api.js";

let messages = [];
let files = [];
let running = null;

export function offer(models) {
  const before = el("chat-model").value;
  const able = models.filter((model) => !model.head && model.encodes == null).sort((a, b) => (a.kind === "base" ? -1 : b.kind === "base"));
  el("chat-model").replaceChildren(...able.map((model) => new Option(model.id, model.id)));
  if (able.some((model) => model.id === before)) el("chat-model").value = before;
}

function say(who, text, images = []) {
  el("log-empty").hidden = true;
  const body = make("p", { className: "text", textContent: text });
  const turn = make("article", { className: who, "aria-label": who === "user" ? "You" : "Model" }, ...images, body);
  el("log").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return body;
}

export function attach(more) {
  files = more;
  el("attached").hidden = !files.length;
  el("attached").textContent = files.map((file) => file.name).join(", ");
}

async function send() {
  const text = el("message").value.trim();
  if (running || (!text && !files.length)) return;
  running = new AbortController();
  el("send").disabled = true;
  el("chat-error").hidden = true;
  const mine = files;
  const urls = await Promise.all(mine.map(dataUrl));
  const content = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  if (text) content.unshift({ type: "text", text });
  const shown = mine.map((file, place) => make("img", { src: urls[place], alt: file.name }));
  const asked = say("user", text, shown).parentElement;
  messages.push({ role: "user", content });
  el("message").value = "";
  attach([]);
  const line = say("assistant", "");
  try {
    await complete(el("chat-model").value, messages, (piece) => {
      line.textContent += piece;
      el("log").scrollTop = el("log").scrollHeight;
    }, running.signal);
    messages.push({ role: "assistant", content: line.textContent });
  } catch (error) {
    messages.pop(); // what was not answered can be sent again
    asked.remove();
    line.parentElement.remove();
    el("message").value = text;
    attach(mine);
    if (error.name !== "AbortError") {
      el("chat-error").textContent = error.message;
      el("chat-error").hidden = false;
    }
  } finally {
    running = null;
    el("send").disabled = false;
  }
}

el("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
el("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  }
});
el("attach").addEventListener("change", () => attach([...el("attach").files]));
el("forget").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  attach([]);
  el("log").replaceChildren(el("log-empty"));
  el("log-empty").hidden = false;
  el("message").focus();
});
