// An answer: thoughts folded, text, calls of tools, what went wrong, what it cost, and what can be done with it.
import { byId, el } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { count, duration, plural } from "../parts/units.js";
import { copy } from "../text/code.js";
import { renderMarkdown } from "../text/render.js";
import { callForm } from "./calls.js";
import { TokenView } from "./tokens.js";
import { countTokens, textOf, versions } from "./turns.js";

export class Answer {
  constructor(chat) {
    this.chat = chat;
    this.thoughts = el("details.thoughts", { hidden: true }, el("summary"), el("div.text"));
    this.text = el("div.text");
    this.calls = el("div.calls");
    this.fault = el("div.fault", { hidden: true, role: "alert" });
    this.cost = el("p.cost");
    this.actions = el("div.actions");
    this.next = el("div.next");
    this.element = el("article.answer", { "aria-label": "Answer" },
      this.thoughts, this.text, this.calls, this.fault, this.next, el("footer", {}, this.actions, this.cost));
    this.tokens = null; // the view of tokens, while it is open
    this.actionsKey = "";
  }

  get last() {
    return this.exchange.turns.at(-1);
  }

  // `isLast`: it is the end of the conversation.
  draw(exchange, isLast) {
    this.exchange = exchange;
    const running = this.chat.running.has(this.last);
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    this.drawThoughts(running);
    const shape = exchange.parts.map(({ turn, pieces }) => `${turn.id} ${pieces.length}`).join();
    if (shape !== this.shape) this.tokens = null; // a branch was taken: the text shows it
    this.shape = shape;
    if (this.tokens) this.tokens.draw(exchange);
    else this.drawText();
    this.drawCalls(isLast, running);
    this.drawFault();
    this.drawNext(isLast);
    this.drawActions(running);
    this.cost.replaceChildren(...costs(this.last, exchange));
  }

  written() {
    return this.exchange.parts.map(({ turn, pieces }) => (turn.prefix ?? "") + textOf(pieces)).join("");
  }

  drawText() {
    if (this.text.classList.contains("as-tokens")) this.text.replaceChildren();
    this.text.classList.remove("as-tokens");
    renderMarkdown(this.text, this.written());
  }

  drawThoughts(running) {
    const thought = this.exchange.parts.map(({ pieces }) => textOf(pieces, "thought")).join("");
    this.thoughts.hidden = !thought;
    if (!thought) return;
    const tokens = this.exchange.parts.reduce((sum, { pieces }) => sum + countTokens(pieces.filter((piece) => piece.kind === "thought")), 0);
    const still = running && !this.written();
    this.thoughts.firstChild.textContent = still ? `Thinking … ${plural(tokens, "token")}` : `Thought for ${plural(tokens, "token")}`;
    if (this.thoughts.open || still) renderMarkdown(this.thoughts.lastChild, thought);
    this.thoughts.ontoggle = () => renderMarkdown(this.thoughts.lastChild, thought);
  }

  drawCalls(isLast, running) {
    const { calls } = this.last;
    const key = JSON.stringify([calls, isLast, running]);
    if (key === this.callsKey) return;
    this.callsKey = key;
    this.calls.replaceChildren(...(calls.length ? [callForm(this.chat, this.last, isLast && !running)] : []));
  }

  drawFault() {
    const { state, failure } = this.last;
    this.fault.hidden = state !== "failed";
    if (state !== "failed" || this.shownFailure === failure) return;
    this.shownFailure = failure;
    const again = el("button.primary.busy-off", { type: "button", onclick: () => this.chat.retry(this.last) }, "Try again");
    const wait = failure.retryAfter ? ` The server asks to wait ${plural(failure.retryAfter, "second")}.` : "";
    this.fault.replaceChildren(el("div", {}, el("strong", {}, failureTitle(failure)), el("p", {}, failure.message + wait)), again);
  }

  // What an answer that was cut waits for.
  drawNext(isLast) {
    const end = isLast ? this.chat.openEnd(this.last) : null;
    if (end === this.shownEnd && this.last === this.shownLast) return;
    this.shownEnd = end;
    this.shownLast = this.last;
    if (end !== "continue") return this.next.replaceChildren();
    const why = this.last.finish === "length" ? "The answer was cut at its longest length." : "The answer stopped early.";
    const go = el("button.busy-off", { type: "button", title: "The answer goes on from its last token, with the cache it has", onclick: () => this.chat.goOn(this.last) }, icon("go"), "Continue");
    this.next.replaceChildren(el("span", {}, why), go);
    return undefined;
  }

  drawActions(running) {
    const { chat, exchange } = this;
    const found = versions(chat.current, exchange);
    const busy = chat.busyTurn !== null;
    const key = JSON.stringify([found.map((turn) => turn.id), this.last.id, running, this.last.state, this.tokens !== null]);
    if (key !== this.actionsKey) {
      this.actionsKey = key;
      this.actions.replaceChildren(...this.buttons(found, running));
    }
    for (const button of this.element.querySelectorAll(".busy-off")) button.disabled = busy;
  }

  buttons(found, running) {
    if (running) return [];
    const { chat } = this;
    const button = (name, label, title, run, kind = "button.icon.busy-off") => el(kind, { type: "button", title, "aria-label": label, onclick: run }, icon(name));
    const copying = button("copy", "Copy the answer", "Copy the answer", () => copy(this.written(), copying), "button.icon");
    const made = [copying, button("again", "Ask again", "Another answer to the same question, beside this one", () => chat.again(this.exchange.turns[0]))];
    if (this.last.answerId && !this.last.file) {
      made.push(button("reply", "Reply from here", "The next message follows this answer: a branch, if others follow it already", () => { chat.choose(this.last); byId("text").focus(); }));
      const open = button("tokens", "Branch at a token", "Shows the tokens of the answer; choose one to go on from there", () => this.toggleTokens());
      open.setAttribute("aria-pressed", String(this.tokens !== null));
      made.push(open);
    }
    return found.length > 1 ? [this.switcher(found), ...made] : made;
  }

  switcher(found) {
    const at = found.indexOf(this.last);
    const step = (by, name, label) => el("button.icon.busy-off", { type: "button", "aria-label": label, title: label, onclick: () => this.chat.chooseVersion(found[(at + by + found.length) % found.length]) }, icon(name));
    return el("span.versions", { role: "group", "aria-label": "Versions of this answer" }, step(-1, "left", "Previous version"), el("span", {}, `${at + 1} of ${found.length}`), step(1, "right", "Next version"));
  }

  toggleTokens() {
    if (this.tokens === null) {
      this.tokens = new TokenView(this.chat, this.text, () => { this.tokens = null; this.drawText(); this.drawActions(false); });
      this.tokens.draw(this.exchange);
      this.tokens.focus();
    } else {
      this.tokens.close();
    }
    this.drawActions(false);
  }
}

function failureTitle({ code, status }) {
  if (code === "unreachable") return "No connection";
  if (code === "cut_off") return "The answer broke off";
  if (status === 401) return "A key is needed";
  if (status === 429 || status === 503) return "The server is busy";
  return "This did not work";
}

// What an answer inherited and how fast it came.
function costs(turn, { parts }) {
  const tokens = countTokens(turn.pieces);
  const told = [];
  if (turn.inheritance) {
    const { inherited_tokens: inherited, computed_tokens: computed, source } = turn.inheritance;
    told.push(el("span.inherited", { title: `${SOURCES[source] ?? source}` }, `${count(inherited)} inherited`), ` · ${count(computed)} computed`);
  } else if (turn.promptTokens) told.push(`${plural(turn.promptTokens, "token")} of prompt`);
  if (tokens) told.push(`${told.length ? " · " : ""}${count(tokens)} ${parts.length > 1 ? "more" : "written"}`);
  if (turn.firstMs !== null && tokens) told.push(` · first after ${duration(turn.firstMs / 1000)}`);
  if (turn.ms && tokens > 1) told.push(` · ${(tokens / (turn.ms / 1000)).toFixed(1)} per second`);
  if (turn.retained) told.push(" · leased");
  return told;
}

export const SOURCES = {
  blocks: "The parent's blocks were shared; nothing was moved or computed again.",
  host: "Some of the parent's blocks came back from host memory.",
  prefix_cache: "The parent's own blocks were gone; equal ones were found in the prefix cache.",
  recompute: "The parent's tokens, or some of them, were computed again.",
  file: "The parent's blocks came from a file.",
  store: "The parent's blocks came from a store.",
};
