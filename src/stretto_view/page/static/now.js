import { clock, duration, fill, h, message, noSteps, ofRuns, short, sparkline, words } from "./dom.js";

export const SUBJECTS = ["metrics", "ledger", "state", "logs"];

export async function render(root, context) {
  const update = async () => {
    const found = await ofRuns(context.runs, "now", {}, context.signal);
    fill(root, found.map((state, at) => (state.error ? message(`${context.runs[at]}: ${state.error}`, "error") : card({ ...state, id: context.runs[at] }, context.runs.length > 1))));
  };
  await update();
  return { update };
}

function card(state, isNamed) {
  const of = state.max_steps ? ` of ${state.max_steps}` : "";
  return h("article", { class: "now" },
    isNamed ? h("h2", {}, state.name) : null,
    h("p", { class: "headline" }, h("span", { class: `state ${state.state}` }, state.state),
      ` step ${short(state.step)}${of}`, state.state === "running" && state.left_s !== null ? `, ${duration(state.left_s)} left` : "",
      state.age_s === null ? "" : `, last step ${duration(state.age_s)} ago`),
    state.verdict ? h("p", { class: "headline" }, state.verdict) : null,
    state.warnings.length ? h("section", { class: "warnings" }, h("h3", {}, "warnings"), h("ul", {}, state.warnings.slice(0, 8).map(warning))) : null,
    state.missing ? message(state.missing, "error") : null,
    state.metrics.length ? h("section", { class: "tiles" }, state.metrics.map(tile)) : state.missing ? null : noSteps(state),
    state.waits ? h("section", {}, h("h3", {}, "who waits, of the last steps' time"), bars(state.waits)) : null,
    state.no_queues ? message(state.no_queues, "error") : null,
    state.queues ? h("section", {}, h("h3", {}, state.state === "running" ? "under way" : "under way when it ended"), list(queues(state.queues, state.id))) : null,
    state.staleness ? h("section", {}, h("h3", {}, "weights of the last steps' rollouts"), bars(Object.fromEntries(Object.entries(state.staleness).map(([age, share]) => [age === "0" ? "of the newest" : age === "1" ? "1 version old" : `${age} versions old`, share])))) : null,
    state.engine_waits?.length ? h("section", {}, h("h3", {}, `engines, the last ${state.engine_waits[0].looks} times they were looked at`), waits(state.engine_waits)) : null,
    state.engines.length ? h("section", {}, h("h3", {}, "engines at this moment"), engines(state.engines)) : null,
    state.machine && h("section", {}, h("h3", {}, `machine ${state.machine.host}`), list(machine(state.machine)), state.machine.gpus.map(gpu)));
}

// Idle: it waits for requests; full: requests wait for it.
function waits(found) {
  const share = (value) => `${Math.round(100 * value)} %`;
  return h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["engine", "idle", "busy", "full", "weights", ""].map((name) => h("th", {}, name)))),
    h("tbody", {}, found.map((each) => h("tr", {}, h("td", {}, each.engine), h("td", {}, share(each.idle)), h("td", {}, share(each.busy)), h("td", {}, share(each.full)),
      h("td", {}, each.behind === null ? "–" : each.behind ? `${each.behind} behind` : "newest"),
      h("td", {}, h("span", { class: "shares", title: "idle, busy, full" }, ["idle", "busy", "full"].map((kind) => h("i", { class: kind, style: { width: `${100 * each[kind]}%` } })))))))));
}

function engines(found) {
  return h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["engine", "computes", "wait in it", "cache in use", "version", "tokens per second"].map((name) => h("th", {}, name)))),
    h("tbody", {}, found.map((each) => h("tr", {}, h("td", {}, each.address.replace(/^https?:\/\/|\/v1$/g, "")), each.error ? h("td", { colspan: 5, class: "error" }, each.error) : [
      h("td", {}, each.running === 0 && each.waiting === 0 ? h("span", { class: "state truncated" }, "idle") : short(each.running)), h("td", {}, short(each.waiting)),
      h("td", {}, each.cache === null ? "–" : `${short(Number((100 * each.cache).toFixed(1)))} %`), h("td", {}, short(each.version)), h("td", {}, short(each.tokens_per_s))])))));
}

function warning(row) {
  return h("li", { class: row.level }, h("time", {}, clock(row.at)), " ", h("b", {}, row.process), " ", row.text.split("\n")[0],
    row.count > 1 ? h("small", {}, ` ${row.count} times`) : "");
}

function tile(metric) {
  return h("div", { class: "tile", title: metric.reading }, h("span", {}, words(metric.name)),
    h("strong", {}, short(metric.value)), h("small", {}, metric.unit === "-" ? "" : metric.unit), sparkline(metric.recent));
}

function bars(shares) {
  return h("dl", { class: "bars" }, Object.entries(shares).map(([name, share]) => [
    h("dt", {}, name), h("dd", {}, h("meter", { min: 0, max: 1, value: share }), ` ${Math.round(share * 100)}%`)]));
}

function list(pairs) {
  return h("dl", { class: "pairs" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function queues(found, run) {
  return [
    ["rollouts being played", found.rollouts_running ? h("a", { href: `#/rollouts?${new URLSearchParams({ run, status: "running" })}` }, `${short(found.rollouts_running)}, turn by turn`) : "0"],
    ["groups being played", short(found.groups_running)],
    ["groups that wait for a batch", short(found.groups_finished)],
    ["groups at the trainer", short(found.groups_shipped)],
    ["version published, loaded", `${short(found.published)}, ${short(found.loaded)}`],
    ["sampled tokens per second", short(found.tokens_per_s)],
  ];
}

function machine(found) {
  return [
    ["load", `${short(found.load)} on ${found.cores} cores`],
    ["memory", `${short(found.memory_used)}B of ${short(found.memory_total)}B`],
    ["disk", `${short(found.disk_free)}B free`],
  ];
}

function gpu(found) {
  return h("dl", { class: "bars" }, h("dt", {}, `GPU ${found.index} ${found.name}`),
    h("dd", {}, h("meter", { min: 0, max: 100, value: Number(found.use_percent) }), ` ${found.use_percent}%, ${found.memory_mib} of ${found.memory_total_mib} MiB`));
}
