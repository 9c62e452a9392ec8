// Asks the search of the built site: node search.js SITE < questions; a line of JSON per question, places best first.
const fs = require("fs"), path = require("path"), vm = require("vm");
const site = process.argv[2], folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const answers = [];
let handle;
const context = vm.createContext({
  console, setTimeout, clearTimeout, URL, location: { href: "http://site/" }, importScripts: () => {},
  addEventListener: (kind, called) => (handle = called), postMessage: (message) => answers.push(message),
});
context.self = context;
vm.runInContext(fs.readFileSync(path.join(folder, worker), "utf8"), context);
const send = (type, data) => handle({ data: { type, data } });
(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await send(0, { ...index, options: { suggest: false } });
  for (const question of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
    answers.length = 0;
    await send(2, question);
    const found = answers.find((each) => each.type === 3);
    process.stdout.write(JSON.stringify(found.data.items.map((item) => item.map((each) => each.location))) + "\n");
  }
})();
