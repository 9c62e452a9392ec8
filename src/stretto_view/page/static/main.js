// The frame of the page. The address says which runs and which view are shown; a stream of events says what has changed.
import { fill, get, h, message, short, duration } from "./dom.js";
import * as now from "./now.js";
import * as curves from "./curves.js";
import * as rollouts from "./rollouts.js";
import * as timeline from "./timeline.js";
import * as evals from "./evals.js";
import * as config from "./config.js";
import * as logs from "./logs.js";
import * as chat from "./chat.js";

const VIEWS = { now, curves, rollouts, timeline, evals, config, logs, chat };
const KEYS = [
  ["1 … 8", "the views, in their order"],
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
  document.getElementById("fault").hidden = true;
  const root = h("div", { "aria-busy": "true" }); // one per view: a view that is left while it loads then draws into a detached element
  fill(document.getElementById("view"), root);
  const controller = new AbortController();
  const mine = { view, runs, query, controller, handle: null, updatedAt: performance.now(), isDue: false, timer: null };
  current = mine;
  document.title = `${runs.join(", ")} · ${view} · stretto`;
  drawHeader();
  if (!runs.length) {
    fill(root, message("No runs yet. This page looks again by itself."));
    return;
  }
  const context = {
    runs, query, signal: controller.signal,
    get rows() { return runs.map((id) => known.find((row) => row.id === id)); },
    // Store the view's settings in the address, without drawing the view again.
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
    root.removeAttribute("aria-busy");
    if (mine !== current) mine.handle?.close?.();
  } catch (error) {
    if (error.name === "AbortError") return;
    root.removeAttribute("aria-busy");
    fill(root, message(error.message, "error"));
    mine.handle = { update: show }; // try again when something has changed
  }
}

function drawHeader() {
  const { view, runs } = current;
  fill(document.getElementById("views"), Object.keys(VIEWS).map((name, at) =>
    h("a", { href: `#/${name}?${new URLSearchParams(runs.map((id) => ["run", id]))}`, "aria-current": name === view ? "page" : null, title: `key ${at + 1}` }, name)));
  fill(document.querySelector("#runs > summary"), runs.length ? runs.join(", ") : "runs");
  if (source?.readyState === EventSource.OPEN) fill(document.getElementById("live"), follows());
  drawRuns();
}

// Existing lines are kept: one may have the keyboard's focus, or be touched at this moment.
function drawRuns() {
  const list = document.querySelector("#runs > ul"), { runs } = current;
  const old = new Map([...list.children].map((item) => [item.dataset.run, item]));
  const lines = known.map((row) => {
    const item = old.get(row.id) || h("li", { "data-run": row.id }, h("label", {}, h("input", { type: "checkbox", onchange: choose }), h("span")));
    item.title = row.error || "";
    item.querySelector("input").checked = runs.includes(row.id);
    fill(item.querySelector("span"), h("span", { class: `state ${row.state}` }, row.state), " ", h("b", {}, row.id), " ",
      h("small", {}, `step ${short(row.step)}${row.max_steps ? ` of ${row.max_steps}` : ""}, ${row.verb === "sft" ? `loss ${short(row.loss)}` : `reward ${short(row.reward)}`}, ${duration(row.age_s)} ago`));
    return item;
  });
  if (lines.length !== old.size || lines.some((item, at) => item !== list.children[at])) fill(list, lines);
}

function choose(event) {
  const { view, runs, query } = current, id = event.target.closest("li").dataset.run;
  const next = event.target.checked ? [...runs, id] : runs.filter((each) => each !== id);
  if (next.length) go(view, next, query);
  else event.target.checked = true; // one is always shown
}

// While a request is under way, further calls share one request that follows it.
let asking = null, isAskedAgain = false;
async function refreshRuns() {
  if (asking) {
    isAskedAgain = true;
    return asking;
  }
  asking = (async () => {
    do {
      isAskedAgain = false;
      known = await get("/api/runs");
    } while (isAskedAgain);
  })();
  try {
    await asking;
  } finally {
    asking = null;
  }
  if (current) drawRuns();
}

// A browser limits its connections to one host, so only the visible tab has one. A tab that becomes visible again gets
// all changes at once.
let source = null;
function listen() {
  const live = document.getElementById("live");
  source?.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource("/api/changes");
  source.onopen = () => fill(live, follows());
  source.onerror = () => fill(live, "not connected");
  source.onmessage = async (event) => {
    const { run, subjects } = JSON.parse(event.data);
    const isNew = !known.some((row) => row.id === run);
    if (isNew || subjects.includes("state") || subjects.includes("metrics")) await refreshRuns().catch(() => {});
    if (isNew && (!current || !current.runs.length)) return show();
    if (current?.runs.includes(run)) update(current, subjects);
  };
}

function follows() {
  const goesOn = known.some((row) => row.state === "running" && current?.runs.includes(row.id));
  return goesOn || !current?.runs.length ? "live" : "ended";
}

// At most one update per MIN_UPDATE_MS, one at a time, and none while text is selected: it would undo the selection.
function update(mine, subjects) {
  const view = VIEWS[mine.view];
  if (!mine.handle?.update || !subjects.some((subject) => view.SUBJECTS.includes(subject))) return;
  mine.isDue = true;
  if (!mine.timer) mine.timer = setTimeout(() => renew(mine), Math.max(0, mine.updatedAt + MIN_UPDATE_MS - performance.now()));
}

async function renew(mine) {
  const live = document.getElementById("live");
  if (mine === current && isSelecting()) fill(live, "held while text is selected");
  else if (mine === current && !document.hidden) {
    mine.isDue = false;
    const fault = document.getElementById("fault");
    if (source?.readyState === EventSource.OPEN) fill(live, follows());
    try {
      const next = await mine.handle.update();
      if (next?.update && mine === current) mine.handle = next; // the view could be drawn only now
      if (mine === current) fault.hidden = true;
    } catch (error) {
      if (error.name !== "AbortError" && mine === current) {
        fault.hidden = false;
        fill(fault, `what is shown may be old: ${error.message}`);
      }
    }
    mine.updatedAt = performance.now();
  }
  mine.timer = mine.isDue && mine === current ? setTimeout(() => renew(mine), MIN_UPDATE_MS) : null;
}

function isSelecting() {
  const chosen = document.getSelection();
  return !chosen.isCollapsed && document.getElementById("view").contains(chosen.anchorNode);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !current || document.getElementById("help").open) return;
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
document.getElementById("runs").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  event.currentTarget.open = false;
  event.currentTarget.querySelector("summary").focus();
});

fill(document.querySelector("#help dl"), KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]));
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", listen);
refreshRuns().then(show, (error) => fill(document.getElementById("view"), message(error.message, "error"))).then(listen);
