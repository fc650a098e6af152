// What the run has sampled of late: text, shaded by how improbable each token was.

import { dashboard } from "./api.js";
import { copy } from "./dialogs.js";
import { h } from "./dom.js";
import { ago, number } from "./format.js";

const LEVELS = [0.9, 0.5, 0.25, 0.1, 0.03, 0.01];
/** Probabilities from which on a token is shaded less. */
const FIRST_SHOWN = 12;
const FIRST_TOKENS = 500;

/** 0: as good as certain .. 6: hardly expected. */
export function level(logprob) {
  if (logprob === null || logprob === undefined) return 0;
  const probability = Math.exp(logprob);
  const place = LEVELS.findIndex((each) => probability >= each);
  return place < 0 ? LEVELS.length : place;
}

const tip = () => document.getElementById("tip");

function showTip(span) {
  const box = tip();
  const { token, logprob, rank, text } = span.about;
  box.replaceChildren(
    h("code", {}, JSON.stringify(text)),
    h("dl", {}, ...row("token", String(token)), ...row("logprob", logprob === null ? "–" : logprob.toFixed(3)),
      ...row("probability", logprob === null ? "–" : `${number(100 * Math.exp(logprob), 3)} %`),
      ...(rank === null ? [] : row("rank", rank === 0 ? "beyond the top k" : String(rank)))),
  );
  box.hidden = false;
  const place = span.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const left = Math.min(Math.max(8, place.left), innerWidth - size.width - 8);
  const above = place.top - size.height - 6;
  box.style.left = `${left}px`;
  box.style.top = `${above > 56 ? above : place.bottom + 6}px`;
}

const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

function hideTip() {
  tip().hidden = true;
}

function tokenSpan(sample, index) {
  const text = sample.texts?.[index] ?? `⟨${sample.tokens[index]}⟩`;
  const logprob = sample.logprobs[index] ?? null;
  const kinds = ["tok", `l${level(logprob)}`];
  if (sample.special.includes(index)) kinds.push("special");
  if (text.includes("\n")) kinds.push("newline");
  const span = h("span", { class: kinds.join(" ") }, text);
  span.about = { token: sample.tokens[index], logprob, rank: sample.ranks?.[index] ?? null, text };
  return span;
}

/** The tokens of a sample. Arrow keys go from one to the next. */
function tokensOf(sample) {
  const box = h("div", {
    class: "tokens",
    tabindex: "0",
    role: "group",
    "aria-label": "Sampled tokens; arrow keys show each token's probability",
  });
  const show = (begin, end) => {
    for (let index = begin; index < end; index++) box.append(tokenSpan(sample, index));
  };
  show(0, Math.min(FIRST_TOKENS, sample.tokens.length));
  if (sample.tokens.length > FIRST_TOKENS) {
    const more = h("button", { class: "chip", type: "button" }, `show all ${sample.tokens.length} tokens`);
    more.addEventListener("click", () => {
      more.remove();
      show(FIRST_TOKENS, sample.tokens.length);
    });
    box.append(more);
  }
  let at = -1;
  const go = (place) => {
    const spans = box.querySelectorAll(".tok");
    spans[at]?.classList.remove("current");
    at = Math.min(Math.max(0, place), spans.length - 1);
    if (!spans[at]) return;
    spans[at].classList.add("current");
    spans[at].scrollIntoView({ block: "nearest" });
    showTip(spans[at]);
  };
  box.addEventListener("mouseover", (event) => {
    if (event.target.about) showTip(event.target);
  });
  box.addEventListener("click", (event) => {
    if (event.target.about) go([...box.querySelectorAll(".tok")].indexOf(event.target));
  });
  box.addEventListener("mouseleave", hideTip);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: Number.MAX_SAFE_INTEGER }[event.key];
    if (move !== undefined) {
      event.preventDefault();
      go(move);
    } else if (event.key === "Escape") {
      hideTip();
    }
  });
  box.addEventListener("blur", () => {
    box.querySelector(".current")?.classList.remove("current");
    at = -1;
    hideTip();
  });
  return box;
}

function sampleCard(sample, now) {
  const known = sample.logprobs.filter((each) => each !== null);
  const mean = known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
  const version = sample.version_id.split("@")[1];
  const text = (sample.texts ?? sample.tokens.map((token) => `⟨${token}⟩`)).join("");
  const when = h("time", { datetime: new Date(sample.at * 1000).toISOString() }, ago(sample.at, now));
  const element = h(
    "article",
    { class: "sample" },
    h(
      "header",
      {},
      when,
      h("span", { title: `version ${sample.version_id}` }, `version ${version}`),
      h("span", {}, `${number(sample.num_prompt_tokens)} → ${number(sample.num_tokens)} tokens`),
      mean === null ? null : h("span", { title: "mean logprob of the sampled tokens" }, `mean logprob ${mean.toFixed(2)}`),
      sample.is_finished ? null : h("span", { class: "warn", title: "it ended at max_tokens" }, "cut off"),
      h("button", { class: "quiet", type: "button", onclick: () => copy(text, "Text copied") }, "Copy"),
    ),
    h("div", { class: "prompt", title: "The end of the prompt" }, sample.prompt ?? `(${number(sample.num_prompt_tokens)} tokens of prompt)`),
    tokensOf(sample),
  );
  return { element, when, at: sample.at };
}

export class Samples {
  constructor(runId) {
    this.runId = runId;
    this.known = [];
    this.waiting = [];
    this.shown = [];
    this.keeps = 1;
    this.list = h("div", { class: "samples" });
    this.news = h("button", { class: "chip news", type: "button", hidden: true, onclick: () => this.showNews() });
    this.more = h("button", { class: "chip", type: "button", hidden: true, onclick: () => this.showMore() }, "Show more");
    this.empty = h("div", { class: "nothing", hidden: true });
    const steps = LEVELS.length + 1;
    this.legend = h(
      "div",
      { class: "legend", "aria-hidden": "true" },
      "expected",
      Array.from({ length: steps }, (_, n) => h("i", { class: `l${n}` })),
      "surprising",
    );
    this.element = h(
      "section",
      { "aria-label": "Recent samples" },
      h("div", { class: "controls" }, this.legend, h("span", { class: "hint" }, "hover, tap or use the arrow keys on a token"), this.news),
      this.list,
      this.more,
      this.empty,
    );
  }

  async refresh() {
    const after = this.known[0] ? `?after=${this.known[0].id}` : "";
    const found = await dashboard(`runs/${encodeURIComponent(this.runId)}/samples${after}`);
    this.keeps = found.keeps;
    this.now = found.now;
    this.known = [...found.samples, ...this.known].slice(0, Math.max(64, found.keeps));
    if (!this.shown.length) {
      this.add(this.known.slice(0, FIRST_SHOWN), "end");
    } else {
      this.waiting = [...found.samples, ...this.waiting].slice(0, 64);
      const isRead = scrollY > 80 || this.element.contains(document.activeElement) || this.list.matches(":hover");
      if (!isRead) this.showNews();
    }
    for (const card of this.shown) card.when.textContent = ago(card.at, found.now);
    this.showState();
  }

  showState() {
    this.news.hidden = !this.waiting.length;
    this.news.textContent = `${this.waiting.length} new`;
    this.more.hidden = this.shown.length + this.waiting.length >= this.known.length;
    this.legend.hidden = !this.known.length;
    this.empty.hidden = this.known.length > 0;
    this.empty.textContent = this.keeps
      ? "Nothing has been sampled from this run yet, or not by you. What is sampled from its saved weights appears here."
      : "This server keeps no samples (GATEWAY_RECENT_SAMPLES is 0).";
  }

  add(samples, where) {
    const cards = samples.map((sample) => sampleCard(sample, this.now));
    if (where === "end") {
      this.list.append(...cards.map((card) => card.element));
      this.shown.push(...cards);
    } else {
      this.list.prepend(...cards.map((card) => card.element));
      this.shown.unshift(...cards);
      for (const old of this.shown.splice(96)) old.element.remove();
    }
  }

  showNews() {
    this.add(this.waiting, "begin");
    this.waiting = [];
    this.showState();
  }

  showMore() {
    const begin = this.shown.length + this.waiting.length;
    this.add(this.known.slice(begin, begin + FIRST_SHOWN), "end");
    this.showState();
  }

  destroy() {
    hideTip();
  }
}

