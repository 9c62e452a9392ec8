// Try it: a chat with the engines of a run that goes on, or with weights of a run in an engine that is started for it.
import { duration, fill, h, input, message, ofRun, select, short } from "./dom.js";

export const SUBJECTS = ["state"];
const POLL_MS = 1500;
const said = new Map(); // per run, the messages so far: they stay while other views are shown

export async function render(root, context) {
  const run = context.runs[0];
  const first = await ofRun(run, "chat", {}, context.signal);
  if (!first.is_on) {
    fill(root, message("Here one can talk to the run's model, if the page was started for it: whoever reaches such a page uses the run's engines, so it asks for a token."), h("pre", {}, first.why));
    return {};
  }
  if (!said.has(run)) said.set(run, []);
  const messages = said.get(run);
  const settings = { place: first.live ? "live" : "started", step: first.weights[0], temperature: context.query.get("temperature") || "1", max_tokens: context.query.get("max_tokens") || "512", system: "" };
  const status = h("div"), log = h("div", { class: "turns" }), place = h("span");
  let found = first, timer = null, sending = null, waiting = 0, number_of_looks = 0, drawn = null;
  let question = null, asked_for = null, starting = null; // what the page asks before an engine starts, and the step of each

  async function look() {
    clearTimeout(timer);
    const mine = ++number_of_looks;
    const answer = await ofRun(run, "chat");
    if (mine !== number_of_looks) return; // a later look has begun, and knows more
    found = answer;
    if (found.engine?.step === starting) starting = null;
    show();
  }

  function show() {
    if (context.signal.aborted) return;
    const places = [...(found.live ? [["live", "the run's engines, newest loaded version"]] : []), ...(found.weights.length ? [["started", "weights of a step"]] : [])];
    if (!places.some(([name]) => name === settings.place)) settings.place = places[0]?.[0];
    const next = JSON.stringify([found, settings.place, settings.step, question, asked_for, starting]);
    send.disabled = !isReady();
    if (next === drawn) return; // a button that is pressed at this moment stays where it is
    drawn = next;
    fill(place, places.length ? select("talk to ", places, settings.place, (value) => { settings.place = value; show(); }) : message(`${run} does not go on and has no weights that an engine can load.`),
      settings.place === "started" ? [" ", select("step ", found.weights.map((step) => [String(step), String(step)]), String(settings.step), (value) => { settings.step = Number(value); show(); })] : null);
    fill(status, settings.place === "started" ? engine() : settings.place === "live" ? message("Each message takes a place among the run's own requests; engines that share devices with the trainer answer when it is their turn.") : null);
  }

  function isReady() {
    return !sending && (settings.place === "live" || (found.engine?.state === "ready" && found.engine.step === settings.step));
  }

  // The engine of these weights: to be started, starting, ready, or ended.
  function engine() {
    if (starting === settings.step) return h("p", { class: "note", role: "status" }, h("progress"), ` asking for an engine on step ${starting}`);
    if (question && asked_for === settings.step) return h("div", { class: "ask" }, h("p", {}, question),
      h("button", { type: "button", onclick: () => start(true) }, "start it all the same"), " ",
      h("button", { type: "button", onclick: () => { question = null; show(); } }, "do not"));
    const own = found.engine?.step === settings.step ? found.engine : null;
    if (own?.state === "ready") return message(`ready: it took ${duration(own.seconds)} to start, and ends after 10 minutes without a message`);
    if (own?.state === "starting") {
      clearTimeout(timer);
      timer = setTimeout(() => look().catch(failed), POLL_MS);
      return h("p", { class: "note", role: "status" }, h("progress"), ` starting an engine on step ${own.step} for ${duration(own.seconds)}; weights of some GB take a minute`);
    }
    return [own ? message(`it ended: ${own.why}`, "error") : null, h("button", { type: "button", onclick: () => start(false) }, `start an engine on step ${settings.step}`)];
  }

  // The question stays until it is answered, whatever draws the view anew meanwhile.
  async function start(isSure) {
    const step = settings.step;
    question = null;
    starting = step;
    show();
    try {
      const answer = await post(`/api/run/${encodeURIComponent(run)}/chat/start`, { step, is_sure: isSure });
      question = (await answer.json()).ask;
      asked_for = step;
      if (question) starting = null;
      await look();
      starting = null;
      show();
    } catch (error) {
      starting = null;
      failed(error);
    }
  }

  function failed(error) {
    drawn = null;
    if (error.name !== "AbortError") fill(status, message(error.message, "error"), h("button", { type: "button", onclick: () => look().catch(failed) }, "look again"));
  }

  function draw() {
    fill(log, messages.map((each) => h("article", { class: `turn ${each.role}` }, h("h4", {}, each.role, each.about ? `, ${each.about}` : ""), h("div", { class: "text" }, each.content), each.error ? message(each.error, "error") : null)));
    log.lastChild?.scrollIntoView({ block: "nearest" });
  }

  async function say() {
    const text = field.value.trim();
    if (!text || !isReady()) return;
    field.value = "";
    messages.push({ role: "user", content: text });
    const reply = { role: "assistant", content: "", about: "" };
    const began = performance.now();
    sending = new AbortController();
    const asked = [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...messages.filter((each) => !each.error).map(({ role, content }) => ({ role, content }))];
    messages.push(reply);
    waiting = setInterval(() => { if (!reply.content) { reply.about = `no word for ${duration((performance.now() - began) / 1000)}`; draw(); } }, 500);
    draw();
    update();
    try {
      const answer = await post(`/api/run/${encodeURIComponent(run)}/chat`, { place: settings.place, messages: asked, temperature: Number(settings.temperature), max_tokens: Number(settings.max_tokens) }, sending.signal);
      await read(answer, reply, draw);
      reply.about = `${settings.place === "live" ? "the run's engines" : `step ${settings.step}`}, ${short(Number(((performance.now() - began) / 1000).toFixed(1)))} s${reply.why === "length" ? ", cut at the most tokens" : ""}`;
    } catch (error) {
      if (error.name === "AbortError") reply.about = "stopped";
      else reply.error = error.message;
    } finally {
      clearInterval(waiting);
      sending = null;
      draw();
      update();
    }
  }

  function update() {
    send.disabled = !isReady();
    stop.hidden = !sending;
  }

  const field = h("textarea", { "aria-label": "message", placeholder: "a message; Enter sends it, Shift and Enter begin a line", onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      say();
    }
  } });
  const send = h("button", { type: "button", onclick: say }, "send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => sending?.abort() }, "stop");
  const number = (name, label, step) => input(label, { type: "number", min: 0, step, value: settings[name] }, (value) => { settings[name] = value; context.remember({ [name]: value }); });
  fill(root, h("section", { class: "chat" }, h("div", { class: "controls" }, place, number("temperature", "temperature ", "0.1"), number("max_tokens", "most tokens ", "1"),
    input("system ", { type: "text", placeholder: "none" }, (value) => { settings.system = value; })), status, log, field,
    h("div", { class: "controls" }, send, stop, h("button", { type: "button", onclick: () => { messages.length = 0; draw(); } }, "begin again"))));
  draw();
  show();
  return { update: look, close: () => { clearTimeout(timer); clearInterval(waiting); sending?.abort(); } };
}

async function post(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (answer.ok) return answer;
  throw new Error((await answer.json().catch(() => ({}))).error || answer.statusText);
}

// The words of a stream of events, as they come.
async function read(answer, reply, draw) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(typeof event.error === "string" ? event.error : event.error.message || JSON.stringify(event.error));
      const choice = event.choices?.[0];
      reply.content += `${choice?.delta?.reasoning_content || ""}${choice?.delta?.content || ""}`;
      reply.why = choice?.finish_reason || reply.why;
    }
    draw();
  }
}
