// Elements, numbers and requests. Text becomes text nodes only, so that text from a run is never markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

export async function get(path, query = {}, signal = undefined) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") words.append(name, each);
    }
  }
  const text = words.toString();
  const done = pending(signal);
  try {
    const answer = await fetch(text ? `${path}?${text}` : path, { signal });
    const body = await answer.json().catch(() => ({ error: answer.statusText }));
    if (!answer.ok) throw new Error(body.error || answer.statusText);
    return body;
  } finally {
    done();
  }
}

// Requests of the view that is shown and not answered yet. A sign shows from SIGN_AFTER_MS on, with the seconds.
const SIGN_AFTER_MS = 250;
const waiting = new Set();
let ticking = null;

function pending(signal) {
  if (!signal) return () => {};
  const mine = { since: performance.now() };
  waiting.add(mine);
  ticking ??= setInterval(showSign, 100);
  return () => {
    waiting.delete(mine);
    if (waiting.size) return;
    clearInterval(ticking);
    ticking = null;
    showSign();
  };
}

function showSign() {
  const since = Math.min(...[...waiting].map((each) => each.since));
  const took = waiting.size ? performance.now() - since : 0;
  const sign = document.getElementById("loading");
  sign.hidden = took < SIGN_AFTER_MS;
  const text = took < 1000 ? "loading" : `loading, ${Math.floor(took / 1000)} s`;
  if (!sign.hidden && sign.lastChild.textContent !== text) sign.lastChild.textContent = text;
}

export function ofRun(run, what, query = {}, signal = undefined) {
  return get(`/api/run/${encodeURIComponent(run)}/${what}`, query, signal);
}

// The same for several runs: one answer per run, or {error} if it cannot be read.
export function ofRuns(runs, what, query = {}, signal = undefined) {
  return Promise.all(runs.map((run) => ofRun(run, what, query, signal).catch((error) => {
    if (error.name === "AbortError") throw error;
    return { error: error.message };
  })));
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(whole / 86400)}d${Math.floor((whole % 86400) / 3600)}h`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function select(label, values, chosen, change) {
  const options = values.map(([value, text]) => h("option", { value, selected: value === chosen }, text));
  return h("label", {}, label, h("select", { onchange: (event) => change(event.target.value) }, options));
}

export function input(label, properties, change) {
  const field = h("input", { ...properties, onchange: (event) => change(event.target.value) });
  return h("label", {}, label, field);
}

// A link that saves a file of the server's.
export function saving(run, name, query, text) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== null && each !== undefined && each !== "") words.append(key, each);
  }
  return h("a", { class: "save", download: true, href: `/api/run/${encodeURIComponent(run)}/${name}?${words}` }, text);
}

export function copyLink() {
  const button = h("button", { type: "button", title: "copy the address of what is shown", onclick: async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      fill(button, "copied");
    } catch {
      fill(button, "copy it from the address bar"); // not allowed over plain HTTP from another machine
    }
    setTimeout(() => fill(button, "copy link"), 2000);
  } }, "copy link");
  return button;
}

export function message(text, kind = "note") {
  return h("p", { class: kind, role: kind === "error" ? "alert" : "status" }, text);
}

// Why a run has no steps yet: one sentence.
export function noSteps(row) {
  if (row?.missing) return message(`${row.id}: ${row.missing}`, "error");
  if (row?.state === "damaged") return message(row.error, "error");
  return message({ "not started": "It has not started: only what a dry run or a submission writes is there.", running: "It is starting: no step has ended yet." }[row?.state]
    || "It ended before its first step: the view of logs says why.");
}

// A name of several words that may be broken after its dots, slashes and underscores, and nowhere else.
export function words(name) {
  return name.split(/(?<=[./_])/).flatMap((part) => [part, h("wbr")]);
}

// A small curve of the latest values, drawn without a library because there are many of them.
export function sparkline(values, width = 120, height = 28) {
  const numbers = values.filter((value) => Number.isFinite(value));
  const low = Math.min(...numbers), span = Math.max(...numbers) - low || 1;
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.setAttribute("preserveAspectRatio", "none"); // as wide as its tile
  drawing.setAttribute("class", "spark");
  drawing.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "polyline");
  const step = width / Math.max(1, numbers.length - 1);
  line.setAttribute("points", numbers.map((value, at) => `${at * step},${height - 2 - ((value - low) / span) * (height - 4)}`).join(" "));
  drawing.append(line);
  return drawing;
}
