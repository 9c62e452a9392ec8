import { duration, fill, h, input, message, ofRun, select, short } from "./dom.js";
import { conversation } from "./conversation.js";

export const SUBJECTS = ["ledger"];
const FILTERS = ["step", "env", "status", "min_reward", "max_reward", "min_tokens", "max_tokens", "version", "sort"];

export async function render(root, context) {
  const run = context.runs[0];
  const filters = Object.fromEntries(FILTERS.map((name) => [name, context.query.get(name) || ""]));
  const table = h("tbody");
  const end = h("p", { class: "note", role: "status" });
  const panel = h("section", { class: "detail", "aria-label": "rollout" });
  let rows = [], next = null, isBusy = false, asked = 0, opened = context.query.get("rollout") || "";

  const first = await ofRun(run, "rollouts", filters, context.signal);
  if (!first.choices) {
    fill(root, message(context.rows[0]?.verb === "rl" ? "There is no ledger.sqlite in this run: it has not started yet, or the file was deleted."
      : "This run has no rollouts: it is not one of reinforcement learning."));
    return {};
  }

  async function load(isNew) {
    if (isBusy && !isNew) return;
    const mine = ++asked;
    isBusy = true;
    try {
      const page = await ofRun(run, "rollouts", { ...filters, before: isNew ? null : next }, context.signal);
      if (mine === asked) take(page, isNew);
    } catch (error) {
      if (error.name === "AbortError" || mine !== asked) return;
      fill(end, error.message);
      return;
    } finally {
      if (mine === asked) isBusy = false;
    }
    // The rows searched so far have no match: search on while the end of the list is in view.
    if (!context.signal.aborted && mine === asked && next !== null && isEndSeen()) setTimeout(() => mine === asked && load(false), 0);
  }

  function take(page, isNew) {
    if (isNew) {
      rows = [];
      fill(table);
    }
    table.append(...page.rows.map((row, at) => line(row, rows.length + at)));
    rows.push(...page.rows);
    next = page.next;
    fill(end, next !== null ? `${rows.length} shown, looking further back …` : rows.length ? `all ${rows.length}` : "no such rollouts");
  }

  function line(row, at) {
    const name = `${row.group_id}.${row.member}`;
    return h("tr", { "data-rollout": name, "aria-selected": name === opened, onclick: () => open(at) },
      h("td", {}, `g${name}`), h("td", {}, short(row.step)), h("td", {}, row.env), h("td", { class: `state ${row.status}` }, row.status),
      h("td", {}, short(row.reward)), h("td", {}, short(row.advantage)), h("td", {}, short(row.num_sampled_tokens)), h("td", {}, short(row.num_turns)),
      h("td", {}, row.first_version === row.last_version ? short(row.first_version) : `${short(row.first_version)}–${short(row.last_version)}`),
      h("td", {}, row.finished_at && row.started_at ? took(row.finished_at - row.started_at) : "–"));
  }

  async function open(at) {
    if (at < 0 || at >= rows.length) return;
    await openNamed(`${rows[at].group_id}.${rows[at].member}`);
    table.rows[at]?.scrollIntoView({ block: "nearest" });
  }

  async function openNamed(name) {
    opened = name;
    context.remember({ rollout: name });
    for (const row of table.rows) row.setAttribute("aria-selected", row.dataset.rollout === name);
    const [group, member] = name.split(".");
    try {
      const found = await ofRun(run, "rollout", { group, member }, context.signal);
      if (opened === name) fill(panel, conversation(found, openNamed, run));
    } catch (error) {
      if (error.name !== "AbortError") fill(panel, message(error.message, "error"));
    }
  }

  const change = (name) => (value) => {
    filters[name] = value;
    context.remember({ [name]: value });
    load(true);
  };
  const number = (name, label) => input(label, { type: "number", step: "any", value: filters[name], size: 6, name }, change(name));
  const range = (name) => h("span", { class: "range" }, number(`min_${name}`, `${name} from `), number(`max_${name}`, " to "));
  const { envs, statuses, last } = first.choices;
  fill(root, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    number("step", last ? `step (to ${last}) ` : "step "),
    select("environment ", [["", "all"], ...envs.map((env) => [env, env])], filters.env, change("env")),
    select("status ", [["", "all"], ...statuses.map((status) => [status, status])], filters.status, change("status")),
    range("reward"), range("tokens"), number("version", "version "),
    select("order ", [["newest", "newest"], ["best", "best of the step"], ["worst", "worst of the step"], ["longest", "longest of the step"]], filters.sort || "newest", change("sort"))),
    h("div", { class: "split" }, h("div", { class: "rows" }, h("table", {}, h("thead", {}, h("tr", {},
      ["rollout", "step", "environment", "status", "reward", "advantage", "tokens", "turns", "version", "took"].map((name) => h("th", {}, name)))), table), end), panel));

  const scroller = root.querySelector(".rows");
  const isEndSeen = () => scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 400;
  scroller.addEventListener("scroll", () => { if (next !== null && isEndSeen()) load(false); }, { passive: true });
  take(first, true);
  if (next !== null && isEndSeen()) load(false);
  if (opened) await openNamed(opened);

  return {
    // New rows are inserted at the top only while the list is scrolled to the top.
    update: () => (scroller.scrollTop < 50 && rows.length <= 100 ? load(true) : null),
    key(key) {
      const selected = rows.findIndex((row) => `${row.group_id}.${row.member}` === opened);
      if (key === "j") open(selected + 1);
      else if (key === "k") open(selected - 1);
      else return false;
      return true;
    },
  };
}

// Seconds of a rollout, which may be a small part of one.
function took(seconds) {
  return seconds < 0.1 ? `${Math.round(1000 * seconds)}ms` : seconds < 10 ? `${short(Number(seconds.toFixed(2)))}s` : duration(seconds);
}
