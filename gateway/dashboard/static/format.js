// Numbers, times and names as people read them.

export const NONE = "–";

export function number(value, digits = 4) {
  if (value === "nan") return "NaN";
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  }
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      const base = letter === "k" ? 1e3 : unit;
      return `${Number((value / base).toPrecision(3))} ${letter}`;
    }
  }
  return Math.round(value).toLocaleString("en-US");
}

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
  }
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(seconds < 36000 ? 1 : 0)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function ago(at, now) {
  const seconds = now - at;
  if (seconds < 3) return "now";
  return `${seconds < 10 ? `${Math.floor(seconds)} s` : duration(seconds)} ago`;
}

export function until(at, now) {
  return at <= now ? "expired" : `in ${duration(at - now)}`;
}

export function moment(at) {
  return new Date(at * 1000).toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  });
}

/** A run's id is a session's 32 digits, ":train:" and a number. */
export function shortId(id) {
  const [session, , index] = id.split(":");
  const head = session.length > 12 ? session.slice(0, 8) : session;
  return index === undefined ? head : `${head}:${index}`;
}

export function last(values) {
  for (let index = (values?.length ?? 0) - 1; index >= 0; index--) {
    if (values[index] !== null && values[index] !== undefined) return values[index];
  }
  return null;
}

export const asNumber = (value) => (typeof value === "number" ? value : null);

/** Text of a failed call for the user. A call without an answer may have reached the server or not. */
export function problemOf(error) {
  if (error instanceof TypeError || error.name === "TimeoutError") return "no connection to the server";
  return error.message;
}
