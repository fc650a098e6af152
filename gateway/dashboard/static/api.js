// Requests to the server. The key is sent in a header and kept in sessionStorage, which ends with the tab.

import { askForKey } from "./dialogs.js";

const STORED = "tinsmith-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return sessionStorage.getItem(STORED) !== null;
}

export function forgetKey() {
  sessionStorage.removeItem(STORED);
}

let prompting = null;

async function newKey(why) {
  prompting ??= askForKey(hasKey() ? why : "").finally(() => {
    prompting = null;
  });
  const key = await prompting;
  sessionStorage.setItem(STORED, key);
}

/** The JSON of the answer. Throws Refused with the text of the server's error. */
export async function call(path, { method = "GET", body } = {}) {
  for (;;) {
    if (prompting) await prompting;
    const key = sessionStorage.getItem(STORED);
    const headers = { Accept: "application/json" };
    if (key !== null) headers["X-API-Key"] = key;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const reply = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(20000),
    });
    if (reply.status === 401) {
      if (sessionStorage.getItem(STORED) === key) await newKey("The server does not know this key.");
      continue;
    }
    const content = await reply.json().catch(() => ({}));
    if (!reply.ok) throw new Refused(reply.status, content.detail ?? `the server answered ${reply.status}`);
    return content;
  }
}

export const dashboard = (path) => call(`/dashboard/api/${path}`);

const checkpointPath = (path) =>
  path
    .replace("tinker://", "")
    .split("/")
    .map(encodeURIComponent);

/** URL of the public API for a checkpoint's tinker:// path. */
export function checkpointUrl(path, action = "") {
  const [run, kind, name] = checkpointPath(path);
  return `/api/v1/training_runs/${run}/checkpoints/${kind}/${name}${action}`;
}

export const downloadUrl = (path) => `/dashboard/api/checkpoints/${checkpointPath(path).join("/")}/download`;

export async function endRun(id) {
  const { request_id } = await call("/api/v1/unload_model", { method: "POST", body: { model_id: id } });
  // The id in the answer tells a refusal. A run that exists has ended now, even if accepted work is still being done.
  if (!request_id.endsWith(":unload")) throw new Refused(404, `there is no run ${id}`);
}

export const endSession = (id) =>
  call(`/api/v1/sessions/${encodeURIComponent(id)}/finish`, {
    method: "POST",
    body: { reason: { type: "interrupted" }, detail: "ended on the dashboard" },
  });
