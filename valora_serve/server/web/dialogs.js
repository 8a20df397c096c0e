// Dialogs: what is asked before something is lost, and the API key.

import { call, el, setKey } from "./api.js";

// Ask a question whose answer is yes or no; Escape means no.
export function confirmed(title, text, yes) {
  el("confirm-title").textContent = title;
  el("confirm-text").textContent = text;
  el("confirm-yes").textContent = yes;
  const dialog = el("confirm-dialog");
  dialog.returnValue = "";
  dialog.showModal();
  el("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// Ask for the key whenever one is missing; `started` is called once one is accepted.
export function onKey(started) {
  const dialog = el("key-dialog");
  const open = () => {
    if (dialog.open) return;
    el("key-error").hidden = true;
    dialog.showModal();
    el("key").focus();
  };
  document.addEventListener("key-needed", open);
  el("enter-key").addEventListener("click", open);
  dialog.addEventListener("close", () => {
    el("key").value = "";
    el("enter-key").hidden = dialog.returnValue === "used";
  });
  el("key-later").addEventListener("click", () => dialog.close("later"));
  el("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = setKey(el("key").value.trim());
    el("key-use").disabled = true;
    try {
      await call("v1/models", { quiet: true });
      dialog.close("used");
      started();
    } catch (error) {
      setKey(before);
      el("key-error").textContent = error.status === 401
        ? "This key is not known here: check it, or ask the operator for another." : error.message;
      el("key-error").hidden = false;
      el("key").select();
    } finally {
      el("key-use").disabled = false;
    }
  });
}
