// The checkpoints of one run, with their actions, which all use the public API.

import { Refused, call, checkpointUrl, downloadUrl } from "./api.js";
import { confirm, copy, toast } from "./dialogs.js";
import { Keyed, h, setAttribute, setText } from "./dom.js";
import { NONE, ago, bytes, moment, number, problemOf, until } from "./format.js";

const KINDS = {
  weights: ["training", "Adapter and optimizer, to go on training"],
  sampler_weights: ["sampler", "Adapter, to sample from"],
  external_weights: ["download", "Adapter files, to use elsewhere"],
};
const LIFETIMES = [
  ["", "Keep for"],
  ["never", "ever"],
  ["3600", "1 hour"],
  ["86400", "1 day"],
  ["604800", "7 days"],
  ["2592000", "30 days"],
];
const MAX_CERTIFICATES = 24;

export class Checkpoints {
  constructor(onChange) {
    this.onChange = onChange;
    this.certificates = new Map();
    this.body = h("tbody");
    this.rows = new Keyed(this.body, (row) => this.makeRow(row));
    this.table = h(
      "table",
      { class: "list checkpoints" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Name", "Step", "Size", "Saved", "Expires", "On samplers", "Gap", "Actions"].map((text) =>
            h("th", { scope: "col", title: HELP[text] }, text),
          ),
        ),
      ),
      this.body,
    );
    this.empty = h(
      "p",
      { class: "nothing", hidden: true },
      "No checkpoints. save_state and save_weights_for_sampler make them.",
    );
    this.element = h("section", { "aria-label": "Checkpoints" }, this.table, this.empty);
  }

  makeRow(checkpoint) {
    const [kind, help] = KINDS[checkpoint.kind] ?? [checkpoint.kind, ""];
    const cell = (label) => h("td", { "data-label": label });
    const [step, size, saved, expires, holders, gap] = ["Step", "Size", "Saved", "Expires", "On samplers", "Gap"].map(cell);
    const shared = h("span", { class: "badge public", hidden: true, title: "Anyone who has the path may read it" }, "published");
    const publish = h("button", { type: "button" });
    const lifetime = h(
      "select",
      { "aria-label": `Lifetime of ${checkpoint.name}` },
      LIFETIMES.map(([value, text]) => h("option", { value }, text)),
    );
    const path = checkpoint.path;
    const row = { step, size, saved, expires, holders, gap, shared, publish, checkpoint };
    const act = (work, done) => this.act(row, work, done);
    publish.addEventListener("click", () => {
      const isPublic = row.checkpoint.public;
      act(() => call(checkpointUrl(path, "/publish"), { method: isPublic ? "DELETE" : "POST" }), isPublic ? "No longer published" : "Published");
    });
    lifetime.addEventListener("change", () => {
      const value = lifetime.value;
      lifetime.value = "";
      if (!value) return;
      const seconds = value === "never" ? null : Number(value);
      act(() => call(checkpointUrl(path, "/ttl"), { method: "PUT", body: { ttl_seconds: seconds } }), "Lifetime set");
    });
    row.element = h(
      "tr",
      { "data-path": path },
      h(
        "td",
        { class: "name" },
        h("span", { class: `badge ${kind}`, title: help }, kind),
        h("strong", {}, checkpoint.name),
        shared,
      ),
      step,
      size,
      saved,
      expires,
      holders,
      gap,
      h(
        "td",
        { class: "actions" },
        h("button", { type: "button", onclick: () => copy(path, "Path copied"), title: path }, "Copy path"),
        h("button", { type: "button", onclick: () => act(() => this.download(path)) }, "Download"),
        publish,
        lifetime,
        h("button", { class: "delete", type: "button", onclick: () => this.remove(row) }, "Delete"),
      ),
    );
    return row;
  }

  show(checkpoints, now) {
    this.table.hidden = !checkpoints.length;
    this.empty.hidden = checkpoints.length > 0;
    this.rows.update(
      checkpoints,
      (each) => each.path,
      (row, each) => {
        row.checkpoint = each;
        setText(row.step, number(each.step));
        setText(row.size, bytes(each.size_bytes));
        setText(row.saved, ago(each.created_at, now));
        setAttribute(row.saved, "title", moment(each.created_at));
        setText(row.expires, each.expires_at === null ? "never" : until(each.expires_at, now));
        row.shared.hidden = !each.public;
        setText(row.publish, each.public ? "Unpublish" : "Publish");
        setText(row.holders, each.kind === "sampler_weights" ? `${each.num_holders} of ${each.num_samplers}` : NONE);
        this.showGap(row);
      },
    );
    this.certify(checkpoints);
  }

  showGap(row) {
    const found = this.certificates.get(row.checkpoint.path);
    if (!found?.samplers?.length) return setText(row.gap, NONE);
    const worst = Math.max(...found.samplers.map((each) => Number(each.max_gap === "inf" ? Infinity : each.max_gap)));
    setText(row.gap, `${number(worst, 2)} nats`);
    setAttribute(row.gap, "class", found.passed ? "good" : "bad");
    setAttribute(row.gap, "title", found.samplers.map((each) => `${each.address}: ${each.max_gap}; applied: ${each.applied ?? "not asked"}`).join("\n"));
  }

  /** Reads the gaps between samplers and trainer, once for each version. */
  async certify(checkpoints) {
    const wanted = checkpoints
      .filter((each) => each.kind === "sampler_weights" && !this.certificates.has(each.path))
      .slice(0, MAX_CERTIFICATES);
    for (const { path } of wanted) {
      this.certificates.set(path, null);
      try {
        this.certificates.set(path, await call(checkpointUrl(path, "/certificate")));
      } catch (error) {
        if (!(error instanceof Refused) || error.status !== 404) this.certificates.delete(path);
      }
    }
  }

  async act(row, work, done) {
    const controls = row.element.querySelectorAll("button, select");
    for (const each of controls) each.disabled = true;
    try {
      await work();
      if (done) toast(done);
    } catch (error) {
      toast(problemOf(error), "bad");
    } finally {
      for (const each of controls) each.disabled = false;
      await this.onChange();
    }
  }

  async download(path) {
    const { url } = await call(downloadUrl(path));
    location.assign(url);
  }

  async remove(row) {
    const { path, size_bytes: size } = row.checkpoint;
    const isSure = await confirm({
      title: "Delete this checkpoint?",
      text: `Its ${bytes(size)} are freed at once, and it cannot be brought back.`,
      subject: path,
      action: "Delete",
    });
    if (isSure) await this.act(row, () => call(checkpointUrl(path), { method: "DELETE" }), "Deleted");
  }
}

const HELP = {
  "On samplers": "Samplers that hold these weights now, out of those that serve the model; the others get them on demand",
  Gap: "Largest difference of a logprob between trainer and sampler, when the weights were last published",
};
