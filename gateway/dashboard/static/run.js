// One run: its facts, its newest metrics, and tabs for its parts.

import { dashboard, endRun } from "./api.js";
import { Checkpoints } from "./checkpoints.js";
import { confirmEnd, copy } from "./dialogs.js";
import { h, setAttribute, setText } from "./dom.js";
import { ago, bytes, count, last, moment, number, shortId } from "./format.js";
import { Metrics } from "./metrics.js";
import { stateOf, titleOf } from "./runs.js";
import { Samples } from "./samples.js";

const FIGURES = [
  ["steps", "Steps"],
  ["loss/token", "Loss / token"],
  ["grad_norm:mean", "Grad norm"],
  ["learning_rate:mean", "Learning rate"],
  ["tokens/s", "Tokens / s"],
  ["sampler_kl:mean", "Mismatch KL"],
  ["num_pending", "In work"],
];

export class RunView {
  constructor(runId, part) {
    this.runId = runId;
    this.part = part || "metrics";
    this.state = h("span", { class: "state" });
    this.name = h("h1", {});
    this.end = h("button", { type: "button", hidden: true, onclick: () => this.endRun() }, "End run");
    this.facts = h("p", { class: "facts" });
    this.figures = new Map(FIGURES.map(([key, text]) => [key, { text, value: h("dd", {}) }]));
    const base = `#/run/${encodeURIComponent(runId)}`;
    this.tabs = new Map(
      [
        ["metrics", "Metrics"],
        ["samples", "Samples"],
        ["checkpoints", "Checkpoints"],
        ["details", "Details"],
      ].map(([key, text]) => [
        key,
        h("a", { href: key === "metrics" ? base : `${base}/${key}`, "aria-current": key === this.part ? "page" : null }, text),
      ]),
    );
    this.content = this.make();
    this.element = h(
      "div",
      { class: "view" },
      h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "#/" }, "Runs"), h("span", {}, shortId(runId))),
      h("header", { class: "run-head" }, h("div", { class: "run-title" }, this.name, this.state, this.end), this.facts),
      h(
        "dl",
        { class: "figures" },
        [...this.figures.values()].map(({ text, value }) => h("div", {}, h("dt", {}, text), value)),
      ),
      h("nav", { class: "tabs", "aria-label": "Parts of the run" }, [...this.tabs.values()]),
      this.content.element,
    );
  }

  make() {
    if (this.part === "samples") return new Samples(this.runId);
    if (this.part === "checkpoints") return new Checkpoints(() => this.refresh());
    if (this.part === "details") return { element: h("dl", { class: "details" }) };
    return new Metrics(this.runId);
  }

  async refresh() {
    const [found] = await Promise.all([
      dashboard(`runs/${encodeURIComponent(this.runId)}`),
      this.content.refresh ? this.content.refresh() : null,
    ]);
    this.show(found);
  }

  show(run) {
    const { now, recent } = run;
    const [state, why] = stateOf(run, now);
    setAttribute(this.state, "data-state", state);
    setText(this.state, why);
    setText(this.name, titleOf(run));
    this.end.hidden = run.ended_at !== null;
    const rank = run.lora_rank === 0 ? "all parameters" : `rank ${run.lora_rank}`;
    setText(
      this.facts,
      [run.base_model, rank, run.layers.join(" + "), run.optimizer, `started ${ago(run.created_at, now)}`].filter(Boolean).join("  ·  "),
    );
    for (const [key, { value }] of this.figures) {
      const found = key === "steps" ? run.num_steps : key === "num_pending" ? run.num_pending : last(recent?.series[key]);
      setText(value, key === "tokens/s" ? count(found) : number(found));
      value.classList.toggle("broken", found === "nan");
    }
    setText(this.tabs.get("checkpoints"), `Checkpoints ${run.checkpoints.length || ""}`.trim());
    if (this.content instanceof Metrics) this.content.setMarks(run.checkpoints);
    if (this.content instanceof Checkpoints) this.content.show(run.checkpoints, now);
    if (this.part === "details") this.showDetails(run);
    const loss = last(recent?.series["loss/token"]);
    if (!this.element.isConnected) return; // the user has gone to another page meanwhile
    document.title = `${loss === null ? "" : `${number(loss)} · `}${titleOf(run)} · Tinsmith`;
  }

  async endRun() {
    const isEnded = await confirmEnd({ what: "run", id: this.runId, end: () => endRun(this.runId) });
    if (isEnded) await this.refresh();
  }

  showDetails(run) {
    if (this.content.shown) return;
    this.content.shown = true;
    const facts = [
      ["Run", run.run_id],
      ["Session", run.session_id],
      ["Base model", run.base_model],
      ["Rank", run.lora_rank === 0 ? "all parameters" : run.lora_rank],
      ["Trained layers", run.layers.join(", ")],
      ["Optimizer", run.optimizer],
      ["Created", moment(run.created_at)],
      ["Last request", moment(run.last_request_at)],
      ["Session ended", run.session_ended_at === null ? "no" : `${moment(run.session_ended_at)} (${run.end_reason})`],
      ["Checkpoints", `${run.checkpoints.length}, ${bytes(run.checkpoint_bytes)}`],
      ...Object.entries(run.user_metadata ?? {}).map(([key, value]) => [`user_metadata.${key}`, value]),
    ];
    this.content.element.append(
      ...facts.map(([name, value]) =>
        h(
          "div",
          {},
          h("dt", {}, name),
          h(
            "dd",
            {},
            h("code", {}, String(value)),
            name === "Run" ? h("button", { class: "quiet", type: "button", onclick: () => copy(run.run_id, "Id copied") }, "Copy") : null,
          ),
        ),
      ),
    );
  }

  destroy() {
    this.content.destroy?.();
  }
}
