// Tables of what runs and of what went wrong.
import { el } from "../parts/dom.js";
import { ago, count, duration } from "../parts/units.js";

export class Table {
  constructor(title, columns, nothing) {
    this.columns = columns;
    this.nothing = el("p.help", {}, nothing);
    this.count = el("small");
    this.body = el("tbody");
    this.table = el("table", {}, el("thead", {}, el("tr", {}, columns.map(({ name, numeric }) => el(numeric ? "th.numeric" : "th", { scope: "col" }, name)))), this.body);
    this.scroller = el("div.table", { tabIndex: 0, role: "region", "aria-label": title }, this.table);
    this.element = el("section.listing", {}, el("h2", {}, title, this.count), this.scroller, this.nothing);
  }

  show(rows, told = "") {
    this.count.textContent = told ? ` ${told}` : "";
    this.scroller.hidden = rows.length === 0;
    this.nothing.hidden = rows.length > 0;
    this.body.replaceChildren(...rows.map((cells) => el("tr", {}, cells.map((cell, i) => el(this.columns[i].numeric ? "td.numeric" : "td", { title: String(cell) }, String(cell))))));
  }
}

export const requestTable = () => new Table("Requests", [
  { name: "Request" }, { name: "Tenant" }, { name: "State" }, { name: "For", numeric: true }, { name: "Prompt", numeric: true },
  { name: "Written", numeric: true }, { name: "Blocks", numeric: true },
], "Nothing runs or waits.");

export const requestRow = (request) => [
  request.name ?? request.id, request.tenant, request.status, duration(request.seconds), count(request.prompt_tokens),
  `${count(request.generated_tokens)} of ${count(request.max_tokens * Math.max(1, request.sequences))}`, count(request.blocks),
];

export const errorTable = () => new Table("Last errors", [{ name: "When" }, { name: "Status" }, { name: "Code" }, { name: "Message" }], "No request has failed.");

export const errorRow = (error) => [ago(error.at * 1000), error.status, error.code, error.message];
