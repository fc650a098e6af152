// Dialogs (asking for a key, confirming a deletion) and toasts.

import { h } from "./dom.js";
import { problemOf } from "./format.js";

function open(dialog) {
  document.body.append(dialog);
  dialog.showModal();
  dialog.addEventListener("close", () => dialog.remove());
}

/** Resolves with a key that is not empty. */
export function askForKey(problem) {
  return new Promise((resolve) => {
    const input = h("input", {
      id: "key",
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "tml-…",
      required: true,
    });
    const form = h(
      "form",
      { class: "dialog" },
      h("h2", {}, "This server needs a key"),
      h("p", {}, "Use the key that you give the SDK as TINKER_API_KEY. It is kept in this tab only, and forgotten when the tab closes."),
      h("label", { for: "key" }, "API key"),
      input,
      h("p", { class: "problem", role: "alert" }, problem),
      h("div", { class: "dialog-end" }, h("button", { class: "primary", type: "submit" }, "Continue")),
    );
    const dialog = h("dialog", { "aria-label": "API key" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const key = input.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        form.querySelector(".problem").textContent = "A key is visible ASCII characters without spaces.";
        return;
      }
      dialog.close();
      resolve(key);
    });
    open(dialog);
    input.focus();
  });
}

/** Resolves with whether the user has confirmed. */
export function confirm({ title, text, subject, action }) {
  return new Promise((resolve) => {
    const cancel = h("button", { type: "button", onclick: () => dialog.close("no") }, "Cancel");
    const dialog = h(
      "dialog",
      { "aria-label": title },
      h(
        "div",
        { class: "dialog" },
        h("h2", {}, title),
        h("p", {}, text),
        h("code", { class: "subject" }, subject),
        h(
          "div",
          { class: "dialog-end" },
          cancel,
          h("button", { class: "danger", type: "button", onclick: () => dialog.close("yes") }, action),
        ),
      ),
    );
    const leave = () => dialog.close("no"); // the question belongs to the page behind it
    addEventListener("hashchange", leave);
    dialog.addEventListener("close", () => {
      removeEventListener("hashchange", leave);
      resolve(dialog.returnValue === "yes");
    });
    open(dialog);
    cancel.focus();
  });
}

/** Asks, and then ends a run or a session. Resolves with whether the user has confirmed. */
export async function confirmEnd({ what, id, end }) {
  const isSure = await confirm({
    title: `End this ${what}?`,
    text: `Work that was accepted is finished first, and checkpoints stay. The client can send no more work to this ${what}.`,
    subject: id,
    action: `End ${what}`,
  });
  if (!isSure) return false;
  try {
    await end();
  } catch (error) {
    toast(`End ${what}: ${problemOf(error)}`, "bad");
    return false;
  }
  toast(`The ${what} accepts no more work`);
  return true;
}

export function toast(text, kind = "good") {
  const element = h("div", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), kind === "bad" ? 9000 : 3500);
}

export async function copy(text, what = "Copied") {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyByHand(text); // there is no clipboard API over plain HTTP from another machine
    toast(what);
  } catch {
    toast("The browser does not allow copying.", "bad");
  }
}

function copyByHand(text) {
  const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
