// State and load of the gateway, the trainers and the samplers.

import { dashboard } from "./api.js";
import { Keyed, Sparkline, h, setAttribute, setText } from "./dom.js";
import { NONE, bytes, count, duration, number } from "./format.js";

const KEPT = 90;

const sum = (figures, prefix) => {
  const found = Object.entries(figures).filter(([name]) => name === prefix || name.startsWith(`${prefix}:`));
  return found.length ? found.reduce((total, [, value]) => total + value, 0) : null;
};

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : NONE);

function gap(figures) {
  const total = sum(figures, "trainer_publish_gap_nats_sum");
  const measured = sum(figures, "trainer_publish_gap_nats_count");
  return measured ? `${number(total / measured, 2)} nats` : NONE;
}

function certificates(figures) {
  const of = (outcome) => figures[`trainer_publish_certificates_total:${outcome}`] ?? 0;
  const bad = [["refused", of("refused")], ["warned", of("warned")], ["unscored", of("unscored")]].filter(([, n]) => n);
  return [`${number(of("passed"))} passed`, ...bad.map(([name, n]) => `${number(n)} ${name}`)].join(", ");
}

/** One service that stands for all trainers, with the sums of their figures. */
function allTrainers(trainers) {
  const figures = {};
  for (const [name, value] of trainers.flatMap((one) => Object.entries(one.figures ?? {}))) {
    figures[name] = (figures[name] ?? 0) + value;
  }
  const serving = trainers.filter((one) => one.state === "serving").length;
  const about = `${serving} of ${trainers.length} serve`;
  return { address: "together", about, state: serving ? "serving" : "gone", figures };
}

/** The rows that are shown for each kind of service: [label, (figures, service, time) => text]. */
const SHOWN = {
  gateway: [
    ["Memory", (f) => bytes(f.process_resident_memory_bytes)],
    ["Up", (f, one, at) => duration(at - f.process_start_time_seconds)],
    ["Work without an answer", (f) => number(sum(f, "gateway_pending_futures") ?? 0)],
    ["Resubmitted samples", (f) => number(sum(f, "gateway_resubmissions_total") ?? 0)],
    ["Open files", (f) => number(f.process_open_fds)],
  ],
  trainer: [
    ["Memory", (f) => bytes(f.process_resident_memory_bytes)],
    ["Up", (f, one, at) => duration(at - f.process_start_time_seconds)],
    ["Queue", (f) => number(sum(f, "trainer_queue_length") ?? 0)],
    ["Models in memory", (f) => number(f.trainer_models)],
    ["Parked models", (f) => number(f.trainer_parked_models)],
    ["Token budget", (f) => count(f.trainer_token_budget)],
    ["Tokens per second", (f) => count(f.trainer_tokens_per_second)],
    ["Threads", (f) => number(f.trainer_threads)],
    ["Journal", (f) => bytes(f.trainer_journal_bytes)],
    ["Certificates", (f) => certificates(f)],
    ["Mean gap to samplers", (f) => gap(f)],
    ["Out of memory", (f) => number(f.trainer_out_of_memory_total ?? 0)],
  ],
  "all trainers": [
    ["Memory", (f) => bytes(f.process_resident_memory_bytes)],
    ["Queue", (f) => number(sum(f, "trainer_queue_length") ?? 0)],
    ["Models in memory", (f) => number(f.trainer_models)],
    ["Parked models", (f) => number(f.trainer_parked_models)],
    ["Tokens per second", (f) => count(f.trainer_tokens_per_second)],
    ["Journals", (f) => bytes(f.trainer_journal_bytes)],
    ["Certificates", (f) => certificates(f)],
    ["Out of memory", (f) => number(f.trainer_out_of_memory_total ?? 0)],
  ],
  sampler: [
    ["Memory", (f) => bytes(f.process_resident_memory_bytes)],
    ["Up", (f, one, at) => duration(at - f.process_start_time_seconds)],
    ["Threads", (f) => number(f.sampler_threads)],
    ["Generating", (f) => number(f.sampler_running_sequences)],
    ["Waiting", (f) => number(f.sampler_waiting_requests)],
    ["Versions", (f) => `${number(f.sampler_resident_versions)} · ${bytes(f.sampler_resident_version_bytes)}`],
    ["KV cache", (f) => bytes(f.sampler_kv_cache_bytes)],
    ["Prefix cache hits", (f) => share(f.sampler_prefix_cache_hits_total, f.sampler_prefix_cache_lookups_total)],
    ["Publishes", (f) => number(sum(f, "sampler_publishes_total") ?? 0)],
  ],
};

const RATES = {
  gateway: [["Trained tokens / s", "gateway_trained_tokens_total"]],
  trainer: [["Tokens / s", "trainer_tokens_total"]],
  "all trainers": [["Tokens / s", "trainer_tokens_total"]],
  sampler: [["Sampled tokens / s", "sampler_sampled_tokens_total"]],
};

const STATES = {
  serving: "serving",
  gone: "no connection",
  silent: "connected, but does not answer",
  loading: "loading",
};

/** The runs of one of several trainers, and how far its draining is; null for a service without runs. */
function runs(one) {
  if (one.num_runs === undefined) return null;
  if (one.can_be_stopped) return "drained, can be stopped";
  const all = `${number(one.num_runs)} ${one.num_runs === 1 ? "run" : "runs"}`;
  if (!one.is_drained) return all;
  return `draining, ${all} left${one.num_problems ? ` (${number(one.num_problems)} cannot move yet)` : ""}`;
}

export class ServicesView {
  constructor() {
    this.list = h("div", { class: "cards" });
    this.cards = new Keyed(this.list, ({ kind, one }) => this.makeCard(kind, one));
    this.element = h("div", { class: "view" }, h("div", { class: "controls" }, h("h1", {}, "Services")), this.list);
    document.title = "Services · Tinsmith";
  }

  makeCard(kind, one) {
    const state = h("span", { class: "state" });
    const about = h("p", { class: "facts" });
    const rates = RATES[kind].map(([text, name]) => ({
      name,
      past: [],
      value: h("dd", {}),
      spark: new Sparkline(240, 36),
      text,
      before: null,
    }));
    const figures = SHOWN[kind].map(([text, of]) => ({ text, of, value: h("dd", {}) }));
    const element = h(
      "article",
      { class: "card", "data-service": one.address },
      h("header", {}, h("h2", {}, kind), h("h3", {}, one.address), state),
      about,
      rates.map((rate) => h("div", { class: "rate" }, h("dl", {}, h("dt", {}, rate.text), rate.value), rate.spark.element)),
      h("dl", { class: "pairs" }, figures.map(({ text, value }) => h("div", {}, h("dt", {}, text), value))),
    );
    return { element, state, about, rates, figures };
  }

  async refresh() {
    const found = await dashboard("services");
    const gateway = { address: location.host, state: "serving", ...found.gateway };
    const all = [
      { kind: "gateway", one: gateway },
      ...(found.trainers.length > 1 ? [{ kind: "all trainers", one: allTrainers(found.trainers) }] : []),
      ...found.trainers.map((one) => ({ kind: "trainer", one })),
      ...found.samplers.map((one) => ({ kind: "sampler", one })),
    ];
    this.cards.update(all, ({ kind, one }) => `${kind} ${one.address}`, (card, { kind, one }) => this.show(kind, card, one, found.at));
  }

  show(kind, card, one, at) {
    setAttribute(card.state, "data-state", one.state === "serving" ? "busy" : "ended");
    setText(card.state, STATES[one.state] ?? one.state);
    const facts = [
      one.about,
      runs(one),
      (one.base_models ?? []).join(", "),
      one.engine ? `${one.engine} engine` : null,
      one.device,
      one.max_context_length ? `context ${number(one.max_context_length)}` : null,
      one.max_lora_rank ? `rank ≤ ${one.max_lora_rank}` : null,
    ];
    setText(card.about, facts.filter(Boolean).join("  ·  "));
    for (const { of, value } of card.figures) setText(value, one.figures ? of(one.figures, one, at) : NONE);
    for (const rate of card.rates) this.showRate(rate, one.figures?.[rate.name] ?? null, at);
  }

  /** Turns counters into rates, from the difference of two answers. */
  showRate(rate, total, at) {
    if (rate.before && total !== null && at > rate.before.at && total >= rate.before.total) {
      rate.past.push((total - rate.before.total) / (at - rate.before.at));
      if (rate.past.length > KEPT) rate.past.shift();
    }
    if (!rate.before || at > rate.before.at) rate.before = total === null ? null : { total, at };
    setText(rate.value, rate.past.length ? count(rate.past[rate.past.length - 1]) : NONE);
    rate.spark.show(rate.past, 0);
  }
}
