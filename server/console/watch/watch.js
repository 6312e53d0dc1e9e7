// How the server stands, asked for once a second while the panel is open, and every five seconds else.
import { call } from "../chat/wire.js";
import { el } from "../parts/dom.js";
import { count, plural } from "../parts/units.js";
import { BlockMap, tenantColour } from "./blockmap.js";
import { Plot, quantiles, sinceLast } from "./plot.js";
import { Replicas } from "./replicas.js";
import { errorRow, errorTable, groupRow, groupTable, requestRow, requestTable } from "./tables.js";

const QUICK = 1000, SLOW = 5000;

export class Watch {
  // `onmodel` is called with { names, takes, way, durable } when they change, `onstate` with a text and its kind.
  constructor(box, { onmodel, onstate }) {
    this.onmodel = onmodel;
    this.onstate = onstate;
    this.visible = false;
    this.last = null;
    this.model = "";
    this.make(box);
    new ResizeObserver(() => this.redraw()).observe(box);
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.soon(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  make(box) {
    this.rates = new Plot("Tokens", "per second", [{ name: "written", colour: "series-1" }, { name: "computed", colour: "series-2" }, { name: "inherited", colour: "series-3" }]);
    this.first = new Plot("To the first token", "milliseconds", [{ name: "median", colour: "series-1" }, { name: "99th percentile", colour: "series-4" }]);
    this.between = new Plot("Between tokens", "milliseconds", [{ name: "median", colour: "series-1" }, { name: "99th percentile", colour: "series-4" }]);
    this.drafts = new Plot("Drafted tokens that were right", "percent", [{ name: "accepted", colour: "series-3" }]);
    this.drafts.element.hidden = true;
    const point = (tenant) => { this.device.light(tenant); this.host.light(tenant); };
    this.device = new BlockMap("Cache on the device", point);
    this.host = new BlockMap("Cache in host memory", point);
    this.point = point;
    this.tenants = el("div.tenants", { role: "group", "aria-label": "Tenants" });
    this.facts = el("dl.facts");
    this.note = el("p.help.scope", { hidden: true });
    this.replicas = new Replicas();
    this.groups = groupTable();
    this.requests = requestTable();
    this.errors = errorTable();
    this.own = [this.rates, this.first, this.between].map((plot) => plot.element);
    box.append(this.note, this.replicas.element, this.facts, el("section.maps", {}, this.device.element, this.tenants, this.host.element), this.groups.element,
      el("section.plots", {}, ...this.own, this.drafts.element), this.requests.element, this.errors.element);
  }

  start() {
    this.ask();
  }

  show(visible) {
    this.visible = visible;
    if (visible) this.soon();
  }

  soon() {
    clearTimeout(this.timer);
    this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    try {
      const state = await (await call("/console/state")).json();
      this.take(state);
      this.onstate(state.state, state.state === "ready" ? "ready" : "failed");
      if (state.replica && state.scope === "all" && this.visible) await this.replicas.ask(state.replica);
    } catch (error) {
      this.last = null;
      this.onstate(error.message, "failed");
    }
    this.timer = setTimeout(() => this.ask(), this.visible && !document.hidden ? QUICK : SLOW);
  }

  take(state) {
    const { models: names, takes, way, durable } = state;
    const model = JSON.stringify([names, takes, way, durable]);
    if (model !== this.model) this.onmodel({ names, takes, way, durable });
    this.model = model;
    this.noteFigures(state);
    this.last = state;
    if (this.visible) this.redraw();
  }

  noteFigures(state) {
    const { figures } = state, before = this.last?.figures;
    if (!figures || !before || state.time <= this.last.time || figures.generation_tokens < before.generation_tokens) return;
    const seconds = state.time - this.last.time;
    const gained = (name) => figures[name] - before[name];
    this.rates.add(["generation_tokens", "prompt_tokens", "inherited_tokens"].map((name) => gained(name) / seconds));
    for (const [plot, name] of [[this.first, "first_token"], [this.between, "inter_token"]]) {
      plot.add(quantiles(sinceLast(figures[name], before[name]), [0.5, 0.99]).map((s) => s && s * 1000));
    }
    this.drafts.add([gained("draft_tokens") ? (100 * gained("accepted_tokens")) / gained("draft_tokens") : null]);
  }

  redraw() {
    const state = this.last;
    if (!state || !this.visible) return;
    const all = state.scope === "all";
    this.note.hidden = all;
    this.note.textContent = "Your key shows your own blocks and requests. An operator's key shows the whole server.";
    for (const element of [...this.own, this.errors.element]) element.hidden = !all;
    this.drafts.element.hidden = !all || !state.figures.draft_tokens;
    this.drawFacts(state);
    this.drawMaps(state);
    if (all) [this.rates, this.first, this.between, this.drafts].forEach((plot) => plot.draw());
    this.requests.show(state.requests.map(requestRow), `${count(state.running)} running, ${count(state.waiting)} waiting`);
    if (all) this.errors.show(state.errors.map(errorRow));
  }

  drawFacts({ retained, states, figures, max_model_len: longest }) {
    const facts = [["Longest context", `${count(longest)} tokens`]];
    for (const [grade, { records, tokens }] of Object.entries(retained ?? {})) {
      if (records) facts.push([GRADES[grade] ?? grade, `${plural(records, "answer")}, ${plural(tokens, "token")}`]);
    }
    if (states) facts.push(["Recurrent states", `${count(states.running)} running, ${count(states.leased)} leased, ${count(states.warm)} warm, of ${count(states.total)}`]);
    if (figures?.draft_tokens) facts.push(["Drafts", `${((100 * figures.accepted_tokens) / figures.draft_tokens).toFixed(0)} % of ${plural(figures.draft_tokens, "token")} right`]);
    this.facts.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  drawMaps({ blocks, host_blocks: host, block_size: size, tenants, groups }) {
    this.device.show(blocks, size, tenants, groups);
    this.host.element.hidden = host.total === 0;
    if (host.total) this.host.show(host, size, tenants, groups);
    this.groups.element.hidden = groups.length < 2; // else the map says it all
    this.groups.show(groups.map((group) => groupRow(group, tenants)));
    this.drawTenants(tenants);
  }

  drawTenants(tenants) {
    const key = tenants.join("\n");
    if (key === this.tenantsKey) return;
    this.tenantsKey = key;
    this.tenants.hidden = tenants.length < 2;
    this.tenants.replaceChildren(el("span", {}, "Blocks of"), ...tenants.map((name, i) => this.tenant(name, i)));
  }

  tenant(name, number) {
    const swatch = el("i");
    swatch.style.background = tenantColour(number);
    const light = () => this.point(number), rest = () => this.point(null);
    return el("button.chip", { type: "button", title: "Shows this tenant's blocks alone", onmouseenter: light, onmouseleave: rest, onfocus: light, onblur: rest }, swatch, name);
  }
}

const GRADES = { running: "Running", leased: "Leased", warm: "Warm", stored: "Stored", tokens: "Tokens alone" };
