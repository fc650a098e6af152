// Chooses the view, keeps it up to date, and sets the theme.

import { Refused, forgetKey, hasKey } from "./api.js";
import { h, setText } from "./dom.js";
import { problemOf } from "./format.js";
import { RunView } from "./run.js";
import { RunsView } from "./runs.js";
import { ServicesView } from "./services.js";
import { SessionsView } from "./sessions.js";

const PERIOD_MS = 2000;
const LONGEST_MS = 16000;

const main = document.getElementById("main");
const live = document.getElementById("live");
let view = null;
let timer = 0;
let pause = PERIOD_MS;
let asking = null;

function viewOf(hash) {
  const [, name = "", id = "", part = ""] = hash.replace(/^#/, "").split("/");
  if (name === "run" && id) return ["runs", new RunView(decodeURIComponent(id), part)];
  if (name === "services") return ["services", new ServicesView()];
  if (name === "sessions") return ["sessions", new SessionsView()];
  return ["runs", new RunsView()];
}

function open() {
  if (location.hash === "#main") return;
  view?.destroy?.();
  document.getElementById("tip").hidden = true;
  const [name, next] = viewOf(location.hash);
  view = next;
  main.replaceChildren(view.element);
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  pause = PERIOD_MS;
  update();
}

function say(state, text) {
  live.dataset.state = state;
  setText(document.getElementById("live-text"), text);
}

function later(ms) {
  clearTimeout(timer);
  timer = setTimeout(update, ms);
}

/** Updates the view, and again after a pause. One request at a time; none while the tab is hidden. */
async function update() {
  clearTimeout(timer);
  if (document.hidden) return say("wait", "paused");
  if (asking === view) return; // a request is under way; it schedules the next one
  const mine = view;
  asking = mine;
  try {
    await mine.refresh();
    if (view !== mine) return;
    pause = PERIOD_MS;
    say("good", "live");
  } catch (error) {
    if (view !== mine) return;
    if (error instanceof Refused && error.status === 404) return showMissing(error.message);
    pause = Math.min(LONGEST_MS, pause * 2);
    say("bad", `${problemOf(error)}; next try in ${Math.round(pause / 1000)} s`);
    if (!(error instanceof Refused) && !(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
  } finally {
    if (asking === mine) asking = null;
  }
  document.getElementById("forget-key").hidden = !hasKey();
  later(pause);
}

function showMissing(text) {
  say("good", "live");
  main.replaceChildren(
    h("section", { class: "empty" }, h("h1", {}, "Not here"), h("p", {}, text), h("a", { href: "#/" }, "All runs")),
  );
}

// The theme button goes round: as the system, light, dark.

const THEMES = ["", "light", "dark"];
const themeButton = document.getElementById("theme");

function showTheme() {
  const chosen = document.documentElement.dataset.theme ?? "";
  const text = `Theme: ${chosen || "as the system"}`;
  themeButton.setAttribute("aria-label", text);
  themeButton.title = text;
}

themeButton.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const order = dark ? ["", "light", "dark"] : ["", "dark", "light"]; // so that the first click changes the colours
  const next = order[(order.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  try {
    if (next) localStorage.setItem("tinsmith-theme", next);
    else localStorage.removeItem("tinsmith-theme");
  } catch {
    // Without storage, the choice lasts as long as the page.
  }
  showTheme();
  view?.content?.rebuild?.();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.content?.rebuild?.());

document.getElementById("forget-key").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) update();
  else {
    clearTimeout(timer);
    say("wait", "paused");
  }
});
addEventListener("hashchange", open);
showTheme();
open();
