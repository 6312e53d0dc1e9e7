// Where messages are written: the field, what is attached, and a line that says what sending will do.
import { byId, el, say, toast } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { bytes, plural } from "../parts/units.js";
import { tokensTo } from "./turns.js";

const DRAFT = "bequest.draft";
const PLACEHOLDERS = {
  chat: "Ask anything", complete: "Write the beginning of a text", rewrite: "A text to work on",
  hear: "Words that the recording may hold (optional)",
};
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Composer {
  constructor(chat) {
    this.chat = chat;
    this.field = byId("text");
    this.file = null;
    this.pictures = []; // [{ name, size, url }]
    this.model = { name: "", takes: ["text"] };
    this.buttons();
    this.field.value = sessionStorage.getItem(DRAFT) ?? "";
    this.field.addEventListener("input", () => this.written());
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("paste", (event) => this.pasted(event));
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
    byId("attach-file").addEventListener("change", ({ target }) => { this.attach([...target.files]); target.value = ""; });
  }

  get sees() {
    return this.model.takes.includes("image");
  }

  get takesFiles() {
    return this.sees || this.model.takes.includes("audio");
  }

  // What the model takes: "text", "audio", "image".
  setModel(model) {
    this.model = model;
    const what = this.sees ? "Attach a picture" : "Attach a recording";
    byId("attach").hidden = !this.takesFiles;
    byId("attach").setAttribute("aria-label", what);
    byId("attach").title = what;
    byId("attach-file").setAttribute("aria-label", this.sees ? "Picture" : "Recording");
    byId("attach-file").multiple = this.sees;
    byId("attach-file").accept = this.sees ? PICTURES.join() : "audio/*";
    this.draw();
  }

  acceptDrops(area) {
    area.addEventListener("dragover", (event) => { if (this.takesFiles) event.preventDefault(); });
    area.addEventListener("drop", (event) => {
      if (!this.takesFiles) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  pasted(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!this.sees || !files.length) return;
    event.preventDefault();
    this.attach(files);
  }

  async attach(files) {
    if (!files.length) return;
    if (this.sees) await this.addPictures(files);
    else [this.file] = files;
    this.written();
    this.draw();
    this.field.focus();
  }

  async addPictures(files) {
    for (const file of files) {
      if (!PICTURES.includes(file.type)) toast(`${file.name} is no picture that the model takes: PNG, JPEG, WebP or GIF.`);
      else this.pictures.push({ name: file.name, size: file.size, url: await asUrl(file) });
    }
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
    return Boolean(this.field.value.trim() || this.file || this.pictures.length) && this.chat.busyTurn === null;
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
    // To a model that goes on with a text, spaces at its ends are a part of it.
    const text = this.chat.server.way === "complete" ? this.field.value : this.field.value.trim();
    this.field.value = "";
    const pictures = this.pictures.map(({ url }) => url);
    this.file = null;
    this.pictures = [];
    this.written();
    this.chat.send(text, file, pictures);
  }

  draw() {
    const busy = this.chat.busyTurn !== null;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("send").disabled = !this.ready();
    this.drawPlace();
    this.drawFile();
    byId("hint").textContent = this.hint();
    this.field.placeholder = PLACEHOLDERS[this.chat.server.way];
  }

  hint() {
    const { chat } = this;
    if (chat.busyTurn) return "Esc stops the answer.";
    if (chat.place) return "";
    const parent = chat.chosen;
    if (!parent?.answerId || parent.file || chat.server.way === "rewrite") return "Enter sends, Shift+Enter makes a new line.";
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
    const removed = (change) => () => { change(); this.written(); this.draw(); };
    const chips = this.pictures.map((one) => chip(one, `Remove ${one.name}`, removed(() => { this.pictures = this.pictures.filter((other) => other !== one); })));
    if (this.file) chips.push(chip(this.file, "Remove the recording", removed(() => { this.file = null; })));
    box.hidden = !chips.length;
    box.replaceChildren(...chips);
  }
}

function chip({ name, size, url }, label, onclick) {
  const shown = url ? [el("img", { src: url, alt: "" })] : [];
  return el("span.chip", {}, ...shown, `${name} · ${bytes(size)}`, el("button.icon", { type: "button", "aria-label": label, onclick }, icon("close")));
}

const asUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve(reader.result));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(file);
});

function ending(turn) {
  if (turn.state === "failed") return `The answer failed: ${turn.failure.message}`;
  if (turn.state === "stopped") return "The answer was stopped";
  return turn.finish === "length" ? "The answer was cut at its longest length" : "The answer is complete";
}
