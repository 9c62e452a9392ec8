// One rollout: its turns, its coloured tokens, and its group.
import { fill, h, message, select, short } from "./dom.js";

const COLORINGS = {
  none: "nothing", logprob: "log-probability", ratio: "ratio trainer / engine", advantage: "advantage", version: "version", mask: "what is sampled",
};
const MOST_LINES = 400; // spans of tokens that are drawn at first; a button draws the rest
let coloring = "none";

export function conversation(found, open, run) {
  const body = h("div", { class: "turns" });
  const has = new Set(["none", "logprob", "version", "mask", ...found.branches.flatMap((branch) => Object.keys(branch.tokens))]);
  if (!has.has(coloring)) coloring = "none";
  const draw = () => fill(body, found.branches.map((each) => branch(each, run)));
  const name = `g${found.group_id}.${found.member}`;
  draw();
  return [
    h("h2", {}, `${name} `, h("span", { class: `state ${found.status}` }, found.status)),
    h("p", {}, `${found.env}, task ${found.task_id}; `, found.step === null ? `trained by no step (${found.group_reason || found.group_state})` : `step ${found.step}`,
      `; reward ${short(found.reward)}, advantage ${short(found.advantage)}`),
    found.dropped_by ? message(`dropped by filter ${found.dropped_by}`, "note") : null,
    found.error ? message(found.error, "error") : null,
    reported("what the reward said", found.metrics), reported("task", found.data),
    group(found, open),
    found.no_tokens ? message(found.no_tokens) : select("colour ", Object.entries(COLORINGS).filter(([key]) => has.has(key)), coloring, (value) => {
      coloring = value;
      draw();
    }),
    body,
  ];
}

function group(found, open) {
  return h("p", { class: "group" }, "group: ", found.group.map((each) =>
    h("button", { "aria-current": each.member === found.member ? "true" : null, title: `${each.status}, ${each.num_sampled_tokens ?? 0} tokens, advantage ${short(each.advantage)}`,
      onclick: () => open(`${found.group_id}.${each.member}`) }, each.reward === null ? each.status : short(each.reward))));
}

function reported(title, values) {
  if (!values || !Object.keys(values).length) return null;
  return h("details", {}, h("summary", {}, title), h("pre", {}, JSON.stringify(values, null, 1)));
}

function branch(found, run) {
  const { tokens, turns } = found;
  const agent = found.agent === "policy" ? null : h("h3", {}, `${found.agent}${found.is_trained ? "" : ", not trained"}`);
  const rest = found.num_more ? message(`${found.num_more} more tokens are not shown`) : null;
  const images = found.images.map((hash, number) =>
    h("img", { src: `/api/run/${encodeURIComponent(run)}/image/${hash}`, alt: `image ${number + 1}`, title: `image ${number + 1}`, loading: "lazy" }));
  return [agent, images.length ? h("p", { class: "images" }, images) : null, turns.map((turn) => h("article", { class: `turn ${turn.role}` }, h("h4", {}, turn.role), text(tokens, turn))), rest];
}

function text(tokens, turn) {
  const place = h("div", { class: "text" });
  if (coloring === "none") {
    fill(place, tokens.text.slice(turn.body, turn.end).join("").replace(/(<\|image_pad\|>)+/g, "<|image_pad|>"));
    return place;
  }
  let at = turn.body;
  const more = h("button", { onclick: () => draw() }, "more");
  function draw() {
    const end = Math.min(turn.end, at + MOST_LINES);
    more.remove();
    for (; at < end; at += 1) place.append(token(tokens, at));
    if (at < turn.end) place.append(more);
  }
  draw();
  return place;
}

function token(tokens, at) {
  const sampled = tokens.sampled[at];
  const facts = [`token ${at}`];
  if (sampled) {
    facts.push(`log-probability ${tokens.logprob[at]}`, `version ${tokens.version[at]}`);
    if (tokens.ratio?.[at] !== undefined && tokens.ratio[at] !== null) facts.push(`ratio ${tokens.ratio[at]}`, `advantage ${tokens.advantage[at]}`);
  }
  return h("span", { title: facts.join(", "), style: { backgroundColor: sampled ? color(tokens, at) : "" } }, tokens.text[at]);
}

function color(tokens, at) {
  if (coloring === "mask") return "var(--sampled)";
  if (coloring === "version") return `hsl(${(tokens.version[at] * 67) % 360} 70% 50% / 30%)`;
  if (coloring === "logprob") return `rgb(220 60 60 / ${Math.min(0.8, -tokens.logprob[at] / 5)})`;
  const value = tokens[coloring]?.[at];
  if (value === null || value === undefined) return "";
  const away = coloring === "ratio" ? Math.log(value) * 2 : value;
  return away >= 0 ? `rgb(40 150 80 / ${Math.min(0.8, away)})` : `rgb(220 60 60 / ${Math.min(0.8, -away)})`;
}
