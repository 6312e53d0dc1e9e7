// How each of several servers stands, and all together, where one is a replica of a cluster.
import { call } from "../chat/wire.js";
import { el } from "../parts/dom.js";
import { count } from "../parts/units.js";
import { Table } from "./tables.js";

const COLUMNS = ["Running", "Waiting", "Leases", "Leased", "Tokens"].map((name) => ({ name, numeric: true }));

export class Replicas {
  constructor() {
    this.table = new Table("Replicas", [{ name: "Replica" }, { name: "State" }, ...COLUMNS], "There is none.");
    this.links = el("p.help");
    this.element = el("div", { hidden: true }, this.table.element, this.links);
    this.known = true; // until nobody answers: routers that others started have no one who knows all replicas
  }

  // `own` is the one whose page this is.
  async ask(own) {
    if (!this.known) return;
    try {
      this.show(await (await call("/cluster/state")).json(), own);
    } catch (error) {
      this.known = error.status !== 404;
    }
    this.element.hidden = !this.known;
  }

  show({ replicas, sum }, own) {
    const rows = Object.entries(replicas).map(([tag, one]) => row(tag, one.state, one));
    this.table.show([...rows, row("all", "", sum)]);
    const links = Object.keys(replicas).map((tag) => (tag === own ? el("b", {}, tag) : el("a", { href: `/?bequest-replica=${tag}` }, tag)));
    this.links.replaceChildren("This page is of ", ...links.flatMap((link) => [link, " "]));
  }
}

const row = (tag, state, one) => [
  tag, state, count(one.running), count(one.waiting), count(one.leases), `${(100 * one.leased_share).toFixed(0)} %`, count(one.generated_tokens),
];
