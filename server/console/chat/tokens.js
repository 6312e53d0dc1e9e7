// The tokens of an answer, to branch from. Each is a choice in a list that arrow keys walk through; a line says what a
// choice will do before it does it. The likeliest other tokens at a place are asked of the server, for which it
// computes one token.
import { byId, el, say } from "../parts/dom.js";
import { count, plural } from "../parts/units.js";
import { tokensTo } from "./turns.js";

export class TokenView {
  constructor(chat, container, onclose) {
    this.chat = chat;
    this.container = container;
    this.onclose = onclose;
    this.chosen = 0; // the token that has the focus
    this.asking = null;
    this.list = el("div.tokens", { role: "listbox", "aria-label": "Tokens of the answer", "aria-orientation": "horizontal" });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.line = el("p.help");
    this.card = el("div.token-card", { hidden: true, role: "group", "aria-label": "What to do at this token" });
  }

  draw(exchange) {
    // Without those that show nothing: the end of the answer, or a part of a character.
    const places = exchange.parts.flatMap(({ turn, pieces }) => pieces.map((piece, index) => ({ turn, piece, index }))).filter(({ piece }) => piece.text);
    const key = places.map(({ turn, index }) => `${turn.id}${index}`).join();
    if (key === this.drawnKey && this.container.contains(this.list)) return;
    this.drawnKey = key;
    this.places = places;
    this.chosen = Math.min(this.chosen, Math.max(0, places.length - 1));
    this.list.replaceChildren(...places.map((place, i) => this.token(place, i)));
    this.container.classList.add("as-tokens");
    this.container.replaceChildren(el("div.token-bar", {}, this.line, el("button.quiet", { type: "button", onclick: () => this.close() }, "Done")), this.list, this.card);
    this.explain(null);
  }

  token({ turn, piece }, i) {
    return el(`span.token${piece.kind === "thought" ? ".thought" : ""}`, {
      role: "option", tabIndex: i === this.chosen ? 0 : -1, "aria-selected": "false", id: `token-${turn.id}-${i}`,
      onclick: () => this.pick(i), onmouseenter: () => this.explain(i), onmouseleave: () => this.explain(this.picked ?? null),
      onfocus: () => this.explain(i),
    }, piece.text);
  }

  kept(i) {
    const { turn, index } = this.places[i];
    return tokensTo(turn, index + 1);
  }

  explain(i) {
    if (i === null) this.line.textContent = "Choose a token: the answer is kept up to it, and goes on another way.";
    else this.line.textContent = `Keeps ${plural(this.kept(i), "token")} in the cache, up to “${this.places[i].piece.text.trim() || "space"}”. Nothing of it is computed again.`;
  }

  focus() {
    this.list.children[this.chosen]?.focus();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (step !== undefined) this.walk(step);
    else if (event.key === "Enter" || event.key === " ") this.pick(this.chosen, true);
    else if (event.key === "Escape") this.close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  walk(step) {
    const tokens = this.list.children;
    tokens[this.chosen].tabIndex = -1;
    this.chosen = Math.max(0, Math.min(tokens.length - 1, this.chosen + step));
    tokens[this.chosen].tabIndex = 0;
    tokens[this.chosen].focus();
  }

  pick(i, byKey = false) {
    if (this.chat.busyTurn) return;
    for (const token of this.list.children) token.setAttribute("aria-selected", "false");
    this.list.children[i].setAttribute("aria-selected", "true");
    this.chosen = this.picked = i;
    this.explain(i);
    const { turn, index, piece } = this.places[i];
    const shown = piece.text.trim() || "this token";
    const onward = el("button.primary", { type: "button", title: "A new branch: the rest is sampled again", onclick: () => this.chat.branch(turn, index + 1) }, `Go on after “${shown}”`);
    const reply = el("button", { type: "button", title: "The answer ends here, and your next message follows it", onclick: () => this.reply(turn, index + 1) }, "Reply at this point");
    const others = el("div.others", {}, el("p.help", {}, "Looking at what else could stand here …"));
    this.card.replaceChildren(el("p", {}, `Token ${count(this.kept(i))} of the sequence`), el("div.row", {}, onward, reply), others);
    this.card.hidden = false;
    if (byKey) onward.focus();
    this.ask(turn, index, others);
  }

  reply(turn, cut) {
    this.chat.moveTo({ turn, cut });
    byId("text").focus();
  }

  async ask(turn, index, box) {
    this.asking?.abort();
    this.asking = new AbortController();
    try {
      const found = await this.chat.running.alternatives(this.chat.current, turn, index, this.asking.signal);
      const buttons = found.map((other) => this.other(turn, index, other));
      box.replaceChildren(el("p.help", {}, "Or put another token in its place, and go on from there:"), el("div.row", {}, buttons));
      say(`${plural(found.length, "other token")} could stand here`);
    } catch (error) {
      if (error.name !== "AbortError") box.replaceChildren(el("p.help", {}, `Other tokens at this place cannot be shown: ${error.message}`));
    }
  }

  other(turn, index, other) {
    const percent = other.probability < 0.001 ? "<0.1 %" : `${(other.probability * 100).toFixed(other.probability < 0.1 ? 1 : 0)} %`;
    const same = turn.pieces[index].tokens === 1 && turn.pieces[index].text === other.text;
    const bar = el("span.likely");
    bar.style.setProperty("--part", String(other.probability));
    return el(`button.other${same ? ".same" : ""}`, { type: "button", disabled: same, title: same ? "This is the one that stands here" : "A new branch with this token", onclick: () => this.chat.branchWith(turn, index, other) },
      bar, el("span", {}, other.text.replace(/\n/g, "⏎") || "␣"), el("small", {}, percent));
  }

  close() {
    this.asking?.abort();
    this.onclose();
  }
}
