import { fill, h, message, ofRun, ofRuns, short } from "./dom.js";

export const SUBJECTS = ["evals"];
const FRAME = new Set(["version", "env", "mode"]);

export async function render(root, context) {
  const tables = h("div"), samples = h("section");
  const update = async () => {
    const lists = await ofRuns(context.runs, "evals", {}, context.signal);
    fill(tables, context.runs.map((run, at) => table(run, lists[at], (version) => open(run, version))));
  };
  async function open(run, version) {
    try {
      const rows = await ofRun(run, "evals", { version }, context.signal);
      fill(samples, h("h2", {}, `${run}, version ${version}: ${rows.length} replies`), rows.map(reply));
      samples.scrollIntoView({ behavior: "smooth" });
    } catch (error) {
      if (error.name !== "AbortError") fill(samples, message(error.message, "error"));
    }
  }
  await update();
  fill(root, tables, samples);
  return { update };
}

function table(run, rows, open) {
  if (rows.error) return message(`${run}: ${rows.error}`, "error");
  if (!rows.length) return message(`${run} has no evals yet.`);
  const columns = ["version", "env", "mode", ...new Set(rows.flatMap(Object.keys).filter((name) => !FRAME.has(name)))];
  return h("section", {}, h("h2", {}, run), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map((row) => h("tr", { tabindex: 0, onclick: () => open(row.version), onkeydown: (event) => event.key === "Enter" && open(row.version) },
      columns.map((name) => h("td", {}, cell(row[name])))))))));
}

// Numbers by k are written one after the other.
function cell(value) {
  if (typeof value !== "object" || value === null) return short(value);
  return Object.entries(value).map(([key, each]) => `${key}: ${typeof each === "number" ? short(Number(each.toFixed(3))) : each}`).join(", ") || "–";
}

function reply(row) {
  const { reward, branches, ...others } = row;
  return h("article", { class: "turn" }, h("h4", {}, `reward ${short(reward)}`), 
    (branches || []).map((branch) => h("div", { class: "text" }, branch.prompt, h("mark", {}, branch.reply))),
    h("details", {}, h("summary", {}, "all"), h("pre", {}, JSON.stringify(others, null, 1))));
}
