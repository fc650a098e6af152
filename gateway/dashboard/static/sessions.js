// The list of sessions: each ServiceClient of the SDK is one.

import { dashboard, endSession } from "./api.js";
import { confirmEnd } from "./dialogs.js";
import { Keyed, h, setAttribute, setText } from "./dom.js";
import { ago, moment, number, shortId } from "./format.js";

const SILENT_S = 60;

function stateOf(session, now) {
  if (session.ended_at === null) {
    return now - session.last_seen_at < SILENT_S ? ["busy", "active"] : ["idle", "silent"];
  }
  return session.end_reason === "success" ? ["done", "finished"] : ["ended", session.end_reason ?? "ended"];
}

export class SessionsView {
  constructor() {
    this.body = h("tbody");
    this.rows = new Keyed(this.body, (session) => this.makeRow(session));
    this.table = h(
      "table",
      { class: "list sessions" },
      h(
        "thead",
        {},
        h("tr", {}, ["Session", "State", "Runs", "Samplers", "SDK", "Project", "Started", "Last seen", ""].map((text) => h("th", { scope: "col" }, text))),
      ),
      this.body,
    );
    this.empty = h("p", { class: "nothing", hidden: true }, "No sessions yet: each tinker.ServiceClient is one.");
    this.element = h("div", { class: "view" }, h("div", { class: "controls" }, h("h1", {}, "Sessions")), this.table, this.empty);
    document.title = "Sessions · Tinsmith";
  }

  makeRow(session) {
    const cell = (label) => h("td", { "data-label": label });
    const row = { dot: h("i", { class: "dot" }), name: h("strong", {}), about: h("small", {}) };
    const labels = ["State", "Runs", "Samplers", "SDK", "Project", "Started", "Last seen"];
    row.cells = labels.map(cell);
    const title = h("div", {}, row.name, row.about);
    row.end = h("button", { type: "button", onclick: () => this.end(session.session_id) }, "End session");
    row.element = h(
      "tr",
      { "data-session": session.session_id },
      h("td", { class: "name" }, row.dot, title),
      row.cells,
      h("td", { class: "actions" }, row.end),
    );
    return row;
  }

  async end(id) {
    const isEnded = await confirmEnd({ what: "session", id, end: () => endSession(id) });
    if (isEnded) await this.refresh();
  }

  async refresh() {
    const { sessions, now } = await dashboard("sessions");
    this.table.hidden = !sessions.length;
    this.empty.hidden = sessions.length > 0;
    this.rows.update(sessions, (each) => each.session_id, (row, each) => {
      const [state, words] = stateOf(each, now);
      setAttribute(row.dot, "data-state", state);
      setAttribute(row.element, "data-state", state);
      setText(row.name, each.name || shortId(each.session_id));
      setText(row.about, [each.name ? shortId(each.session_id) : "", ...(each.tags ?? [])].filter(Boolean).join(" · "));
      const texts = [
        each.end_detail ? `${words}: ${each.end_detail}` : words,
        number(each.num_runs),
        number(each.num_samplers),
        each.sdk_version ?? "–",
        each.project_id,
        ago(each.created_at, now),
        ago(each.last_seen_at, now),
      ];
      row.end.hidden = each.ended_at !== null;
      texts.forEach((text, index) => setText(row.cells[index], text));
      setAttribute(row.cells[5], "title", moment(each.created_at));
    });
  }
}
