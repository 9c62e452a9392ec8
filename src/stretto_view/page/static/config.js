import { copyLink, fill, h, input, message, ofRuns, words } from "./dom.js";

export const SUBJECTS = [];

export async function render(root, context) {
  const { runs } = context;
  const table = await read(runs, context.signal);
  const settings = { text: context.query.get("text") || "", differs: runs.length > 1 };
  const body = h("tbody");
  const draw = () => fill(body, lines(table, settings));
  if (!table.keys.length) {
    fill(root, message("This run has no configs/run.json."));
    return {};
  }
  fill(root, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    input("keys or values with ", { type: "search", value: settings.text, oninput: (event) => { settings.text = event.target.value; draw(); } }, (value) => context.remember({ text: value })),
    runs.length > 1 ? h("label", {}, h("input", { type: "checkbox", checked: true, onchange: (event) => { settings.differs = event.target.checked; draw(); } }), " only what differs") : null,
    h("span", { class: "saves" }, copyLink())),
    h("div", { class: "wide" }, h("table", { class: "config" }, head(runs), body)));
  draw();
  return {};
}

// A table of the keys that differ between runs.
export async function differences(runs, signal) {
  const table = await read(runs, signal);
  return h("div", { class: "wide" }, h("table", { class: "config" }, head(runs), h("tbody", {}, lines(table, { text: "", differs: true }))));
}

function head(runs) {
  return h("thead", {}, h("tr", {}, h("th", {}, "key"), runs.map((run) => h("th", {}, run))));
}

async function read(runs, signal) {
  const configs = (await ofRuns(runs, "config", {}, signal)).map((config) => (config.error && Object.keys(config).length === 1 ? {} : config));
  return { configs, keys: [...new Set(configs.flatMap(Object.keys))].sort() };
}

function lines({ configs, keys }, { text, differs }) {
  const shown = (config, key) => (key in config ? JSON.stringify(config[key]) : "–");
  const isSame = (key) => configs.every((config) => shown(config, key) === shown(configs[0], key));
  const needle = text.toLowerCase();
  const wanted = keys.filter((key) => (!differs || !isSame(key)) && `${key} ${configs.map((config) => shown(config, key)).join(" ")}`.toLowerCase().includes(needle));
  const drawn = [], told = new Set();
  for (const key of wanted) {
    const section = text || !differs ? null : absent(configs, keys, key);
    if (!section) drawn.push(h("tr", { class: isSame(key) ? null : "differs" }, h("td", {}, h("code", { class: "key" }, words(key))), configs.map((config) => h("td", {}, h("code", {}, shown(config, key))))));
    else if (!told.has(section)) {
      told.add(section);
      drawn.push(h("tr", { class: "differs" }, h("td", {}, h("code", { class: "key" }, words(section))), configs.map((config) => h("td", {}, held(config, section)))));
    }
  }
  return drawn.length ? drawn : h("tr", {}, h("td", {}, differs ? "no difference" : "no such key"));
}

// The largest section of a key that some of the runs lack as a whole; null if each has it.
function absent(configs, keys, key) {
  const parts = key.split(/(?=[.[])/);
  for (let length = 1; length < parts.length; length += 1) {
    const section = parts.slice(0, length).join("");
    const has = configs.map((config) => keys.some((each) => each in config && isIn(each, section)));
    if (has.includes(false) && keys.filter((each) => isIn(each, section)).length > 1) return section;
  }
  return null;
}

function isIn(key, section) {
  return key.startsWith(section) && (key.length === section.length || ".[".includes(key[section.length]));
}

function held(config, section) {
  const own = Object.entries(config).filter(([key]) => isIn(key, section) && key !== section);
  if (!own.length) return section in config && config[section] !== null ? h("code", {}, JSON.stringify(config[section])) : h("small", {}, "no such section");
  return h("details", {}, h("summary", {}, `${own.length} keys`), h("pre", {}, own.map(([key, value]) => `${key.slice(section.length).replace(/^\./, "")} = ${JSON.stringify(value)}`).join("\n")));
}
