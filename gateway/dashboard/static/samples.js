// Recent samples of a run: text in which improbable tokens are shaded.

import { dashboard } from "./api.js";
import { copy } from "./dialogs.js";
import { h, setText } from "./dom.js";
import { ago, number } from "./format.js";

const LEVELS = [0.9, 0.5, 0.25, 0.1, 0.03, 0.01];
/** Probabilities at which the shade of a token changes; a more probable token is lighter. */
const MAX_CARDS = 64;
const MAX_WAITING = 64;
const FIRST_TOKENS = 500;

/** The shade of a token: 0 (nearly certain) to 6 (very improbable). */
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

/** The tokens of a sample; arrow keys move between them. */
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

function sequenceOf(sample) {
  const known = sample.logprobs.filter((each) => each !== null);
  const mean = known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
  const text = (sample.texts ?? sample.tokens.map((token) => `⟨${token}⟩`)).join("");
  return h(
    "div",
    { class: "sequence" },
    tokensOf(sample),
    h(
      "div",
      { class: "sequence-facts" },
      h("span", {}, `${number(sample.num_tokens)} tokens`),
      mean === null ? null : h("span", { title: "mean logprob of its tokens" }, mean.toFixed(2)),
      sample.is_finished ? null : h("span", { class: "warn", title: "it ended at max_tokens" }, "cut off"),
      h("button", { class: "quiet", type: "button", onclick: () => copy(text, "Text copied") }, "Copy"),
    ),
  );
}

/** A picture of the prompt, made small by the server; only a JPEG that it made is shown. */
function pictureOf(url, index) {
  const name = `Picture ${index + 1} of the prompt`;
  if (!url?.startsWith("data:image/jpeg;base64,")) return h("span", { class: "no-picture", title: `${name}: too large to be shown` }, "?");
  return h("img", { src: url, alt: name, title: name });
}

/** The sequences of one request, below its prompt. */
function requestCard(samples, now) {
  const [first] = samples;
  const when = h("time", { datetime: new Date(first.at * 1000).toISOString() }, ago(first.at, now));
  const list = h("div", {}, samples.map(sequenceOf));
  const size = h("span");
  const card = { requestId: first.request_id, at: first.at, num: samples.length, when, list, size };
  card.element = h(
    "article",
    { class: "sample" },
    h(
      "header",
      {},
      when,
      h("span", { title: first.version_id }, `version ${first.version_id.split("@")[1]}`),
      h("span", {}, `${number(first.num_prompt_tokens)} tokens of prompt`),
      size,
    ),
    first.pictures.length ? h("div", { class: "pictures" }, first.pictures.map(pictureOf)) : null,
    h("div", { class: "prompt", title: "The end of the prompt" }, first.prompt ?? "(no sampler to decode it now)"),
    list,
  );
  showSize(card);
  return card;
}

function showSize(card) {
  setText(card.size, card.num > 1 ? `${card.num} sequences` : "");
}

export class Samples {
  constructor(runId) {
    this.runId = runId;
    this.newest = 0;
    this.waiting = [];
    this.cards = [];
    this.keeps = 1;
    this.list = h("div", { class: "samples" });
    this.news = h("button", { class: "chip news", type: "button", hidden: true, onclick: () => this.showNews() });
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
      this.empty,
    );
  }

  async refresh() {
    const after = this.newest ? `?after=${this.newest}` : "";
    const found = await dashboard(`runs/${encodeURIComponent(this.runId)}/samples${after}`);
    this.keeps = found.keeps;
    this.now = found.now;
    this.newest = found.samples[0]?.id ?? this.newest;
    this.waiting = [...found.samples, ...this.waiting].slice(0, MAX_WAITING);
    const isRead = scrollY > 80 || this.element.contains(document.activeElement) || this.list.matches(":hover");
    if (!isRead || !this.cards.length) this.showNews();
    for (const card of this.cards) setText(card.when, ago(card.at, found.now));
    this.showState();
  }

  showState() {
    this.news.hidden = !this.waiting.length;
    setText(this.news, `${this.waiting.length} new`);
    this.legend.hidden = !this.cards.length;
    this.empty.hidden = this.cards.length > 0;
    setText(
      this.empty,
      this.keeps
        ? "Nothing has been sampled from this run yet, or not by you. What is sampled from its saved weights appears here."
        : "This server keeps no samples (GATEWAY_RECENT_SAMPLES is 0).",
    );
  }

  /** Shows one card for each request, newest first. */
  showNews() {
    const requests = new Map();
    for (const sample of this.waiting) {
      if (!requests.has(sample.request_id)) requests.set(sample.request_id, []);
      requests.get(sample.request_id).unshift(sample);
    }
    const cards = [];
    for (const [requestId, samples] of requests) {
      const known = this.cards.find((card) => card.requestId === requestId);
      if (known) {
        known.list.append(...samples.map(sequenceOf));
        known.num += samples.length;
        showSize(known);
      } else {
        cards.push(requestCard(samples, this.now));
      }
    }
    this.list.prepend(...cards.map((card) => card.element));
    this.cards.unshift(...cards);
    for (const old of this.cards.splice(MAX_CARDS)) old.element.remove();
    this.waiting = [];
    this.showState();
  }

  destroy() {
    hideTip();
  }
}

