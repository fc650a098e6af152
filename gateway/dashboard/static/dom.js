// Helpers for elements. Text is always inserted as text, never as markup, because a model may have written it.

const SVG = "http://www.w3.org/2000/svg";

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** h("button", {class: "x", onclick: f, "aria-label": "y"}, "text", node, ...) */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return add(element, children);
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return add(element, children);
}

/** Sets the text only if it differs, so that a selection survives an update. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Makes these elements the children of the parent, in this order; moves only those that are out of place. */
export function arrange(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, index) => {
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
}

/** Rows by key: a row keeps its element while its content changes. */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.known = new Map();
  }

  update(items, keyOf, show) {
    const elements = items.map((item) => {
      const key = keyOf(item);
      if (!this.known.has(key)) this.known.set(key, this.make(item));
      const row = this.known.get(key);
      show(row, item);
      return row.element;
    });
    const keys = new Set(items.map(keyOf));
    for (const key of this.known.keys()) if (!keys.has(key)) this.known.delete(key);
    arrange(this.parent, elements);
  }
}

/** A small curve that fills the width of its box. */
export class Sparkline {
  constructor(width = 120, height = 28) {
    this.width = width;
    this.height = height;
    this.line = svg("path", { class: "spark-line" });
    this.area = svg("path", { class: "spark-area" });
    this.element = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      this.line,
    );
  }

  show(values, floor = null) {
    const points = values.map((value, index) => [index, value]).filter(([, value]) => Number.isFinite(value));
    if (points.length < 2) {
      this.line.setAttribute("d", "");
      this.area.setAttribute("d", "");
      return;
    }
    const ys = points.map(([, value]) => value);
    const low = floor === null ? Math.min(...ys) : Math.min(floor, ...ys);
    const high = Math.max(...ys);
    const span = high - low || 1;
    const first = points[0][0];
    const width = points[points.length - 1][0] - first || 1;
    const place = ([x, y]) =>
      `${(((x - first) / width) * this.width).toFixed(1)},${(this.height - 2 - ((y - low) / span) * (this.height - 4)).toFixed(1)}`;
    const path = `M${points.map(place).join("L")}`;
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}L${this.width},${this.height}L0,${this.height}Z`);
  }
}
