// Requests to the server's API, which is the same as for any other client; and small helpers.

export const el = (id) => document.getElementById(id);
export const SVG = "http://www.w3.org/2000/svg";

const KEY = "valora-key";

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

// Keep a key in this tab, or none; gives the one before.
export function setKey(key) {
  const before = sessionStorage.getItem(KEY);
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  return before;
}

// Send a request; errors say what the server says. Without a key where one is needed, the user is asked for it, unless the
// request is a quiet one that nobody has asked for.
export async function call(path, { quiet = false, ...options } = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached: see whether it runs, and try again.");
  }
  if (response.ok) return response;
  let said = `${response.status} ${response.statusText}`;
  try {
    said = (await response.json()).error.message;
  } catch { /* not JSON: the status is shown */ }
  if (response.status === 401) {
    if (!quiet) document.dispatchEvent(new Event("key-needed"));
    said = "This server requires an API key.";
  }
  throw Object.assign(new Error(said), { status: response.status });
}

// Events of a stream, parsed.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Streams a chat completion; calls onText with each piece. Returns usage and warnings. `more` is added to the body.
export async function complete(model, messages, onText, signal, more = {}) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true }, ...more }),
    signal,
  });
  const found = { usage: null, warnings: [] };
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) found.usage = event.usage;
    if (event.valora) found.warnings = event.valora.warnings || [];
    const delta = event.choices.length ? event.choices[0].delta.content : "";
    if (delta) onText(delta);
  }
  return found;
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function milliseconds(value) {
  return value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(2)} s`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${(value / 2 ** (10 * step)).toFixed(step ? 1 : 0)} ${units[step]}`;
}
