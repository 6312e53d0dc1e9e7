// The console: wires the page, and asks the server once a second how it stands.
import { Chat } from "./chat.js";
import { BlockMap, Plot, quantiles, sinceLast } from "./charts.js";

const byId = (id) => document.getElementById(id);
const key = byId("key");
key.value = sessionStorage.getItem("key") ?? "";

function headers() {
  return key.value ? { Authorization: `Bearer ${key.value}` } : {};
}

new Chat(headers);

const rates = new Plot(byId("rates"), ["generated", "prompt", "inherited"]);
const latencies = new Plot(byId("latencies"), ["first p50", "first p99", "between p50", "between p99"]);
const blocks = new BlockMap(byId("blocks"));
let last = null;

function showState(text, kind) {
  byId("state").textContent = text;
  byId("state").className = kind;
}

function fill(table, rows) {
  const body = table.tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const column = document.createElement("td");
      column.textContent = cell;
      column.title = cell;
      row.append(column);
    }
    return row;
  }));
}

function show(state) {
  byId("model").textContent = state.model;
  showState(state.state, state.state === "ready" ? "ready" : "failed");
  if (last !== null && state.time > last.time && state.figures.generation_tokens >= last.figures.generation_tokens) {
    const seconds = state.time - last.time;
    const rate = (name) => (state.figures[name] - last.figures[name]) / seconds;
    rates.add(["generation_tokens", "prompt_tokens", "inherited_tokens"].map(rate));
    const times = ["first_token", "inter_token"].map((name) => sinceLast(state.figures[name], last.figures[name]));
    latencies.add(times.flatMap((histogram) => quantiles(histogram, [0.5, 0.99])).map((s) => s && s * 1000));
  }
  last = state;
  blocks.draw(state.blocks, state.host_blocks);
  const used = (field) => `${field.used} of ${field.total}`;
  byId("block-counts").textContent =
    `of ${state.block_size} tokens: ${used(state.blocks)} in use, on the host ${used(state.host_blocks)}`;
  byId("request-counts").textContent = `${state.running} sequences run, ${state.waiting} wait`;
  fill(byId("requests"), state.requests.map((r) => [
    r.name ?? r.id, r.tenant, r.status, r.seconds.toFixed(1), r.prompt_tokens,
    `${r.generated_tokens} / ${r.max_tokens * r.sequences}`, r.blocks,
  ]));
  fill(byId("errors"), state.errors.map((e) => [
    new Date(e.at * 1000).toLocaleTimeString(), e.status, e.code, e.message,
  ]));
}

async function watch() {
  try {
    const answer = await fetch("/console/state", { headers: headers() });
    const body = await answer.json();
    if (answer.ok) show(body);
    else showState(body.error.message, "failed");
  } catch {
    showState("the server does not answer", "failed");
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

key.addEventListener("change", () => sessionStorage.setItem("key", key.value));
watch();
