// The list of runs, with their newest metrics.

import { dashboard } from "./api.js";
import { copy } from "./dialogs.js";
import { Keyed, Sparkline, h, setAttribute, setText } from "./dom.js";
import { ago, asNumber, bytes, count, last, moment, number, shortId } from "./format.js";

const BUSY_S = 20;

export const titleOf = (run) => run.user_metadata?.name || run.name || shortId(run.run_id);

/** The state of a run now, as [state, text]. */
export function stateOf(run, now) {
  if (run.num_pending) return ["busy", run.ended_at === null ? "running" : "ending"];
  if (run.ended_at !== null) {
    const isGood = run.end_reason === "success" || run.end_reason === null;
    return [isGood ? "done" : "ended", run.end_reason === "success" ? "finished" : run.end_reason ?? "ended"];
  }
  const lastAt = Math.max(run.last_request_at, last(run.recent?.at) ?? 0);
  return now - lastAt < BUSY_S ? ["busy", "running"] : ["idle", "idle"];
}

export class RunsView {
  constructor() {
    this.tiles = new Map(
      [
        ["running", "Running"],
        ["rate", "Tokens / s"],
        ["pending", "In work"],
        ["samplers", "Samplers"],
        ["stored", "Checkpoints"],
      ].map(([key, text]) => [key, { text, value: h("dd", {}) }]),
    );
    this.body = h("tbody");
    this.rows = new Keyed(this.body, (run) => this.makeRow(run));
    this.filter = h("input", {
      type: "search",
      placeholder: "Filter by name, model or id",
      "aria-label": "Filter runs",
      oninput: () => this.found && this.show(this.found),
    });
    this.table = h(
      "table",
      { class: "list runs" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Run", "Model", "Steps", "Loss / token", "Grad norm", "Mismatch KL", "Tokens / s", "In work", "Active"].map((text) =>
            h("th", { scope: "col" }, text),
          ),
        ),
      ),
      this.body,
    );
    this.none = h("p", { class: "nothing", hidden: true }, "No run matches.");
    this.head = h("div", { class: "controls" }, h("h1", {}, "Runs"), this.filter);
    this.full = h(
      "div",
      { hidden: true },
      h(
        "dl",
        { class: "figures" },
        [...this.tiles.values()].map(({ text, value }) => h("div", {}, h("dt", {}, text), value)),
      ),
      this.head,
      this.table,
      this.none,
    );
    this.empty = h("section", { class: "empty", hidden: true });
    this.element = h("div", { class: "view" }, this.full, this.empty);
    this.onKey = (event) => {
      if (event.key === "/" && !event.target.matches("input, select, textarea")) {
        event.preventDefault();
        this.filter.focus();
      }
    };
    document.addEventListener("keydown", this.onKey);
    document.title = "Tinsmith";
  }

  makeRow(run) {
    const cell = (label, className) => h("td", { "data-label": label, class: className });
    const state = h("i", { class: "dot" });
    const name = h("a", { href: `#/run/${encodeURIComponent(run.run_id)}` });
    const id = h("small", {});
    const value = h("span", { class: "value" });
    const spark = new Sparkline();
    const row = {
      state,
      name,
      id,
      value,
      spark,
      model: cell("Model", "model"),
      steps: cell("Steps"),
      grad: cell("Grad norm"),
      kl: cell("Mismatch KL"),
      rate: cell("Tokens / s"),
      pending: cell("In work"),
      active: cell("Active", "active"),
    };
    row.element = h(
      "tr",
      {
        "data-run": run.run_id,
        onclick: (event) => {
          if (!event.target.closest("a, button") && !String(getSelection())) location.hash = `#/run/${encodeURIComponent(run.run_id)}`;
        },
      },
      h("td", { class: "name" }, state, h("div", {}, name, id)),
      row.model,
      row.steps,
      h("td", { "data-label": "Loss / token", class: "loss" }, spark.element, value),
      row.grad,
      row.kl,
      row.rate,
      row.pending,
      row.active,
    );
    return row;
  }

  async refresh() {
    this.found = await dashboard("overview");
    this.show(this.found);
  }

  show(found) {
    const { runs, now } = found;
    this.full.hidden = !runs.length;
    this.empty.hidden = runs.length > 0;
    if (!runs.length) return this.showEmpty(found);
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = runs.filter((run) => {
      const text = `${titleOf(run)} ${run.base_model} ${run.run_id}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.none.hidden = wanted.length > 0;
    const busy = runs.filter((run) => stateOf(run, now)[0] === "busy");
    const rate = busy.reduce((sum, run) => sum + (asNumber(last(run.recent?.series["tokens/s"])) ?? 0), 0);
    const serving = found.samplers.filter((state) => state === "serving").length;
    const set = (key, text) => setText(this.tiles.get(key).value, text);
    set("running", `${busy.length} of ${found.num_runs}`);
    set("rate", busy.length ? count(rate) : "0");
    set("pending", number(runs.reduce((sum, run) => sum + run.num_pending, 0)));
    set("samplers", `${serving} of ${found.samplers.length}`);
    this.tiles.get("samplers").value.classList.toggle("broken", serving < found.samplers.length);
    set("stored", `${number(found.num_checkpoints)} · ${bytes(found.checkpoint_bytes)}`);
    this.rows.update(wanted, (run) => run.run_id, (row, run) => this.showRow(row, run, now));
  }

  showRow(row, run, now) {
    const [state, words] = stateOf(run, now);
    const series = run.recent?.series ?? {};
    setAttribute(row.state, "data-state", state);
    setAttribute(row.state, "title", words);
    setAttribute(row.element, "data-state", state);
    const title = titleOf(run);
    const id = shortId(run.run_id);
    setText(row.name, title);
    setText(row.id, title === id ? "no name" : id);
    setText(row.model, `${run.base_model} · ${run.lora_rank === 0 ? "full" : `r${run.lora_rank}`}`);
    setText(row.steps, number(run.num_steps));
    const loss = last(series["loss/token"]);
    setText(row.value, number(loss));
    row.value.classList.toggle("broken", loss === "nan");
    row.spark.show((series["loss/token"] ?? []).map(asNumber));
    setText(row.grad, number(last(series["grad_norm:mean"]), 3));
    setText(row.kl, number(last(series["sampler_kl:mean"]), 3));
    setText(row.rate, count(asNumber(last(series["tokens/s"]))));
    setText(row.pending, number(run.num_pending));
    setText(row.active, ago(Math.max(run.last_request_at, last(run.recent?.at) ?? 0), now));
    setAttribute(row.active, "title", `${words}; started ${moment(run.created_at)}`);
  }

  showEmpty({ base_models: models, needs_key: needsKey }) {
    const model = models[0] ?? "MODEL";
    const key = needsKey ? "YOUR KEY" : "tml-anything";
    const snippet = [
      "import tinker",
      `service = tinker.ServiceClient(base_url="${location.origin}", api_key="${key}")`,
      `trainer = service.create_lora_training_client(base_model="${model}", rank=16)`,
    ].join("\n");
    if (this.snippet === snippet) return;
    this.snippet = snippet;
    this.empty.replaceChildren(
      h("h1", {}, "No runs yet"),
      h("p", {}, "Point the tinker SDK at this server. The run appears here as soon as it is made."),
      h("pre", {}, h("code", {}, snippet)),
      h("button", { class: "primary", type: "button", onclick: () => copy(snippet, "Snippet copied") }, "Copy"),
      h("p", { class: "models" }, "Serves ", models.length ? models.map((each) => h("code", {}, each)) : "nothing yet: the services are starting"),
    );
  }

  destroy() {
    document.removeEventListener("keydown", this.onKey);
  }
}
