// The conversation as it is read: from the first question to the chosen answer. Elements are kept from drawing to
// drawing, so that a selection, a focus or an open fold survives the next token.
import { byId, el } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { Answer } from "./answer.js";
import { Question } from "./question.js";
import { exchanges } from "./turns.js";
import { welcome } from "./welcome.js";

export class Thread {
  constructor(chat, composer) {
    this.chat = chat;
    this.composer = composer;
    this.box = byId("thread");
    this.parts = new Map(); // key → Question or Answer
    this.follows = true; // whether the end is kept in sight
    this.down = el("button.icon.down", { type: "button", hidden: true, "aria-label": "Go to the end", title: "Go to the end", onclick: () => this.toEnd() }, icon("send"));
    this.box.after(this.down);
    this.box.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.box.addEventListener("wheel", (event) => { if (event.deltaY < 0) this.follows = false; }, { passive: true });
    chat.addEventListener("thread", () => this.draw());
    chat.addEventListener("progress", () => this.soon());
    chat.addEventListener("began", () => this.toEnd());
  }

  soon() {
    this.waiting ??= requestAnimationFrame(() => { this.waiting = null; this.draw(); });
  }

  draw() {
    const { chat } = this;
    if (chat.current !== this.shown) this.parts.clear();
    this.follows ||= chat.current !== this.shown;
    this.shown = chat.current;
    const found = exchanges(chat.line);
    if (!found.length) return this.box.replaceChildren(welcome((text) => this.composer.suggest(text), chat.server.way));
    const kept = new Map();
    const elements = found.flatMap((exchange, i) => this.exchange(exchange, i === found.length - 1, kept));
    this.parts = kept;
    const column = this.box.firstElementChild?.classList.contains("column") ? this.box.firstElementChild : el("div.column");
    if (this.box.firstElementChild !== column) this.box.replaceChildren(column);
    settle(column, elements);
    if (this.follows) this.box.scrollTop = this.box.scrollHeight;
    this.scrolled();
    return undefined;
  }

  exchange(exchange, last, kept) {
    const first = exchange.turns[0];
    const question = first.given.length || first.file ? this.part(`q${first.id}`, kept, () => new Question(this.chat, first)) : null;
    const answer = this.part(`a${first.id}`, kept, () => new Answer(this.chat));
    question?.draw();
    answer.draw(exchange, last);
    return [question?.element, answer.element].filter(Boolean);
  }

  part(key, kept, make) {
    const part = this.parts.get(key) ?? make();
    kept.set(key, part);
    return part;
  }

  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    const atEnd = scrollHeight - scrollTop - clientHeight < 60;
    if (atEnd) this.follows = true;
    else if (!this.chat.busyTurn) this.follows = false;
    this.down.hidden = atEnd;
  }

  toEnd() {
    this.follows = true;
    this.box.scrollTop = this.box.scrollHeight;
    this.scrolled();
  }
}

// The children in this order, with as little moving as there can be.
function settle(column, elements) {
  const wanted = new Set(elements);
  for (const child of [...column.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, i) => { if (column.children[i] !== element) column.insertBefore(element, column.children[i] ?? null); });
}
