import { copyLink, duration, fill, h, input, message, ofRun, saving, select, short } from "./dom.js";
import { besides } from "./besides.js";
import { conversation } from "./conversation.js";

export const SUBJECTS = ["ledger"];
const FILTERS = ["text", "place", "step", "env", "task", "status", "min_reward", "max_reward", "min_tokens", "max_tokens", "version", "sort"];
const COLUMNS = ["rollout", "step", "environment", "status", "reward", "advantage", "tokens", "turns", "version", "took"];
const MOST_ALONE = 20; // requests of a search that follow each other by themselves; a button goes on

export async function render(root, context) {
  if (context.query.has("beside")) return besides(root, context);
  const run = context.runs[0];
  const filters = Object.fromEntries(FILTERS.map((name) => [name, context.query.get(name) || ""]));
  if (!filters.step) filters.sort = ""; // other orders are of one step
  const table = h("tbody");
  const end = h("p", { class: "note", role: "status" });
  const panel = h("section", { class: "detail", "aria-label": "rollout" });
  const saves = h("span", { class: "saves" }), notice = h("p", { class: "note", role: "status" });
  let rows = [], next = null, isBusy = false, asked = 0, alone = 0, searched = 0, unread = 0;
  let opened = context.query.get("rollout") || "", isOpen = false, isLoading = false, noText = null;
  let part = {}; // the branch and the first token that are shown of a long rollout

  const first = await ofRun(run, "rollouts", filters, context.signal);
  if (!first.choices) {
    fill(root, message(noLedger(context.rows[0])));
    return { update: () => render(root, context) };
  }

  async function load(isNew, isQuiet = false) {
    if (isBusy && !isNew) return;
    const mine = ++asked;
    isBusy = true;
    try {
      const page = await ofRun(run, "rollouts", { ...filters, before: isNew ? null : next }, context.signal);
      if (mine === asked) take(page, isNew);
    } catch (error) {
      if (error.name === "AbortError" || mine !== asked) return;
      if (!isQuiet) fill(end, error.message);
      return;
    } finally {
      if (mine === asked) isBusy = false;
    }
    goOn(mine);
  }

  // The rows searched so far have too few matches: search on while the end of the list is in view.
  function goOn(mine) {
    if (context.signal.aborted || mine !== asked || next === null || !isEndSeen()) return;
    alone += 1;
    if (!filters.text || alone < MOST_ALONE) setTimeout(() => mine === asked && load(false), 0);
    else fill(end, told(), " ", h("button", { type: "button", onclick: () => { alone = 0; load(false); } }, "search further back"));
  }

  function take(page, isNew) {
    isLoading = page.is_loading;
    noText = page.no_text;
    fill(notice, noText || "");
    if (isNew) {
      rows = [];
      alone = searched = unread = 0;
      fill(table);
      fill(saves, copyLink(), " ", saving(run, "rollouts.csv", filters, "CSV"));
    }
    table.append(...page.rows.flatMap((row, at) => lines(row, rows.length + at)));
    rows.push(...page.rows);
    searched += page.num_read || 0;
    unread += page.unread || 0;
    next = page.next;
    fill(end, told());
    if (page.is_loading) setTimeout(() => context.signal.aborted || rows.length > 100 || load(true, true), 1000);
  }

  function told() {
    const gone = unread ? `; ${unread} of them have no tokens any more` : "";
    const read = filters.text ? `, ${searched} read${gone}` : "";
    if (next !== null) return `${rows.length} shown${read}, looking further back …`;
    if (rows.length) return `all ${rows.length}${read}`;
    return FILTERS.some((name) => filters[name]) ? `no such rollouts${read}` : "no rollout has ended yet; those under way have the status running";
  }

  function lines(row, at) {
    const name = `${row.group_id}.${row.member}`;
    const chosen = { "aria-selected": name === opened, onclick: () => open(at) };
    const facts = h("tr", { "data-rollout": name, ...chosen },
      h("td", {}, `g${name}`), h("td", {}, short(row.step)), h("td", {}, row.env), h("td", { class: `state ${row.status}` }, row.status),
      h("td", {}, short(row.reward)), h("td", {}, short(row.advantage)), h("td", {}, short(row.num_sampled_tokens)), h("td", {}, short(row.num_turns)),
      h("td", {}, row.first_version === row.last_version ? short(row.first_version) : `${short(row.first_version)}–${short(row.last_version)}`),
      h("td", {}, row.started_at && (row.finished_at || row.status === "running") ? took((row.finished_at || Date.now() / 1000) - row.started_at) : "–"));
    return [facts, h("tr", { class: "beginning", "data-of": name, ...chosen }, h("td", { colspan: COLUMNS.length }, beginning(row)))];
  }

  function beginning(row) {
    if (row.match) return h("div", {}, marked(row.match, filters.text));
    if (row.prompt === null && isLoading) return h("small", {}, "the tokenizer is being loaded …");
    if (row.is_long) return h("small", {}, "too long to be read here: open it");
    if (row.prompt === null && noText && row.num_tokens) return h("small", {}, "no text");
    if (row.prompt === null) return h("small", {}, row.status === "running" ? "its first turn is under way" : row.error || "its tokens are no longer kept");
    return [h("div", {}, row.prompt), h("div", {}, row.reply ? h("mark", {}, row.reply) : h("small", {}, "(empty)"))];
  }

  async function open(at) {
    if (at < 0 || at >= rows.length) return;
    await openNamed(`${rows[at].group_id}.${rows[at].member}`);
    table.rows[2 * at]?.scrollIntoView({ block: "nearest" });
    if (isNarrow()) panel.scrollIntoView({ behavior: "smooth" });
  }

  async function openNamed(name, isAgain = false) {
    if (name !== opened) part = {};
    opened = name;
    context.remember({ rollout: name });
    for (const row of table.rows) row.setAttribute("aria-selected", (row.dataset.rollout || row.dataset.of) === name);
    const [group, member] = name.split(".");
    if (!isAgain) panel.setAttribute("aria-busy", "true");
    try {
      const found = await ofRun(run, "rollout", { group, member, ...part }, context.signal);
      if (opened !== name) return;
      isOpen = found.status === "running";
      const up = isNarrow() ? h("button", { type: "button", onclick: () => scroller.scrollIntoView({ behavior: "smooth" }) }, "↑ the list") : null;
      fill(panel, up, conversation(found, run, context, { open: openNamed, turnTo, followTask, compare }));
    } catch (error) {
      if (error.name !== "AbortError" && !isAgain) fill(panel, message(error.message, "error"));
    } finally {
      panel.removeAttribute("aria-busy");
    }
  }

  function turnTo(branch, from) {
    part = { branch, from };
    return openNamed(opened);
  }

  function compare(found) {
    context.go("rollouts", { beside: found.task_id, env: found.env, left: `${found.group_id}.${found.member}` });
  }

  function followTask(found) {
    context.go("rollouts", { task: found.task_id, env: found.env, rollout: `${found.group_id}.${found.member}` });
  }

  const { envs, statuses, last } = first.choices;
  const change = (name) => (value) => {
    filters[name] = value;
    if (!filters.step) {
      filters.sort = "";
      context.remember({ sort: "" });
      orders.querySelector("select").value = "newest";
    }
    context.remember({ [name]: filters[name] });
    load(true);
  };
  const order = (value) => { // of the newest step, if none is given
    if (value !== "newest" && !filters.step && last) {
      root.querySelector("[name=step]").value = filters.step = last;
      context.remember({ step: last });
    }
    change("sort")(value);
  };
  const number = (name, label) => input(label, { type: "number", step: "any", value: filters[name], size: 6, name }, change(name));
  const orders = select("order ", [["newest", "newest"], ["best", "best of the step"], ["worst", "worst of the step"], ["longest", "longest of the step"]], filters.sort || "newest", order);
  const range = (name) => h("span", { class: "range" }, number(`min_${name}`, `${name} from `), number(`max_${name}`, " to "));
  const isFiltered = FILTERS.slice(2).some((name) => filters[name] && name !== "sort");
  fill(root, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    input("text ", { type: "search", value: filters.text, name: "text", placeholder: "in all rollouts that are kept" }, change("text")),
    select("in ", [["anywhere", "prompt and reply"], ["prompt", "prompt"], ["reply", "reply"]], filters.place || "anywhere", change("place")), saves,
    h("details", { class: "filters", open: isFiltered || !isNarrow() }, h("summary", {}, "filters"), h("div", { class: "controls" },
      number("step", last ? `step (to ${last}) ` : "step "),
      select("environment ", [["", "all"], ...envs.map((env) => [env, env])], filters.env, change("env")),
      input("task ", { type: "search", value: filters.task, name: "task", size: 8 }, change("task")),
      select("status ", [["", "all that ended"], ...statuses.map((status) => [status, status])], filters.status, change("status")),
      range("reward"), range("tokens"), number("version", "version "),
      orders))),
    notice, h("div", { class: "split" }, h("div", { class: "rows" }, h("table", {}, h("thead", {}, h("tr", {},
      COLUMNS.map((name) => h("th", {}, name)))), table), end), panel));

  const scroller = root.querySelector(".rows");
  const isEndSeen = () => scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 400;
  scroller.addEventListener("scroll", () => { if (next !== null && isEndSeen()) load(false); }, { passive: true });
  take(first, true);
  goOn(asked);
  if (opened) {
    await openNamed(opened);
    if (isNarrow()) panel.scrollIntoView();
  }

  return {
    // New rows are inserted at the top only while the list is scrolled to the top, and never into a search.
    async update() {
      if (isOpen) await openNamed(opened, true);
      if (scroller.scrollTop < 50 && rows.length <= 100 && !filters.text) await load(true, true);
    },
    key(key) {
      const selected = rows.findIndex((row) => `${row.group_id}.${row.member}` === opened);
      if (key === "j") open(selected + 1);
      else if (key === "k") open(selected - 1);
      else return false;
      return true;
    },
  };
}

function noLedger(row) {
  if (row?.verb === "sft") return "It trains on given texts (sft), so it has no rollouts.";
  return { "not started": "It has not started, so it has no rollouts: only what a dry run or a submission writes is there.", running: "It is starting: it has no rollouts yet." }[row?.state]
    || "Its ledger.sqlite is missing: it ended before its first rollout, or the file was deleted.";
}

function isNarrow() {
  return matchMedia("(max-width: 50rem)").matches;
}

// The text with every place where the needle stands marked.
function marked(text, needle) {
  const parts = [], low = text.toLowerCase(), wanted = needle.toLowerCase();
  let at = 0;
  for (let found = low.indexOf(wanted); found >= 0 && wanted; found = low.indexOf(wanted, at)) {
    parts.push(text.slice(at, found), h("mark", { class: "found" }, text.slice(found, found + needle.length)));
    at = found + needle.length;
  }
  return [...parts, text.slice(at)];
}

// Seconds of a rollout, which may be a small part of one.
function took(seconds) {
  return seconds < 0.1 ? `${Math.round(1000 * seconds)}ms` : seconds < 10 ? `${short(Number(seconds.toFixed(2)))}s` : duration(seconds);
}
