// The charts of one run.

import { Chart } from "./chart.js";
import { dashboard } from "./api.js";
import { arrange, h } from "./dom.js";
import { moment, number } from "./format.js";

const KNOWN = [
  ["loss/token", "Loss per token", "nats", "Loss of a step divided by the tokens of its model inputs"],
  ["grad_norm:mean", "Gradient norm", "", "Global L2 norm, before clipping"],
  ["learning_rate:mean", "Learning rate", "", "As given to optim_step", { isExact: true }],
  ["tokens/s", "Throughput", "tokens/s", "Tokens trained on between two steps, by wall-clock time"],
  ["sampler_kl:mean", "Mismatch: KL(sampler ‖ trainer)", "nats", "Estimator k3, for each sampled token", { log: true }],
  ["ess:mean", "Effective sample size", "of 1", "Kish's effective sample size, as a share of the sampled tokens"],
  ["ratio:max", "Largest ratio", "", "The trainer's probability of a sampled token, divided by the sampler's"],
  ["s/step", "Time per step", "s", "From one optimizer step to the next"],
  ["compute/step", "Compute per step", "s", "Time that the trainer worked on this run's requests; it may work on others' at once"],
  ["tokens/step", "Tokens per step", "", "Tokens of the model inputs", { isExact: true }],
  ["forward/loss/token", "Loss per token, forward only", "nats", "Loss of batches without gradients"],
];

function describe(name) {
  const known = KNOWN.find(([each]) => each === name);
  if (known) return { name, title: known[1], unit: known[2], help: known[3], ...known[4] };
  return { name, title: name.replace(/^custom\//, ""), unit: "", help: name };
}

function stored(name, fallback) {
  try {
    return localStorage.getItem(name) ?? fallback;
  } catch {
    return fallback;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // Without storage, the choice lasts as long as the page.
  }
}

export class Metrics {
  constructor(runId) {
    this.runId = runId;
    this.data = { seq: [], step: [], at: [], series: {} };
    this.charts = new Map();
    this.group = {
      key: `run-${runId}`,
      axis: stored("tinsmith-axis", "step"),
      smoothing: Number(stored("tinsmith-smoothing", "0.6")),
      range: null,
      marks: [],
      setRange: (range) => this.setRange(range),
      label: (index) => this.label(index),
    };
    this.grid = h("div", { class: "charts" });
    this.empty = h(
      "p",
      { class: "nothing" },
      "No numbers yet: they appear with the first optimizer step.",
    );
    this.reset = h(
      "button",
      { class: "chip", type: "button", hidden: true, onclick: () => this.setRange(null) },
      "Reset zoom",
    );
    this.element = h("section", { "aria-label": "Metrics" }, this.controls(), this.grid, this.empty);
    this.observer = new ResizeObserver(() => {
      for (const chart of this.charts.values()) chart.resize();
    });
    this.observer.observe(this.grid);
  }

  controls() {
    const axis = (value, text) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String(this.group.axis === value),
          onclick: (event) => {
            this.group.axis = value;
            this.group.range = null;
            store("tinsmith-axis", value);
            for (const each of event.target.parentElement.children) {
              each.setAttribute("aria-pressed", String(each === event.target));
            }
            this.rebuild();
          },
        },
        text,
      );
    const shown = h("output", {}, this.group.smoothing.toFixed(2));
    const slider = h("input", {
      type: "range",
      min: "0",
      max: "0.98",
      step: "0.02",
      value: this.group.smoothing,
      "aria-label": "Smoothing",
      oninput: () => {
        this.group.smoothing = Number(slider.value);
        shown.textContent = this.group.smoothing.toFixed(2);
        store("tinsmith-smoothing", slider.value);
        this.rebuild();
      },
    });
    return h(
      "div",
      { class: "controls" },
      h("div", { class: "switch", role: "group", "aria-label": "Horizontal axis" }, axis("step", "Step"), axis("time", "Time")),
      h("label", { class: "slider" }, "Smoothing", slider, shown),
      this.reset,
      h("span", { class: "hint" }, "drag to zoom, double-click to reset"),
    );
  }

  label(index) {
    return `step ${number(this.data.step[index])} · ${moment(this.data.at[index])}`;
  }

  setRange(range) {
    this.group.range = range;
    this.reset.hidden = range === null;
    for (const chart of this.charts.values()) if (chart.plot) chart.applyRange();
  }

  rebuild() {
    this.setMarks(this.checkpoints ?? []);
    for (const chart of this.charts.values()) chart.destroy();
    this.draw();
  }

  /** Marks each save at the newest step before it. */
  setMarks(checkpoints) {
    this.checkpoints = checkpoints;
    const { at, step } = this.data;
    const marks = checkpoints.map(({ created_at: created }) => {
      if (this.group.axis === "time") return created;
      let index = at.length - 1;
      while (index >= 0 && at[index] > created) index -= 1;
      return index < 0 ? null : step[index];
    });
    this.group.marks = [...new Set(marks.filter((each) => each !== null))];
  }

  /** Adds the newest points. One request at a time, because two would add the same points twice. */
  refresh() {
    this.adding ??= this.add().finally(() => {
      this.adding = null;
    });
    return this.adding;
  }

  async add() {
    const { seq, step } = this.data;
    const after = seq.length ? `?after=${seq[seq.length - 1]}&steps=${step[step.length - 1]}` : "";
    const found = await dashboard(`runs/${encodeURIComponent(this.runId)}/history${after}`);
    if (!found.reset && !found.seq.length) {
      if (!this.charts.size) this.draw();
      return;
    }
    this.take(found);
    this.setMarks(this.checkpoints ?? []);
    this.draw();
  }

  take(found) {
    if (found.reset) {
      this.data = { seq: found.seq, step: found.step, at: found.at, series: found.series };
      return;
    }
    const before = this.data.seq.length;
    for (const name of ["seq", "step", "at"]) this.data[name] = this.data[name].concat(found[name]);
    const names = new Set([...Object.keys(this.data.series), ...Object.keys(found.series)]);
    for (const name of names) {
      const older = this.data.series[name] ?? Array(before).fill(null);
      const newer = found.series[name] ?? Array(found.seq.length).fill(null);
      this.data.series[name] = older.concat(newer);
    }
  }

  draw() {
    const { series } = this.data;
    const order = [...KNOWN.map(([name]) => name).filter((name) => name in series)];
    order.push(...Object.keys(series).filter((name) => !order.includes(name)).sort());
    for (const name of order) if (!this.charts.has(name)) this.charts.set(name, new Chart(describe(name), this.group));
    arrange(this.grid, order.map((name) => this.charts.get(name).element));
    this.empty.hidden = order.length > 0;
    const xs = this.group.axis === "time" ? this.data.at : this.data.step;
    for (const name of order) this.charts.get(name).show(xs, series[name]);
  }

  destroy() {
    this.observer.disconnect();
    for (const chart of this.charts.values()) chart.destroy();
  }
}
