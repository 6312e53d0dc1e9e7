// Tables of what runs and of what went wrong.
import { el } from "../parts/dom.js";
import { ago, bytes, count, duration } from "../parts/units.js";
import { sight } from "./blockmap.js";

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

export const groupTable = () => new Table("What layers keep", [
  { name: "Layers see" }, { name: "Running", numeric: true }, { name: "Shared", numeric: true }, { name: "Leased", numeric: true }, { name: "Warm", numeric: true },
  { name: "In host memory", numeric: true }, { name: "Each", numeric: true }, { name: "Together", numeric: true }, { name: "Held by" },
], "Nothing is kept.");

export const groupRow = (group, tenants) => {
  const { device, host = {}, bytes_each: each } = group;
  const all = (counts) => Object.values(counts).reduce((sum, number) => sum + number, 0);
  const holders = (group.tenants ?? []).map((number, i) => number && `${tenants[i]} ${count(number)}`).filter(Boolean);
  return [
    sight(group), count(device.running ?? 0), count(device.shared ?? 0), count((device.leased ?? 0) + (device.stored ?? 0)), count(device.warm ?? 0),
    count(all(host)), bytes(each), bytes(each * (all(device) + all(host))), holders.join(", "),
  ];
};

export const errorTable = () => new Table("Last errors", [{ name: "When" }, { name: "Status" }, { name: "Code" }, { name: "Message" }], "No request has failed.");

export const errorRow = (error) => [ago(error.at * 1000), error.status, error.code, error.message];
