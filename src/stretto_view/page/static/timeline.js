// Spans as a Gantt chart on a canvas: gaps are time spent waiting.
import { clock, duration, fill, h, message, ofRun } from "./dom.js";

export const SUBJECTS = ["metrics", "ledger"];
const COLORS = {
  finished: "#1f77c9", truncated: "#c98a1b", failed: "#d1495b", dropped: "#808080", running: "#7fb2e5", batch: "#8e5bc0",
  idle: "#d9d9d955", busy: "#4a7fc1", full: "#c98a1b", weights: "#3a8f9e", train: "#2a9d6f", wait: "#d9d9d955", publish: "#3a8f9e", save: "#c98a1b",
};
const LANE = 16;

export async function render(root, context) {
  const run = context.runs[0];
  let view = { start: context.query.get("start"), end: context.query.get("end") };
  let found = null;
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "timeline" });
  const says = h("p", { class: "note", role: "status" });
  const legend = h("p", { class: "legend" });

  let LABEL = 96;
  const load = async () => {
    found = await ofRun(run, "timeline", view, context.signal);
    draw();
  };
  const place = h("div", {}, canvas);
  const look = (start, end) => {
    const span = Math.max(0.05, end - start);
    const low = found.first - 1, high = Math.max(found.last, low) + 1;
    const from = Math.max(low, Math.min(start, high - span)); // at either end of the run the window stops and keeps its width
    view = { start: from, end: Math.min(high, from + span) };
    context.remember(view);
    return load();
  };
  const zoom = (factor) => {
    const middle = (found.start + found.end) / 2, half = ((found.end - found.start) / 2) * factor;
    return look(middle - half, middle + half);
  };
  const move = (share) => {
    const by = (found.end - found.start) * share;
    return look(found.start + by, found.end + by);
  };

  function draw() {
    const width = Math.max(280, place.clientWidth), height = found.lanes.length * LANE + 24, scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    paint.font = "11px system-ui";
    LABEL = Math.min(width * 0.4, Math.max(96, ...found.lanes.map((lane) => paint.measureText(lane.name).width + 8)));
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink-light"), line = style.getPropertyValue("--line");
    found.lanes.forEach((lane, row) => {
      paint.fillStyle = ink;
      paint.fillText(lane.name, 2, row * LANE + 12, LABEL - 4);
      for (const span of lane.spans) {
        const left = Math.max(LABEL, x(span.start, width)), right = Math.min(width, x(span.end, width));
        if (right < LABEL || left > width) continue;
        paint.fillStyle = COLORS[span.kind] || "#888";
        paint.fillRect(left, row * LANE + 2, Math.max(1.5, right - left - 0.5), LANE - 4);
      }
      paint.fillStyle = line;
      paint.fillRect(0, (row + 1) * LANE - 0.5, width, 0.5);
    });
    paint.fillStyle = ink;
    const ticks = width < 600 ? 2 : 4;
    for (let at = 0; at <= ticks; at += 1) {
      const time = found.start + ((found.end - found.start) * at) / ticks;
      paint.fillText(clock(time), Math.min(width - 52, x(time, width)), height - 6);
    }
    const kinds = new Set(found.lanes.flatMap((lane) => lane.spans.map((span) => span.kind)));
    fill(legend, Object.entries(COLORS).filter(([kind]) => kinds.has(kind)).map(([kind, color]) =>
      h("span", {}, h("i", { style: { backgroundColor: color } }), ` ${kind} `)));
    fill(says, stretch());
  }

  function stretch() {
    if (!found.lanes.length) return "nothing in this stretch";
    const shown = found.one_of > 1 ? `; one of ${found.one_of} rollouts is shown` : "";
    return `${duration(found.end - found.start)} of ${duration(found.last - found.first)}${shown}`;
  }

  const x = (time, width) => LABEL + ((time - found.start) / Math.max(1e-9, found.end - found.start)) * (width - LABEL);

  function under(event) {
    const box = canvas.getBoundingClientRect(), lane = found.lanes[Math.floor((event.clientY - box.top) / LANE)];
    if (!lane) return null;
    const time = found.start + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * (found.end - found.start);
    const near = (found.end - found.start) / 300;
    return lane.spans.find((span) => span.start - near <= time && time <= span.end + near) || null;
  }
  canvas.addEventListener("mousemove", (event) => {
    const span = under(event);
    canvas.title = span ? span.text : "";
    fill(says, span ? `${span.text}, ${duration(span.end - span.start)} (${(span.end - span.start).toFixed(3)} s)` : stretch());
  });
  canvas.addEventListener("click", (event) => {
    const span = under(event);
    if (span?.rollout) context.go("rollouts", { rollout: span.rollout });
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.5 : 0.67);
  }, { passive: false });

  const keys = { ArrowLeft: () => move(-0.5), ArrowRight: () => move(0.5), "+": () => zoom(0.5), "-": () => zoom(2) };
  const button = (text, title, act) => h("button", { title, onclick: act }, text);
  fill(root, h("div", { class: "controls" }, button("←", "earlier (left arrow)", keys.ArrowLeft), button("→", "later (right arrow)", keys.ArrowRight),
    button("+", "closer", keys["+"]), button("−", "further away", keys["-"]), button("all", "the whole run", () => look(found.first, found.last)),
    button("end", "the last minute, as it grows", () => {
      view = {};
      context.remember({ start: null, end: null });
      return load();
    })), says, legend, place);
  try {
    await load();
  } catch (error) {
    if (error.name !== "AbortError") fill(root, message(error.message, "error"));
    return {};
  }
  const resized = new ResizeObserver(draw);
  resized.observe(place);
  return {
    update: () => (view.end ? null : load()),
    close: () => resized.disconnect(),
    key(key) {
      if (!(key in keys)) return false;
      keys[key]();
      return true;
    },
  };
}
