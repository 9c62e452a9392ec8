import { COLORS, columns, options, savePicture } from "./chart.js";
import { copyLink, fill, h, message, ofRun, ofRuns, saving, short } from "./dom.js";
import { rejudged } from "./rejudged.js";

export const SUBJECTS = ["evals", "scores"];
const FRAME = new Set(["version", "env", "mode", "versions"]);
const LONG_SYSTEM = 600; // characters
const MOST_REPLIES = 500; // that the server sends
const FIRST = ["mean", "pass_at_k", "pass_all_k"];

export async function render(root, context) {
  const { query, runs, signal } = context;
  const charts = h("section", { class: "panels" }), tables = h("div"), others = h("div"), samples = h("section");
  let plots = [], lists = [], drawnFrom = "";
  const task = query.get("task");
  const update = async () => {
    await rejudged(others, context, samples, spoken);
    lists = await ofRuns(runs, "evals", {}, signal);
    const text = JSON.stringify(lists);
    if (text === drawnFrom) return;
    drawnFrom = text;
    draw();
    fill(tables, compared(runs, lists), runs.map((run, at) => table(run, lists[at], (version) => open(run, version))));
  };
  // A chart per environment and score, a line per run and mode.
  function draw() {
    for (const plot of plots) plot.destroy();
    plots = [];
    fill(charts);
    const found = scores(runs, lists), every = [...new Set(found.flatMap(([, curves]) => curves.map((curve) => curve.name)))];
    for (const [title, curves] of found) {
      const names = curves.map((curve) => curve.name), colors = names.map((name) => COLORS[every.indexOf(name) % COLORS.length]), place = h("div", { class: "plot" });
      const mine = plots.length;
      charts.append(h("figure", {}, h("figcaption", {}, h("b", {}, title), h("span", { class: "legend" }, names.map((name, at) => h("span", { style: { color: colors[at] } }, `■ ${name} ${short(curves[at].y.at(-1))} `))),
        h("button", { class: "save", title: "save this curve as a picture", onclick: () => savePicture(plots[mine], title, names, colors) }, "PNG")), place));
      const { data, series } = columns(names, curves.map(({ x, y }) => ({ x, y, smooth: y })), colors);
      plots.push(new uPlot(options(place, series.map((each) => ({ ...each, points: { show: curves[0].x.length < 60, size: 5 } })), "version"), data, place));
    }
  }
  async function open(run, version) {
    try {
      const rows = await ofRun(run, "evals", { version }, signal);
      fill(samples, h("h2", {}, `${run}, version ${version}: ${rows.length < MOST_REPLIES ? "" : "the first "}${rows.length} replies`), rows.map((row) => reply(row, () => follow(run, row))));
      samples.scrollIntoView({ behavior: "smooth" });
    } catch (error) {
      if (error.name !== "AbortError") fill(samples, message(error.message, "error"));
    }
  }
  // One task over the versions.
  async function follow(run, { task_id: task, env }) {
    context.remember({ task, env, of: run });
    try {
      const found = await ofRun(run, "eval_task", { task, env }, signal);
      const asked = (found.rows[0]?.branches?.[0]?.turns || []).filter((turn) => !turn.is_reply);
      fill(samples, h("h2", {}, `${run}: task ${task} of ${env} over the versions`),
        spoken(asked),
        found.rows.length ? null : message("no evaluation has this task"),
        found.rows.map((row) => h("section", { class: "reply" }, h("h3", {}, `version ${row.version}, ${row.mode}, reward ${short(row.reward)}`),
          (row.branches || []).map((branch) => spoken(branch.turns.filter((turn) => turn.is_reply))))),
        found.is_cut ? message("older versions were not read: that takes too long") : null);
      samples.scrollIntoView({ behavior: "smooth" });
    } catch (error) {
      if (error.name !== "AbortError") fill(samples, message(error.message, "error"));
    }
  }
  const resized = new ResizeObserver(() => {
    for (const plot of plots) plot.setSize({ width: Math.max(200, plot.root.closest("figure").clientWidth - 16), height: 220 });
  });
  fill(root, h("div", { class: "controls" }, h("span", { class: "saves" }, copyLink(), " ", runs.map((run) => [saving(run, "evals.csv", {}, runs.length > 1 ? `CSV of ${run}` : "CSV"), " "]))), charts, tables, others, samples);
  await update();
  resized.observe(charts);
  if (task) await follow(query.get("of") || runs[0], { task_id: task, env: query.get("env") });
  return { update, close: () => { resized.disconnect(); for (const plot of plots) plot.destroy(); } };
}

// [title, [{name, x, y}]]: numbers as they are, numbers by k as one curve of the largest k.
function scores(runs, lists) {
  const found = new Map();
  lists.forEach((rows, at) => {
    if (rows.error) return;
    for (const row of rows) {
      const reported = Object.entries(row.metrics || {});
      for (const [label, value] of [...Object.keys(row).filter((each) => FIRST.includes(each)).map((key) => scalar(key, row[key])), ...reported]) {
        if (typeof value !== "number") continue;
        const title = `${row.env}: ${label}`, name = [runs.length > 1 ? runs[at] : null, row.mode].filter(Boolean).join(", ");
        if (!found.has(title)) found.set(title, new Map());
        const lines = found.get(title);
        if (!lines.has(name)) lines.set(name, { name, x: [], y: [] });
        const line = lines.get(name);
        if (line.x.at(-1) === row.version) continue;
        line.x.push(row.version);
        line.y.push(value);
      }
    }
  });
  return [...found].map(([title, lines]) => [title, [...lines.values()]]);
}

function scalar(key, value) {
  if (typeof value === "number") return [key, value];
  const largest = Object.keys(value || {}).map(Number).filter((k) => k > 1).sort((a, b) => b - a)[0];
  return largest ? [key.replace("_k", `_${largest}`), value[largest]] : [key, null];
}

// Last scores of several runs beside each other, and by how much they differ from the first one's.
function compared(runs, lists) {
  if (runs.length < 2) return null;
  const last = lists.map((rows) => new Map((rows.error ? [] : rows).map((row) => [`${row.env}, ${row.mode}`, row])));
  const keys = [...new Set(last.flatMap((each) => [...each.keys()]))];
  if (!keys.length) return null;
  return h("section", {}, h("h2", {}, "newest scores"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "environment"), runs.map((run) => h("th", {}, run)))),
    h("tbody", {}, keys.map((key) => h("tr", {}, h("td", {}, key), last.map((each, at) => {
      const row = each.get(key), first = last[0].get(key);
      if (!row) return h("td", {}, "–");
      const away = at && first ? row.mean - first.mean : null;
      return h("td", {}, short(Number(row.mean.toFixed(4))), h("small", {}, ` version ${row.version}`), away === null ? null : h("span", { class: `state ${away >= 0 ? "done" : "failed"}` }, ` ${away >= 0 ? "+" : "−"}${short(Math.abs(Number(away.toFixed(4))))}`));
    })))))));
}

function table(run, rows, open) {
  if (rows.error) return message(`${run}: ${rows.error}`, "error");
  if (!rows.length) return message(`${run} has no evals yet.`);
  const own = [...new Set(rows.flatMap(Object.keys).filter((name) => !FRAME.has(name)))];
  const full = own.filter((name) => rows.some((row) => cell(row[name]) !== "–"));
  const columns = ["version", "env", "mode", ...full];
  return h("section", {}, h("h2", {}, run), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name.replaceAll("_", " "))))),
    h("tbody", {}, rows.toReversed().map((row) => h("tr", { tabindex: 0, onclick: () => open(row.version), onkeydown: (event) => event.key === "Enter" && open(row.version) },
      columns.map((name) => h("td", {}, cell(row[name]), name === "version" ? span(row) : null))))))));
}

// The versions that sampled the replies, where these are several.
function span(row) {
  const [oldest, newest] = row.versions || [row.version, row.version];
  return oldest === newest ? null : h("small", {}, ` (${oldest} to ${newest})`);
}

// Numbers by k are written one after the other.
function cell(value) {
  if (typeof value !== "object" || value === null) return short(typeof value === "number" ? Number(value.toFixed(4)) : value);
  return Object.entries(value).map(([key, each]) => `${key}: ${typeof each === "number" ? short(Number(each.toFixed(3))) : each}`).join(", ") || "–";
}

// The turns of a text; a long message of the system is folded.
function spoken(turns) {
  return turns.map((turn) => h("article", { class: `turn ${turn.role}` }, turn.role === "system" && turn.text.length > LONG_SYSTEM
    ? h("details", {}, h("summary", {}, "system"), h("div", { class: "text" }, turn.text))
    : [h("h4", {}, turn.role), h("div", { class: "text" }, turn.is_reply && turn.role !== "tool" ? h("mark", {}, turn.text) : turn.text)]));
}

function reply(row, follow) {
  const { reward, branches, ...others } = row;
  return h("section", { class: "reply" }, h("h3", {}, `task ${row.task_id}, ${row.mode || ""}, reward ${short(reward)} `, h("button", { type: "button", onclick: follow }, "this task over the versions")),
    (branches || []).map((branch) => spoken(branch.turns)),
    h("details", {}, h("summary", {}, "all"), h("pre", {}, JSON.stringify(others, null, 1))));
}
