// What other rewards say of a run's rollouts: a line per `stretto rescore --write NAME`, and its largest disagreements.
import { fill, h, ofRuns, short } from "./dom.js";

const drawn = new WeakMap();

export async function rejudged(root, { runs, signal, go }, samples, spoken) {
  const lists = await ofRuns(runs, "scores", {}, signal);
  const text = JSON.stringify(lists);
  if (drawn.get(root) === text) return;
  drawn.set(root, text);
  const rows = lists.flatMap((list, at) => (list.error ? [] : list).map((each) => ({ run: runs[at], ...each })));
  if (!rows.length) return void fill(root);
  const open = (row) => {
    fill(samples, h("h2", {}, `${row.run}, ${row.name}: the largest disagreements`), (row.disagreements || []).map((each) => disagreement(row.run, each, go, spoken)));
    samples.scrollIntoView({ behavior: "smooth" });
  };
  const columns = [runs.length > 1 ? "run" : null, "scores", "reward", "rollouts", "mean", "rank correlation", "within groups", "advantages change sign", "groups gain, lose their signal", "explained by length"].filter(Boolean);
  fill(root, h("h2", {}, "other rewards for the same rollouts"), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map((row) => h("tr", { tabindex: 0, onclick: () => open(row), onkeydown: (event) => event.key === "Enter" && open(row) },
      runs.length > 1 ? h("td", {}, row.run) : null, h("td", {}, row.name), h("td", {}, (row.rewards || []).join(", ")),
      h("td", {}, short(row.rollouts), row.failed ? h("span", { class: "state failed" }, ` ${short(row.failed)} not judged`) : null),
      h("td", {}, `${round(row.mean?.old)} → ${round(row.mean?.new)}`), h("td", {}, round(row.rank_correlation)), h("td", {}, round(row.rank_correlation_within_groups)),
      h("td", {}, percent(row.sign_changes)), h("td", {}, `${short(row.groups_gain_signal)}, ${short(row.groups_lose_signal)} of ${short(row.groups)}`),
      h("td", {}, percent(row.by_length?.new), row.is_dominated_by_length ? h("span", { class: "state failed" }, " dominated") : null, (row.components || []).map(mark))))))));
}

// What is wrong with a component, if anything is.
function mark(each) {
  const words = [each.dominates ? "dominates" : null, each.is_saturated ? "saturated" : null].filter(Boolean);
  return words.length ? h("div", { class: "state truncated" }, `${each.name}: ${words.join(", ")}`) : null;
}

function disagreement(run, each, go, spoken) {
  const name = each.rollout.replace(/^g/, "");
  return h("section", { class: "reply" }, h("h3", {}, `task ${each.task}, reward ${round(each.old)} → ${round(each.new)}, advantage ${round(each.old_advantage)} → ${round(each.advantage)} `,
    h("button", { type: "button", onclick: () => go("rollouts", { rollout: name }) }, each.rollout)),
  each.branches.map((branch) => spoken(branch.turns)));
}

function round(value) {
  return typeof value === "number" ? short(Number(value.toFixed(3))) : "–";
}

function percent(value) {
  return typeof value === "number" ? `${(100 * value).toFixed(1)}%` : "–";
}
