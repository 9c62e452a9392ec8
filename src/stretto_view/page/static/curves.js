import { COLORS, columns, options, savePicture } from "./chart.js";
import { differences } from "./config.js";
import { copyLink, fill, h, message, noSteps, ofRun, ofRuns, saving, select, short } from "./dom.js";

export const SUBJECTS = ["metrics"];
const FIRST = 6;
const NAMES = { step: "step", time: "hours", tokens: "tokens" };

export async function render(root, context) {
  const { query, signal } = context;
  const lists = await ofRuns(context.runs, "metrics", {}, signal);
  const faults = context.runs.flatMap((run, at) => (lists[at].error ? [message(`${run}: ${lists[at].error}`, "error")] : []));
  const runs = context.runs.filter((run, at) => !lists[at].error);
  const metrics = new Map(lists.filter((list) => !list.error).flat().map((metric) => [metric.name, metric]));
  if (!metrics.size) {
    fill(root, faults.length ? faults : context.rows.map(noSteps));
    return { update: () => render(root, context) };
  }
  const asked = query.getAll("key").filter((key) => metrics.has(key));
  const settings = {
    keys: asked.length ? asked : [...metrics.keys()].slice(0, FIRST),
    axis: query.get("axis") || "step",
    smooth: query.get("smooth") || "0.05",
  };
  const panels = h("section", { class: "panels" });
  const drawn = new Map(); // key -> {plot, box}

  const update = async () => {
    fill(csv, runs.map((run) => [saving(run, "curves.csv", { key: settings.keys }, runs.length > 1 ? `CSV of ${run}` : "CSV"), " "]));
    const answers = await Promise.all(runs.map((run) => ofRun(run, "curve", { key: settings.keys, axis: settings.axis, smooth: settings.smooth }, signal)));
    for (const key of settings.keys) draw(key, answers.map((answer) => answer[key]));
  };

  function draw(key, curves) {
    const { data, series } = columns(runs, curves);
    const old = drawn.get(key);
    if (old && (old.plot || data[0].length === 0)) {
      if (old.plot) renew(old.plot, data);
      fill(old.last, lasts(curves));
      return;
    }
    const metric = metrics.get(key);
    const last = h("small", {}, lasts(curves));
    const place = h("div", { class: "plot" });
    const box = h("figure", { "data-key": key }, h("figcaption", { title: [metric.meaning, metric.reading].join(" ").trim() },
      h("b", {}, key), metric.unit && metric.unit !== "-" ? ` ${metric.unit} ` : " ", last,
      h("button", { class: "save", title: "save this curve as a picture", onclick: () => drawn.get(key)?.plot && savePicture(drawn.get(key).plot, key, runs) }, "PNG"),
      h("button", { title: "take this curve away", "aria-label": `remove ${key}`, onclick: () => choose(settings.keys.filter((each) => each !== key)) }, "×")), place);
    if (old) old.box.replaceWith(box);
    else panels.append(box);
    if (data[0].length === 0) {
      fill(place, message("no values"));
      drawn.set(key, { box, last });
      return;
    }
    const plot = new uPlot(options(place, series, NAMES[settings.axis]), data, place);
    drawn.set(key, { plot, box, last });
  }

  function lasts(curves) {
    return runs.length === 1 ? `last ${short(curves[0].last)}` : curves.map((curve, at) => h("span", { style: { color: COLORS[at % COLORS.length] } }, `${short(curve.last)} `));
  }

  function choose(keys) {
    settings.keys = keys;
    context.remember({ key: keys });
    redraw();
  }

  function redraw() {
    for (const { plot } of drawn.values()) plot?.destroy();
    drawn.clear();
    fill(panels);
    return update().catch((error) => error.name === "AbortError" || fill(panels, message(error.message, "error")));
  }

  const change = (name) => (value) => {
    settings[name] = value;
    context.remember({ [name]: value });
    redraw();
  };
  const adding = h("input", { list: "metrics", placeholder: "add a metric", "aria-label": "add a metric", onchange: (event) => {
    if (metrics.has(event.target.value)) choose([...new Set([...settings.keys, event.target.value])]);
    event.target.value = "";
  } });
  const csv = h("span");
  fill(root, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() }, adding,
    h("datalist", { id: "metrics" }, [...metrics.keys()].map((key) => h("option", { value: key }))),
    select("over ", [["step", "steps"], ["time", "hours"], ["tokens", "tokens"]], settings.axis, change("axis")),
    select("smoothing ", [["0", "none"], ["0.05", "5 %"], ["0.2", "20 %"]], settings.smooth, change("smooth")),
    runs.length > 1 ? h("span", { class: "legend" }, runs.map((run, at) => h("span", { style: { color: COLORS[at % COLORS.length] } }, `■ ${run} `))) : null,
    h("span", { class: "saves" }, copyLink(), " ", csv)), faults, runs.length > 1 ? differing(runs, signal) : null, panels);
  const resized = new ResizeObserver(() => {
    for (const { plot, box } of drawn.values()) plot?.setSize({ width: Math.max(200, box.clientWidth - 16), height: 220 });
  });
  resized.observe(panels);
  await update();
  return { update, close: () => { resized.disconnect(); for (const { plot } of drawn.values()) plot?.destroy(); } };
}

// Draw new data; a curve that is zoomed in keeps its range.
function renew(plot, data) {
  const { min, max } = plot.scales.x, x = plot.data[0];
  const isZoomed = min > x[0] || max < x[x.length - 1];
  plot.setData(data, !isZoomed);
  if (isZoomed) plot.redraw();
}

// What differs in the configs of the runs that are compared, read only when it is asked for.
function differing(runs, signal) {
  const body = h("div");
  return h("details", { class: "differing", ontoggle: async (event) => {
    if (!event.target.open || body.childNodes.length) return;
    try {
      fill(body, await differences(runs, signal));
    } catch (error) {
      if (error.name !== "AbortError") fill(body, message(error.message, "error"));
    }
  } }, h("summary", {}, "what differs in their configs"), body);
}
