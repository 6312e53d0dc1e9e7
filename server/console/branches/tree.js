// The tree of a conversation: every turn, what it began from, and how much of that the server still had. A turn is
// indented where its parent has several children; a line of turns without a fork stays straight.
import { SOURCES } from "../chat/answer.js";
import { countTokens, lineage, textOf, tokensTo } from "../chat/turns.js";
import { el } from "../parts/dom.js";
import { count, plural } from "../parts/units.js";

export class Tree {
  constructor(chat, box) {
    this.chat = chat;
    this.box = box;
    this.visible = false;
    this.focused = null; // id of the turn that has the focus
    for (const event of ["thread", "list"]) chat.addEventListener(event, () => this.soon());
    chat.addEventListener("progress", () => this.soon());
  }

  show(visible) {
    this.visible = visible;
    if (visible) this.draw();
  }

  soon() {
    if (!this.visible) return;
    this.waiting ??= setTimeout(() => { this.waiting = null; this.draw(); }, 100);
  }

  draw() {
    const { current } = this.chat;
    if (!current.turns.length) {
      this.box.replaceChildren(el("div.nothing", {}, el("h2", {}, "No branches yet"),
        el("p", {}, "Each turn of the conversation shows here, with what it inherited from the one before. Ask again, edit a message or choose a token of an answer, and a branch grows.")));
      return;
    }
    const held = this.box.contains(document.activeElement) ? document.activeElement.dataset.turn : null;
    const rows = laidOut(current);
    const path = new Set(this.chat.line);
    const most = Math.max(...rows.map(({ turn }) => costOf(turn).total), 1);
    const items = rows.map((row) => this.item(row, path, most));
    const tree = el("div.tree", { role: "tree", "aria-label": "Turns of the conversation" }, items);
    tree.addEventListener("keydown", (event) => this.key(event, items));
    this.box.replaceChildren(this.summary(current), tree);
    if (held) items.find((item) => item.dataset.turn === held)?.focus();
  }

  summary({ turns }) {
    const sums = turns.map(costOf).reduce((a, b) => ({ inherited: a.inherited + b.inherited, computed: a.computed + b.computed }), { inherited: 0, computed: 0 });
    const all = sums.inherited + sums.computed;
    const part = all ? Math.round((100 * sums.inherited) / all) : 0;
    const key = (kind, label) => el("span.key", {}, el(`i.${kind}`), label);
    return el("div.summary", {},
      el("p", {}, el("strong", {}, `${part} %`), ` of ${plural(all, "prompt token")} in ${plural(turns.length, "turn")} ${turns.length === 1 ? "was" : "were"} not computed again.`),
      el("p.keys", {}, key("inherited", "inherited"), key("computed", "computed"), key("written", "written by the model")));
  }

  item({ turn, level, last, rails }, path, most) {
    const chosen = turn === this.chat.chosen;
    const focusable = this.focused ? this.focused === turn.id : chosen;
    const label = labelOf(this.chat.current, turn);
    const answer = ((turn.prefix ?? "") + textOf(turn.pieces)).replace(/```\w*|\s+/g, " ").trim();
    const item = el("div.node", {
      role: "treeitem", "aria-level": level + 1, "aria-selected": String(chosen), tabIndex: focusable ? 0 : -1,
      title: "Shows the conversation up to this turn; the next message follows it",
      onclick: () => this.chat.choose(turn), onfocus: () => { this.focused = turn.id; },
    },
    el("div.rails", { "aria-hidden": "true" }, rails.map((kind) => el(`span.${kind}`))),
    el("div.card", {},
      el("p.what", {}, el("span.via", {}, label.kind), label.text),
      answer ? el("p.answer", {}, answer) : el("p.answer.none", {}, stateText(this.chat, turn)),
      bar(turn, most)));
    item.dataset.turn = turn.id;
    item.classList.toggle("on", path.has(turn));
    item.classList.toggle("chosen", chosen);
    item.classList.toggle("failed", turn.state === "failed");
    item.classList.toggle("last", last);
    item.classList.toggle("running", this.chat.running.has(turn));
    return item;
  }

  key(event, items) {
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to !== undefined) {
      items[at].tabIndex = -1;
      const next = items[Math.max(0, Math.min(items.length - 1, to))];
      next.tabIndex = 0;
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") items[at]?.click();
    else return;
    event.preventDefault();
  }
}

// Rows from top to bottom. `rails` say what to draw left of a row: a "line" that passes, an "arm" to it, or "gap".
function laidOut(conversation) {
  const below = new Map();
  for (const turn of conversation.turns) below.set(turn.parent, [...(below.get(turn.parent) ?? []), turn]);
  const rows = [];
  const walk = (turn, level, rails, last) => {
    const forked = rails.length > 0 && rails.at(-1) !== "straight";
    rows.push({ turn, level, last, rails: rails.map((kind, i) => (i === rails.length - 1 && forked ? (last ? "arm.end" : "arm") : kind)).filter((kind) => kind !== "straight") });
    const onward = rails.map((kind, i) => (i === rails.length - 1 && forked ? (last ? "gap" : "line") : kind));
    const next = below.get(turn.id) ?? [];
    const stays = next.length === 1;
    next.forEach((child, i) => {
      if (stays) walk(child, level, [...onward, "straight"], true);
      else walk(child, level + 1, [...onward.filter((kind) => kind !== "straight"), "fork"], i === next.length - 1);
    });
  };
  const roots = below.get(null) ?? [];
  roots.forEach((root, i) => walk(root, 0, roots.length > 1 ? ["fork"] : [], i === roots.length - 1));
  return rows;
}

// Tokens of a turn: its prompt, of which some were inherited, and what the model wrote.
export function costOf(turn) {
  const written = countTokens(turn.pieces);
  const told = turn.inheritance;
  const inherited = told ? told.inherited_tokens : turn.usage?.cached ?? 0;
  const computed = told ? told.computed_tokens : Math.max(0, turn.promptTokens - inherited);
  return { inherited, computed, written, total: inherited + computed + written, source: told?.source ?? (inherited ? "prefix_cache" : null) };
}

function bar(turn, most) {
  const cost = costOf(turn);
  const segments = ["inherited", "computed", "written"].map((kind) => {
    const segment = el(`span.${kind}`);
    segment.style.setProperty("width", `${(100 * cost[kind]) / most}%`);
    return segment;
  });
  const from = cost.source && cost.inherited ? ` from ${cost.source.replace("_", " ")}` : "";
  const words = `${count(cost.inherited)} inherited${from} · ${count(cost.computed)} computed · ${count(cost.written)} written`;
  return el("div.cost", { title: SOURCES[cost.source] ?? "" }, el("div.bar", { "aria-hidden": "true" }, segments), el("p", {}, words));
}

function labelOf(conversation, turn) {
  const said = turn.given.map((message) => message.content).join(" ").replace(/\s+/g, " ") || turn.file?.name || "";
  const line = lineage(conversation, turn);
  const parent = line.at(-2);
  const after = parent && turn.cut !== null ? `after “${lastWords(parent, turn.cut)}”, token ${count(tokensTo(parent, turn.cut))}` : "";
  switch (turn.via) {
    case "again": return { kind: "Asked again", text: said };
    case "edit": return { kind: "Edited", text: said };
    case "continue": return { kind: "Continued", text: "where the answer was cut" };
    case "token": return { kind: `“${(turn.prefix ?? "").trim()}” instead`, text: after };
    case "branch": return { kind: "Branch", text: said ? `${after}: ${said}` : after };
    case "tool": return { kind: "Tool result", text: said };
    default: return { kind: "You", text: said };
  }
}

// Whole words at the end of the first `cut` pieces of an answer.
function lastWords(turn, cut) {
  const text = turn.pieces.slice(0, cut).map((piece) => piece.text).join("").replace(/\s+/g, " ").trim();
  return text.length > 30 ? `…${text.slice(-30).replace(/^\S*\s/, "")}` : text;
}

function stateText(chat, turn) {
  if (chat.running.has(turn)) return "The model is answering …";
  if (turn.state === "failed") return `Failed: ${turn.failure?.message ?? ""}`;
  return turn.calls.length ? `Calls ${turn.calls.map((call) => call.name).join(", ")}` : "No answer";
}
