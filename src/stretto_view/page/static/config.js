import { fill, h, input, message, ofRun, words } from "./dom.js";

export const SUBJECTS = [];

export async function render(root, context) {
  const configs = await Promise.all(context.runs.map((run) => ofRun(run, "config", {}, context.signal)));
  const keys = [...new Set(configs.flatMap(Object.keys))].sort();
  const shown = (config, key) => (key in config ? JSON.stringify(config[key]) : "–");
  const isSame = (key) => configs.every((config) => shown(config, key) === shown(configs[0], key));
  const settings = { text: context.query.get("text") || "", differs: context.runs.length > 1 };
  const body = h("tbody");
  const draw = () => {
    const wanted = keys.filter((key) => (!settings.differs || !isSame(key)) && `${key} ${configs.map((config) => shown(config, key)).join(" ")}`.toLowerCase().includes(settings.text.toLowerCase()));
    fill(body, wanted.map((key) => h("tr", { class: isSame(key) ? null : "differs" }, h("td", {}, h("code", { class: "key" }, words(key))), configs.map((config) => h("td", {}, h("code", {}, shown(config, key)))))));
    if (!wanted.length) fill(body, h("tr", {}, h("td", {}, settings.differs ? "no difference" : "no such key")));
  };
  if (!keys.length) {
    fill(root, message("This run has no configs/run.json."));
    return {};
  }
  fill(root, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    input("keys or values with ", { type: "search", value: settings.text, oninput: (event) => { settings.text = event.target.value; draw(); } }, (value) => context.remember({ text: value })),
    context.runs.length > 1 ? h("label", {}, h("input", { type: "checkbox", checked: true, onchange: (event) => { settings.differs = event.target.checked; draw(); } }), " only what differs") : null),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "key"), context.runs.map((run) => h("th", {}, run)))), body)));
  draw();
  return {};
}
