// The map of the cache: a square per block, coloured by what it is to the server. Pointing at a square, or at a tenant,
// shows whose blocks are whose.
import { el } from "../parts/dom.js";
import { count, plural } from "../parts/units.js";
import { colour, prepare } from "./plot.js";

// In the order of the server's digits.
export const KINDS = [
  { name: "free", help: "holds nothing that can be found again" },
  { name: "warm", help: "free to be taken, but what is in it can still be inherited" },
  { name: "running", help: "held by one sequence that runs" },
  { name: "shared", help: "held by several sequences at once" },
  { name: "leased", help: "kept for its tenant until the lease ends" },
  { name: "stored", help: "leased, and kept in files too, which outlive the server" },
];
const OWNERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"; // digits of tenants; "." is nobody
const LEFT = 44, TALLEST = 190;
const HINT = "Point at a square to see what it is and whose.";

// Hues far from each other for tenants that stand beside each other.
export const tenantColour = (number) => `hsl(${(number * 137 + 200) % 360} 65% 50%)`;

// What the layers of a group see.
export const sight = ({ kind, window }) => ({ full: "all tokens", window: `the last ${plural(window, "token")}`, state: "one state for all before" })[kind];

export class BlockMap {
  // `point(tenant)` is called with the number of the tenant that is pointed at, or null.
  constructor(title, point) {
    this.point = point;
    this.tenant = null;
    this.field = null;
    this.canvas = el("canvas.blocks", { role: "img" });
    this.caption = el("small");
    this.legend = el("div.legend");
    this.told = el("p.told", {}, HINT);
    this.element = el("figure.map", {}, el("figcaption", {}, el("span", {}, title), this.caption), this.canvas, this.legend, this.told);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.told.textContent = HINT; this.point(null); });
  }

  // field: { total, per_cell, cells, owners, groups, counts } as the server tells it; groups: of layers, by what they see.
  show(field, blockSize, tenants, groups) {
    this.field = field;
    this.groups = groups;
    this.tenants = tenants;
    const unit = field.per_cell === 1 ? "a square is a block" : `a square is ${field.per_cell} blocks`;
    this.caption.textContent = ` ${plural(field.total, "block")} of ${blockSize} tokens; ${unit}`;
    const counted = KINDS.filter(({ name }) => field.counts[name]).map(({ name }) => `${count(field.counts[name])} ${name}`);
    this.legend.replaceChildren(...KINDS.filter(({ name }) => name !== "stored" || field.counts[name]).map(({ name, help }) => el("span.key", { title: help }, el(`i.block-${name}`), `${name} `, el("b", {}, count(field.counts[name])))));
    this.canvas.setAttribute("aria-label", `Blocks: ${counted.join(", ")}`);
    this.draw();
  }

  light(tenant) {
    if (tenant === this.tenant) return;
    this.tenant = tenant;
    this.draw();
  }

  measure(width) {
    const cells = this.field.cells.length;
    const room = width - LEFT;
    const side = Math.max(3, Math.min(14, Math.floor(Math.sqrt((room * TALLEST) / Math.max(1, cells)))));
    const columns = Math.max(1, Math.floor(room / side));
    return { side, columns, rows: Math.ceil(cells / columns) };
  }

  draw() {
    if (!this.field || !this.canvas.clientWidth) return;
    const { cells, owners, per_cell: perCell } = this.field;
    const layout = this.layout = this.measure(this.canvas.clientWidth);
    const { pen } = prepare(this.canvas, Math.max(layout.side, layout.rows * layout.side) + 2);
    const { side, columns } = layout;
    const fills = KINDS.map(({ name }) => colour(`block-${name}`));
    const gap = side > 4 ? 1.5 : side > 3 ? 1 : 0;
    const pointed = this.tenant === null ? null : OWNERS[this.tenant];
    pen.strokeStyle = tenantColour(this.tenant);
    pen.lineWidth = 2;
    for (let i = 0; i < cells.length; i++) {
      const x = LEFT + (i % columns) * side, y = Math.floor(i / columns) * side;
      pen.globalAlpha = pointed === null || owners[i] === pointed ? 1 : 0.16;
      pen.fillStyle = fills[cells[i]];
      pen.fillRect(x, y, side - gap, side - gap);
      if (owners[i] === pointed && side > 5) pen.strokeRect(x + 1, y + 1, side - gap - 2, side - gap - 2);
    }
    pen.globalAlpha = 1;
    this.axis(pen, layout, perCell);
  }

  // Numbers of the blocks that rows begin with.
  axis(pen, { side, columns, rows }, perCell) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("dim");
    pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(22 / side));
    for (let row = 0; row < rows; row += every) pen.fillText(count(row * columns * perCell + 1), LEFT - 6, row * side + Math.max(9, side - 2));
  }

  hover(event) {
    const { side, columns } = this.layout ?? {};
    if (!side) return;
    const column = Math.floor((event.offsetX - LEFT) / side);
    const cell = Math.floor(event.offsetY / side) * columns + column;
    if (column < 0 || column >= columns || cell < 0 || cell >= this.field.cells.length) return;
    const { name, help } = KINDS[this.field.cells[cell]];
    const owner = OWNERS.indexOf(this.field.owners[cell]);
    const first = cell * this.field.per_cell + 1;
    const which = this.field.per_cell === 1 ? `Block ${count(first)}` : `Blocks ${count(first)} to ${count(Math.min(this.field.total, first + this.field.per_cell - 1))}, mostly`;
    const whose = owner === -1 ? "" : ` Of ${this.tenants[owner] ?? "other tenants"}.`;
    const group = this.groups.length > 1 ? this.groups[OWNERS.indexOf(this.field.groups[cell])] : undefined;
    const layers = group ? ` Of layers that see ${sight(group)}.` : "";
    this.told.textContent = `${which}: ${name}, ${help}.${layers}${whose}`;
    this.point(owner === -1 ? null : owner);
  }
}
