import { clock, fill, h, input, message, ofRun, select } from "./dom.js";

export const SUBJECTS = ["logs"];

export async function render(root, context) {
  const run = context.runs[0];
  const settings = { level: context.query.get("level") || "debug", process: context.query.get("process") || "", text: context.query.get("text") || "" };
  const lines = h("ol", { class: "log" });
  const older = h("button", { onclick: () => load(true).catch(said) }, "older");
  let next = null;

  const said = (error) => error.name === "AbortError" || fill(lines, h("li", { class: "error" }, error.message));

  async function load(isOlder) {
    const found = await ofRun(run, "logs", { ...settings, before: isOlder ? next : null }, context.signal);
    const fromEnd = document.body.scrollHeight - window.scrollY;
    if (isOlder) lines.prepend(...found.lines.map(line));
    else fill(lines, found.lines.map(line));
    next = found.next;
    older.hidden = next === null;
    window.scrollTo(0, isOlder ? document.body.scrollHeight - fromEnd : document.body.scrollHeight);
  }
  const isAtEnd = () => window.innerHeight + window.scrollY > document.body.scrollHeight - 60;

  const change = (name) => (value) => {
    settings[name] = value;
    context.remember({ [name]: value });
    load(false).catch(said);
  };
  const found = await ofRun(run, "logs", settings, context.signal);
  if (!found.processes.length) {
    fill(root, message("No process has written a log yet."));
    return { update: () => render(root, context) };
  }
  fill(root, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    select("process ", [["", "all"], ...found.processes.map((name) => [name, name])], settings.process, change("process")),
    select("level ", [["debug", "all"], ["info", "info"], ["warning", "warnings"], ["error", "errors"]], settings.level, change("level")),
    input("with ", { type: "search", value: settings.text }, change("text"))), older, lines);
  await load(false);
  return { update: () => (isAtEnd() ? load(false) : null) }; // lines stay in place while the reader has scrolled up
}

function line(row) {
  return h("li", { class: row.level }, h("time", { title: new Date(row.at * 1000).toISOString() }, clock(row.at)), " ", h("b", {}, row.process), " ", h("span", {}, row.text));
}
