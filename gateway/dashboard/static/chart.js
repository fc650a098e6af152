// Charts of a run: one for each metric. All charts of a page share the cursor and the range of x.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { h, setText } from "./dom.js";
import { duration, number } from "./format.js";

const HEIGHT = 168;
const probe = h("span", { hidden: true });

/** A colour variable of the style sheet, in a form that a canvas takes. */
function color(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** Exponential moving average, corrected for its bias at the start, as TensorBoard's; gaps stay gaps. */
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null) return null;
    seen += 1;
    mean = weight * mean + (1 - weight) * value;
    return mean / (1 - weight ** seen);
  });
}

function axisNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || size < 1e-3) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return String(Number(value.toPrecision(6)));
}

/** Labels of a logarithmic axis: whole powers of ten, as many as fit. */
function decades(u, splits) {
  const tens = splits.filter((each) => Math.abs(Math.log10(each) - Math.round(Math.log10(each))) < 1e-6);
  const every = Math.ceil(tens.length / 6);
  const shown = new Set(tens.filter((_, index) => index % every === 0));
  return splits.map((each) => (shown.has(each) || tens.length < 2 ? each : null));
}

export class Chart {
  /** `about`: {name, title, unit, help, log}. `group`: state that all charts of a page share. */
  constructor(about, group) {
    this.about = about;
    this.group = group;
    this.isLog = Boolean(about.log);
    this.value = h("output", { class: "chart-value" });
    this.at = h("span", { class: "chart-at" });
    this.logButton = h(
      "button",
      {
        class: "chip",
        type: "button",
        "aria-pressed": String(this.isLog),
        title: "Logarithmic scale",
        "aria-label": `Logarithmic scale of ${about.title}`,
        onclick: () => this.toggleLog(),
      },
      "log",
    );
    this.box = h("div", { class: "chart-box" });
    this.element = h(
      "figure",
      { class: "chart", "data-metric": about.name },
      h(
        "figcaption",
        {},
        h("span", { class: "chart-title", title: about.help }, about.title),
        about.unit ? h("span", { class: "chart-unit" }, about.unit) : null,
        this.logButton,
        h("span", { class: "chart-now" }, this.at, this.value),
      ),
      this.box,
    );
    this.plot = null;
  }

  toggleLog() {
    this.isLog = !this.isLog;
    this.logButton.setAttribute("aria-pressed", String(this.isLog));
    this.rebuild();
  }

  /** `xs`: steps or times. `values`: the metric's values; null is a gap, "nan" a value that was not finite. */
  show(xs, values) {
    this.xs = xs;
    this.values = values;
    this.broken = xs.filter((_, index) => values[index] === "nan");
    this.raw = values.map((value) => (typeof value === "number" && !(this.isLog && value <= 0) ? value : null));
    const data = [xs, this.raw, this.smoothing ? smooth(this.raw, this.smoothing) : this.raw];
    if (this.plot) {
      this.plot.setData(data, false);
      this.applyRange();
    } else if (this.element.isConnected && this.box.clientWidth > 0) {
      this.build(data);
    }
    this.element.dataset.points = String(this.raw.filter((value) => value !== null).length);
    this.showValue(null);
  }

  get smoothing() {
    return this.about.isExact ? 0 : this.group.smoothing;
  }

  applyRange() {
    const range = this.group.range;
    const xs = this.xs;
    if (!xs.length) return;
    const [min, max] = range ?? [xs[0], xs[xs.length - 1]];
    this.plot.batch(() => {
      this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
    });
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (this.xs) this.show(this.xs, this.values);
  }

  build(data) {
    const { group } = this;
    const line = color("--curve");
    const grid = { stroke: color("--grid"), width: 1 };
    const ticks = { show: false };
    const text = color("--muted");
    const font = "11px system-ui, sans-serif";
    const options = {
      width: this.box.clientWidth,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: group.key },
        points: { size: 6, fill: line, stroke: color("--surface"), width: 1.5, show: (u, n) => this.cursorPoint(u, n) },
        drag: { x: true, y: false, setScale: false },
      },
      scales: {
        x: { time: group.axis === "time" },
        y: { distr: this.isLog ? 3 : 1, range: (u, min, max) => this.yRange(min, max) },
      },
      axes: [
        { stroke: text, font, grid: { show: false }, ticks, size: 24, gap: 4, space: 60 },
        {
          stroke: text,
          font,
          grid: this.isLog ? { ...grid, filter: decades } : grid,
          ticks,
          ...(this.isLog ? { filter: decades } : {}),
          size: (u, labels) => Math.max(36, 8 + 6.4 * Math.max(0, ...(labels ?? []).map((label) => (label ?? "").length))),
          gap: 4,
          space: 34,
          values: (u, splits) => splits.map((each) => (each === null ? null : axisNumber(each))),
        },
      ],
      series: [
        {},
        {
          stroke: this.smoothing ? color("--curve-faint") : line,
          width: this.smoothing ? 1 : 1.5,
          points: { show: this.raw.filter((each) => each !== null).length < 40, size: 4, fill: line, stroke: line },
        },
        { stroke: line, width: 1.8, show: Boolean(this.smoothing), points: { show: false } },
      ],
      hooks: {
        drawClear: [(u) => this.drawMarks(u)],
        setCursor: [(u) => this.showValue(u.cursor.idx)],
        setSelect: [(u) => this.zoom(u)],
      },
    };
    this.plot = new uPlot(options, data, this.box);
    this.plot.over.addEventListener("dblclick", () => group.setRange(null));
    this.applyRange();
  }

  cursorPoint() {
    const element = document.createElement("div");
    element.className = "u-cursor-pt";
    return element;
  }

  yRange(min, max) {
    if (min === null || max === null || !Number.isFinite(min)) return this.isLog ? [0.1, 1] : [0, 1];
    if (this.isLog) {
      return min === max ? [min / 3, max * 3] : [min / 1.15, max * 1.15];
    }
    if (min === max) {
      const pad = Math.abs(min) * 0.1 || 1;
      return min === 0 ? [0, 1] : [min - pad, max + pad];
    }
    const pad = (max - min) * 0.08;
    return [min >= 0 && min - pad < 0 ? 0 : min - pad, max + pad];
  }

  /** Draws saves as ticks at the bottom, and values that were not finite as red lines. */
  drawMarks(u) {
    const { ctx, bbox } = u;
    const draw = (xs, stroke, height) => {
      ctx.save();
      ctx.strokeStyle = stroke;
      ctx.lineWidth = 1.5 * devicePixelRatio;
      for (const x of xs) {
        const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(at, bbox.top + bbox.height - height);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    };
    draw(this.group.marks, color("--mark"), 7 * devicePixelRatio);
    draw(this.broken ?? [], color("--bad"), bbox.height);
  }

  zoom(u) {
    if (u.select.width < 4) return;
    const min = u.posToVal(u.select.left, "x");
    const max = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.group.setRange([min, max]);
  }

  showValue(index) {
    const isPast = index !== null && index !== undefined && this.values?.[index] !== undefined;
    let at = index;
    if (!isPast) {
      at = (this.values?.length ?? 0) - 1;
      while (at >= 0 && this.values[at] === null) at -= 1;
    }
    const value = at >= 0 ? this.values?.[at] : null;
    setText(this.value, this.about.unit === "s" ? duration(value) : number(value));
    this.value.classList.toggle("broken", value === "nan");
    setText(this.at, isPast ? this.group.label(index) : "");
  }

  resize() {
    if (this.plot) this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
    else if (this.xs) this.show(this.xs, this.values);
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}
