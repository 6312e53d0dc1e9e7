// Where messages are written: the field, what is attached, and a line that says what sending will do.
import { byId, el, say, toast } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { bytes, plural } from "../parts/units.js";
import { tokensTo } from "./turns.js";

const DRAFT = "bequest.draft";

export class Composer {
  constructor(chat) {
    this.chat = chat;
    this.field = byId("text");
    this.file = null;
    this.model = { name: "", takes: ["text"] };
    this.buttons();
    this.field.value = sessionStorage.getItem(DRAFT) ?? "";
    this.field.addEventListener("input", () => this.written());
    this.field.addEventListener("keydown", (event) => this.key(event));
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    for (const event of ["thread", "settings"]) chat.addEventListener(event, () => this.draw());
    chat.addEventListener("began", () => { this.draw(); say("The model is answering"); });
    chat.addEventListener("ended", ({ detail: turn }) => { this.draw(); say(ending(turn)); });
    this.acceptDrops(byId("main"));
    this.written();
  }

  buttons() {
    byId("send").append(icon("send"));
    byId("stop").append(icon("stop"));
    byId("attach").append(icon("attach"));
    byId("stop").addEventListener("click", () => this.chat.stop());
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", ({ target }) => { this.attach(target.files[0]); target.value = ""; });
  }

  // What the model takes: "text", "audio"; "image" will come to the same place.
  setModel(model) {
    this.model = model;
    const hears = model.takes.includes("audio");
    byId("attach").hidden = !hears;
    byId("attach-file").accept = hears ? "audio/*" : "";
    this.draw();
  }

  acceptDrops(area) {
    area.addEventListener("dragover", (event) => { if (this.model.takes.includes("audio")) event.preventDefault(); });
    area.addEventListener("drop", (event) => {
      if (!this.model.takes.includes("audio")) return;
      event.preventDefault();
      this.attach(event.dataTransfer.files[0]);
    });
  }

  attach(file) {
    if (!file) return;
    this.file = file;
    this.draw();
    this.field.focus();
  }

  suggest(text) {
    this.field.value = text;
    this.written();
    this.field.focus();
  }

  written() {
    sessionStorage.setItem(DRAFT, this.field.value);
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, 240)}px`;
    byId("send").disabled = !this.ready();
  }

  ready() {
    return Boolean(this.field.value.trim() || this.file) && this.chat.busyTurn === null;
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === "Escape" && this.chat.place) {
      event.stopPropagation();
      this.chat.moveTo(null);
    } else if (event.key === "ArrowUp" && !this.field.value) {
      const buttons = document.querySelectorAll('.question button[aria-label="Edit the message"]');
      [...buttons].at(-1)?.click();
      if (buttons.length) event.preventDefault();
    }
  }

  send() {
    if (!this.ready()) return;
    if (this.file === null && !this.model.takes.includes("text")) {
      toast("This model takes recordings: attach one.");
      return;
    }
    const file = this.file && { blob: this.file, model: this.model.name };
    const text = this.field.value.trim();
    this.field.value = "";
    this.file = null;
    this.written();
    this.chat.send(text, file);
  }

  draw() {
    const busy = this.chat.busyTurn !== null;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("send").disabled = !this.ready();
    this.drawPlace();
    this.drawFile();
    byId("hint").textContent = this.hint();
    const hears = !this.model.takes.includes("text");
    this.field.placeholder = hears ? "Words that the recording may hold (optional)" : "Ask anything";
  }

  hint() {
    const { chat } = this;
    if (chat.busyTurn) return "Esc stops the answer.";
    if (chat.place) return "";
    const parent = chat.chosen;
    if (!parent?.answerId || parent.file) return "Enter sends, Shift+Enter makes a new line.";
    const known = tokensTo(parent, parent.pieces.length);
    return `Follows the last answer: ${plural(known, "token")} can be inherited.`;
  }

  drawPlace() {
    const box = byId("place");
    const { place } = this.chat;
    box.hidden = place === null;
    if (place === null) return;
    const tail = place.turn.pieces.slice(0, place.cut).map((piece) => piece.text).join("").trim().slice(-40).replace(/^\S*\s/, "");
    box.replaceChildren(el("span", {}, `Your message follows “…${tail}”: ${plural(tokensTo(place.turn, place.cut), "token")} are kept, the rest of that answer stays on its own branch.`),
      el("button.icon", { type: "button", "aria-label": "Reply at the end instead", title: "Reply at the end instead", onclick: () => this.chat.moveTo(null) }, icon("close")));
  }

  drawFile() {
    const box = byId("files");
    box.hidden = this.file === null;
    if (this.file === null) return;
    box.replaceChildren(el("span.chip", {}, `${this.file.name} · ${bytes(this.file.size)}`,
      el("button.icon", { type: "button", "aria-label": "Remove the recording", onclick: () => { this.file = null; this.draw(); } }, icon("close"))));
  }
}

function ending(turn) {
  if (turn.state === "failed") return `The answer failed: ${turn.failure.message}`;
  if (turn.state === "stopped") return "The answer was stopped";
  return turn.finish === "length" ? "The answer was cut at its longest length" : "The answer is complete";
}
