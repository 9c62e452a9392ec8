// One rollout: its turns, its coloured tokens, and its group.
import { copyLink, fill, h, message, saving, short } from "./dom.js";

const COLORINGS = {
  logprob: "log-probability", entropy: "entropy", advantage: "advantage", ratio: "mismatch (trainer / engine)", trained: "loss mask",
  version: "version", mask: "what is sampled", teacher: "teacher", none: "nothing",
};
const KEYS = {
  logprob: [["surprising: −5 nats", "rgb(220 60 60 / .8)"], ["−1 nat", "rgb(220 60 60 / .2)"], ["certain", "transparent"]],
  entropy: [["3 nats or more", "rgb(142 91 192 / .8)"], ["1 nat", "rgb(142 91 192 / .27)"], ["0", "transparent"]],
  advantage: [["positive", "rgb(40 150 80 / .6)"], ["negative", "rgb(220 60 60 / .6)"]],
  ratio: [["trainer gives more", "rgb(40 150 80 / .6)"], ["trainer gives less", "rgb(220 60 60 / .6)"]],
  teacher: [["teacher gives more", "rgb(40 150 80 / .6)"], ["teacher gives less", "rgb(220 60 60 / .6)"]],
  trained: [["in the loss", "var(--sampled)"]],
  mask: [["sampled by the policy", "var(--sampled)"]],
};
const LONG_SYSTEM = 600; // characters
const MOST_LINES = 400; // spans of tokens that are drawn at first; a button draws the rest

// acts: what its buttons do: open(name), turnTo(branch, first token), followTask(found), compare(found); each but open may be missing.
export function conversation(found, run, context, { open, turnTo, followTask, compare }) {
  const body = h("div", { class: "turns" }), key = h("span", { class: "legend" });
  const has = new Set(["none", "mask", ...found.branches.flatMap((branch) => Object.keys(branch.tokens))]);
  let coloring = context.query.get("colour") || "logprob";
  if (!has.has(coloring)) coloring = "logprob";
  const draw = () => {
    fill(key, (KEYS[coloring] || []).map(([text, color]) => h("span", {}, h("i", { style: { background: color } }), ` ${text}`)));
    fill(body, found.branches.map((each, at) => branch(each, run, coloring, heading(found, at), (from) => turnTo(at, from), found.turns)));
  };
  const name = `g${found.group_id}.${found.member}`;
  const { group_id: group, member } = found;
  draw();
  return [
    h("h2", {}, `${name} `, h("span", { class: `state ${found.status}` }, found.status)),
    h("p", {}, `${found.env}, task ${found.task_id}; `, found.status === "running" ? "it has not ended: its turns so far" : found.step === null ? `trained by no step (${found.group_reason || found.group_state})` : `step ${found.step}`,
      found.status === "running" ? "" : `; reward ${short(found.reward)}, advantage ${short(found.advantage)}`),
    found.dropped_by ? message(`dropped by filter ${found.dropped_by}`, "note") : null,
    found.error ? message(found.error, "error") : null,
    h("p", { class: "saves" },
      followTask ? [h("button", { type: "button", title: "every rollout of this task, newest version first", onclick: () => followTask(found) }, "this task over the versions"), " "] : null,
      compare ? [h("button", { type: "button", title: "beside another rollout of this task: of another run, or of another version", onclick: () => compare(found) }, "side by side"), " "] : null,
      followTask ? [copyLink(), " "] : null, saving(run, "rollout.html", { group, member }, "HTML file")),
    reported("what the reward said", found.metrics), reported("task", found.data),
    groupOf(found, open),
    found.no_text && found.branches.length ? message(found.no_text) : null,
    found.no_tokens ? message(found.no_tokens) : found.branches.length ? h("p", { class: "colours" }, colours(has, found.not_kept, coloring, (value) => {
      coloring = value;
      context.remember({ colour: value === "logprob" ? null : value });
      draw();
    }), " ", key) : message("its first turn is under way"),
    body,
  ];
}

// What is not kept is listed too, with the reason.
function colours(has, missing, coloring, change) {
  const options = Object.entries(COLORINGS).filter(([key]) => has.has(key) || key in missing).map(([key, text]) =>
    h("option", { value: key, selected: key === coloring, disabled: !has.has(key), title: missing[key] }, has.has(key) ? text : `${text}: not kept`));
  const why = Object.values(missing)[0];
  return [h("label", {}, "colour ", h("select", { onchange: (event) => change(event.target.value) }, options)),
    why ? h("small", { class: "why" }, ` no ${Object.keys(missing).map((key) => COLORINGS[key].split(" ")[0]).join(", no ")}: ${why}`) : null];
}

// Which of several branches this is, and whose.
function heading(found, at) {
  const { branches } = found, own = branches[at];
  if (branches.length === 1) return own.agent === "policy" && own.is_trained ? null : `${own.agent}${own.is_trained ? "" : ", not trained"}`;
  const same = branches.filter((each) => each.agent === own.agent), number = same.indexOf(own) + 1;
  return [own.agent, same.length > 1 ? `branch ${number} of ${same.length}` : null, own.is_trained ? null : "not trained",
    own.reward === null ? null : `reward ${short(own.reward)}`, `${own.tokens.sampled.reduce((sum, each) => sum + each, 0)} sampled tokens`].filter(Boolean).join(", ");
}

function groupOf(found, open) {
  return h("p", { class: "group" }, "group: ", found.group.map((each) =>
    h("button", { "aria-current": each.member === found.member ? "true" : null, title: `${each.status}, ${each.num_sampled_tokens ?? 0} tokens, advantage ${short(each.advantage)}`,
      onclick: () => open(`${found.group_id}.${each.member}`) }, each.reward === null ? each.status : short(each.reward))));
}

function reported(title, values) {
  if (!values || !Object.keys(values).length) return null;
  return h("details", {}, h("summary", {}, title), h("pre", {}, JSON.stringify(values, null, 1)));
}

// What the environment said of a turn, and what its tokens get beside the advantage of the rollout.
function credit(turn) {
  if (!turn) return null;
  const facts = [["reward", turn.reward], ["value before", turn.value], ["turn advantage", turn.advantage]].filter(([, value]) => value !== undefined);
  return h("small", { class: "credit", title: turn.state === undefined ? null : `state ${turn.state || "(empty)"}` }, ` ${facts.map(([name, value]) => `${name} ${short(value)}`).join(", ")}`);
}

function branch(found, run, coloring, title, turnTo, scored) {
  const { tokens, turns } = found;
  const end = found.begin + tokens.text.length, all = end + found.num_more, size = Math.max(tokens.text.length, 1);
  const button = (text, from) => h("button", { type: "button", onclick: () => turnTo(from) }, text);
  const pages = () => found.begin || found.num_more ? h("p", { class: "pages" }, `tokens ${found.begin} to ${end - 1} of ${all} `,
    found.begin ? [button("the first", 0), " ", button("earlier", Math.max(0, found.begin - size)), " "] : null,
    found.num_more ? [button("later", end), " ", button("the last", Math.max(0, all - size))] : null) : null;
  tokens.begin = found.begin;
  const images = found.images.map((hash, number) =>
    h("img", { src: `/api/run/${encodeURIComponent(run)}/image/${hash}`, alt: `image ${number + 1}`, title: `image ${number + 1}`, loading: "lazy" }));
  const body = [images.length ? h("p", { class: "images" }, images) : null,
    pages(), turns.map((turn) => h("article", { class: `turn ${turn.role}` }, folded(tokens, turn) ? h("details", {}, h("summary", {}, `${turn.role}, ${turn.end - turn.body} tokens`), text(tokens, turn, coloring)) : [h("h4", {}, turn.role, credit(scored[turn.number])), text(tokens, turn, coloring)])), pages()];
  return title ? h("details", { class: "branch", open: true }, h("summary", {}, title), body) : body;
}

// A long message of the system is the same in every rollout, and hides what follows it.
function folded(tokens, turn) {
  return turn.role === "system" && tokens.text.slice(turn.body, turn.end).join("").length > LONG_SYSTEM && !tokens.sampled.slice(turn.body, turn.end).includes(1);
}

function text(tokens, turn, coloring) {
  const place = h("div", { class: "text" });
  const has = tokens.sampled.slice(turn.body, turn.end).includes(1);
  if (coloring === "none" || !has) {
    fill(place, tokens.text.slice(turn.body, turn.end).join("").replace(/(<\|image_pad\|>)+/g, "<|image_pad|>"));
    return place;
  }
  let at = turn.body;
  const more = h("button", { onclick: () => draw() }, "more");
  function draw() {
    const end = Math.min(turn.end, at + MOST_LINES);
    more.remove();
    for (; at < end; at += 1) place.append(token(tokens, at, coloring));
    if (at < turn.end) place.append(more);
  }
  draw();
  return place;
}

const FACTS = [["logprob", "log-probability"], ["entropy", "entropy"], ["advantage", "advantage"], ["ratio", "trainer / engine"], ["teacher", "teacher minus engine"], ["version", "version"]];

function token(tokens, at, coloring) {
  const facts = [`token ${tokens.begin + at}`];
  if (tokens.sampled[at]) {
    for (const [key, text] of FACTS) if (tokens[key]?.[at] !== undefined && tokens[key][at] !== null) facts.push(`${text} ${tokens[key][at]}`);
    if (!tokens.trained[at]) facts.push("not in the loss");
  }
  return h("span", { title: facts.join(", "), style: { backgroundColor: tokens.sampled[at] ? color(tokens, at, coloring) : "" } }, tokens.text[at]);
}

function color(tokens, at, coloring) {
  if (coloring === "mask") return "var(--sampled)";
  const value = tokens[coloring]?.[at];
  if (value === null || value === undefined) return "";
  if (coloring === "trained") return value ? "var(--sampled)" : "";
  if (coloring === "version") return `hsl(${(value * 67) % 360} 70% 50% / 30%)`;
  if (coloring === "logprob") return `rgb(220 60 60 / ${Math.min(0.8, -value / 5)})`;
  if (coloring === "entropy") return `rgb(142 91 192 / ${Math.min(0.8, value / 3.75)})`;
  const away = coloring === "ratio" ? Math.log(value) * 2 : value;
  return away >= 0 ? `rgb(40 150 80 / ${Math.min(0.8, away)})` : `rgb(220 60 60 / ${Math.min(0.8, -away)})`;
}
