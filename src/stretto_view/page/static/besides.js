// Two rollouts of one task beside each other: of two runs, or of two versions of one run.
import { conversation } from "./conversation.js";
import { copyLink, fill, h, message, ofRun, ofRuns, select, short } from "./dom.js";

const SIDES = ["left", "right"];

export async function besides(root, context) {
  const { query, runs, signal } = context, task = query.get("beside"), env = query.get("env");
  const of = [runs[0], runs.includes(query.get("of")) ? query.get("of") : runs[1] || runs[0]];
  const back = h("a", { href: `#/rollouts?${new URLSearchParams([...runs.map((id) => ["run", id]), ["task", task], ["env", env]])}` }, "← the list");
  const choose = runs.length < 3 ? null : select("on the right ", runs.slice(1).map((id) => [id, id]), of[1], (id) => {
    context.remember({ of: id, right: null });
    besides(root, context);
  });
  const columns = SIDES.map(() => h("section", { class: "detail" }));
  fill(root, h("div", { class: "controls" }, back, h("b", {}, `task ${task} of ${env}`), choose, h("span", { class: "saves" }, copyLink())), h("div", { class: "besides" }, columns));
  const lists = (await ofRuns(of, "rollouts", { task, env }, signal)).map((list) => ({ rows: [], ...list }));
  const first = await draw(0, named(lists[0], query.get("left")) || lists[0].rows[0]);
  await draw(1, named(lists[1], query.get("right")) || other(lists[1].rows, first, of[0] === of[1]));
  return {};

  async function draw(at, row, part = {}) {
    const place = columns[at], run = of[at], title = h("h2", {}, run);
    if (lists[at].error) {
      fill(place, title, message(lists[at].error, "error"));
      return null;
    }
    if (!row) {
      fill(place, title, message(lists[at].next === null ? `${run} has no rollout of this task.` : `none of ${run}'s newest rollouts is of this task.`));
      return null;
    }
    const shown = name(row);
    context.remember({ [SIDES[at]]: shown });
    const choice = (chosen) => {
      const rows = lists[at].rows.some((each) => name(each) === shown) ? lists[at].rows : [chosen, ...lists[at].rows];
      return select("", rows.map((each) => [name(each), about(each)]), shown, (value) => draw(at, named(lists[at], value)));
    };
    place.setAttribute("aria-busy", "true");
    try {
      const [group, member] = shown.split(".");
      const found = await ofRun(run, "rollout", { group, member, ...part }, signal);
      fill(place, title, choice(found), conversation(found, run, context, { open: (value) => draw(at, named(lists[at], value)), turnTo: (branch, from) => draw(at, row, { branch, from }) }));
      return found;
    } catch (error) {
      if (error.name !== "AbortError") fill(place, title, choice(row), message(error.message, "error"));
      return null;
    } finally {
      place.removeAttribute("aria-busy");
    }
  }
}

const name = (row) => `${row.group_id}.${row.member}`;
const about = (row) => `version ${short(row.first_version)}, reward ${short(row.reward)}, g${name(row)}`;

// The row of this name; of one that is not among the newest only the name is known.
function named(list, wanted) {
  if (!wanted) return null;
  const [group_id, member] = wanted.split(".");
  return list.rows.find((row) => name(row) === wanted) || { group_id, member, first_version: null, reward: null };
}

// What to put beside a rollout: of another run the nearest version, of the same run the farthest.
function other(rows, row, isSameRun) {
  const away = (each) => Math.abs((each.first_version ?? 0) - (row?.first_version ?? 0));
  const order = rows.filter((each) => !isSameRun || !row || name(each) !== name(row)).toSorted((a, b) => (isSameRun ? away(b) - away(a) : away(a) - away(b)));
  return order[0];
}
