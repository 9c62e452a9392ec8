// The frame: which runs and which view, both in the address; and the stream that says what has changed.
import { fill, get, h, message, short, duration } from "./dom.js";
import * as now from "./now.js";
import * as curves from "./curves.js";
import * as rollouts from "./rollouts.js";
import * as timeline from "./timeline.js";
import * as evals from "./evals.js";
import * as config from "./config.js";
import * as logs from "./logs.js";

const VIEWS = { now, curves, rollouts, timeline, evals, config, logs };
const KEYS = [
  ["1 … 7", "the views, in their order"],
  ["r", "choose runs"],
  ["/", "the first field of the view"],
  ["j, k", "next and previous rollout"],
  ["?", "these keys"],
];
const MIN_UPDATE_MS = 1500;

let known = []; // rows of all runs
let current = null; // {view, runs, query, handle, controller}

export function read() {
  const [path, text] = location.hash.replace(/^#\/?/, "").split("?");
  const query = new URLSearchParams(text || "");
  const asked = query.getAll("run").filter((id) => known.some((row) => row.id === id));
  const runs = asked.length ? asked : known.length ? [newest().id] : [];
  query.delete("run");
  return { view: path in VIEWS ? path : "now", runs, query };
}

function newest() {
  const live = known.filter((row) => row.state === "running");
  return (live.length ? live : known).reduce((a, b) => ((a.changed || 0) >= (b.changed || 0) ? a : b));
}

export function go(view, runs, query = new URLSearchParams()) {
  const words = new URLSearchParams(runs.map((id) => ["run", id]));
  for (const [name, value] of query) words.append(name, value);
  location.hash = `#/${view}?${words}`;
}

async function show() {
  const { view, runs, query } = read();
  if (current) {
    current.controller.abort();
    current.handle?.close?.();
  }
  const root = fill(document.getElementById("view"));
  const controller = new AbortController();
  const mine = { view, runs, query, controller, handle: null, updatedAt: performance.now(), isDue: false };
  current = mine;
  document.title = `${runs.join(", ")} · ${view} · stretto`;
  drawHeader();
  if (!runs.length) {
    fill(root, message("No runs yet. This page looks again by itself."));
    return;
  }
  const context = {
    runs, query, signal: controller.signal,
    rows: runs.map((id) => known.find((row) => row.id === id)),
    // Keep what a view was asked for in the address, without drawing it anew.
    remember(changes) {
      for (const [name, value] of Object.entries(changes)) {
        query.delete(name);
        for (const each of Array.isArray(value) ? value : [value]) {
          if (each !== null && each !== undefined && each !== "") query.append(name, each);
        }
      }
      const words = new URLSearchParams(runs.map((id) => ["run", id]));
      for (const [name, value] of query) words.append(name, value);
      history.replaceState(null, "", `#/${view}?${words}`);
    },
    go: (to, more = {}) => go(to, runs, new URLSearchParams(more)),
  };
  try {
    mine.handle = await VIEWS[view].render(root, context);
  } catch (error) {
    if (error.name !== "AbortError") fill(root, message(error.message, "error"));
  }
}

function drawHeader() {
  const { view, runs, query } = current;
  fill(document.getElementById("views"), Object.keys(VIEWS).map((name, at) =>
    h("a", { href: `#/${name}?${new URLSearchParams(runs.map((id) => ["run", id]))}`, "aria-current": name === view ? "page" : null, title: `key ${at + 1}` }, name)));
  const chosen = document.querySelector("#runs > summary");
  fill(chosen, runs.length ? runs.join(", ") : "runs");
  fill(document.querySelector("#runs > ul"), known.map((row) => h("li", {}, h("label", {},
    h("input", { type: "checkbox", checked: runs.includes(row.id), onchange: (event) => {
      const next = event.target.checked ? [...runs, row.id] : runs.filter((id) => id !== row.id);
      if (next.length) go(view, next, query);
    } }),
    h("span", { class: `state ${row.state}` }, row.state), " ", h("b", {}, row.id), " ",
    h("small", {}, `step ${short(row.step)}${row.max_steps ? ` of ${row.max_steps}` : ""}, ${row.verb === "sft" ? `loss ${short(row.loss)}` : `reward ${short(row.reward)}`}, ${duration(row.age_s)} ago`)))));
}

async function refreshRuns() {
  known = await get("/api/runs");
  if (current) drawHeader();
}

function listen() {
  const live = document.getElementById("live");
  const source = new EventSource("/api/changes");
  source.onopen = () => fill(live, "live");
  source.onerror = () => fill(live, "not connected");
  source.onmessage = async (event) => {
    const { run, subjects } = JSON.parse(event.data);
    const isNew = !known.some((row) => row.id === run);
    if (isNew || subjects.includes("state") || subjects.includes("metrics")) await refreshRuns().catch(() => {});
    if (isNew && (!current || !current.runs.length)) return show();
    if (current?.runs.includes(run)) update(current, subjects);
  };
}

// At most one update per MIN_UPDATE_MS, and none while nobody looks.
function update(mine, subjects) {
  const view = VIEWS[mine.view];
  if (!mine.handle?.update || !subjects.some((subject) => view.SUBJECTS.includes(subject)) || mine.isDue) return;
  mine.isDue = true;
  const later = Math.max(0, mine.updatedAt + MIN_UPDATE_MS - performance.now());
  setTimeout(async () => {
    mine.isDue = false;
    if (mine !== current || document.hidden) return;
    mine.updatedAt = performance.now();
    await mine.handle.update().catch(() => {});
  }, later);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const names = Object.keys(VIEWS);
  if (event.key >= "1" && event.key <= String(names.length)) go(names[event.key - 1], current.runs);
  else if (event.key === "?") document.getElementById("help").showModal();
  else if (event.key === "r") document.querySelector("#runs > summary").click();
  else if (event.key === "/") document.querySelector("#view input, #view select")?.focus();
  else if (current?.handle?.key?.(event.key)) { /* the view has used it */ }
  else return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  const menu = document.getElementById("runs");
  if (menu.open && !menu.contains(event.target)) menu.open = false;
});

fill(document.querySelector("#help dl"), KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]));
window.addEventListener("hashchange", show);
refreshRuns().then(show, (error) => fill(document.getElementById("view"), message(error.message, "error"))).then(listen);
