// What was given to the model: a message, a recording, or the results of tools. A message can be edited, which asks
// again beside it.
import { el } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { bytes } from "../parts/units.js";
import { copy } from "../text/code.js";

export class Question {
  constructor(chat, turn) {
    this.chat = chat;
    this.turn = turn;
    this.body = el("div.said");
    this.actions = el("div.actions");
    this.element = el("article.question", { "aria-label": "You" }, this.body, this.actions);
    this.editing = false;
    this.show();
  }

  draw() {
    for (const button of this.actions.querySelectorAll(".busy-off")) button.disabled = this.chat.busyTurn !== null;
  }

  show() {
    this.editing = false;
    const { given, file } = this.turn;
    const isTool = given[0]?.role === "tool";
    const texts = given.flatMap((message) => [
      ...(message.pictures ?? []).map((url, i) => el("img.picture", { src: url, alt: `Picture ${i + 1} of your message` })),
      ...(message.content ? [el("p", {}, message.content)] : []),
    ]);
    this.body.replaceChildren(...(file ? [this.recording(file)] : []), ...(isTool ? [el("p.label", {}, "Result of the tool")] : []), ...texts);
    this.element.classList.toggle("tool", isTool);
    const text = given.map((message) => message.content).join("\n");
    const copying = el("button.icon", { type: "button", title: "Copy the message", "aria-label": "Copy the message" }, icon("copy"));
    copying.addEventListener("click", () => copy(text, copying));
    const editing = el("button.icon.busy-off", { type: "button", title: "Edit: asks again beside this message, which stays in the tree", "aria-label": "Edit the message", onclick: () => this.edit(text) }, icon("edit"));
    this.actions.replaceChildren(...(isTool || file ? [copying] : [copying, editing]));
  }

  recording(file) {
    const player = el("audio", { controls: true, preload: "none", "aria-label": file.name });
    this.chat.store.files.get(file.id).then((blob) => { if (blob) player.src = URL.createObjectURL(blob); });
    return el("div.recording", {}, el("span", {}, `${file.name} · ${bytes(file.size)}`), player);
  }

  edit(text) {
    this.editing = true;
    const field = el("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Edited message" });
    const save = () => { const wanted = field.value.trim(); if (!wanted) return; this.show(); this.chat.edit(this.turn, wanted); };
    const form = el("form.editing", { onsubmit: (event) => { event.preventDefault(); save(); } }, field,
      el("p.help", {}, "Asks again beside the old message. The old one and its answers stay under Branches."),
      el("div.row", {}, el("button.primary", { type: "submit" }, "Ask this instead"), el("button", { type: "button", onclick: () => this.show() }, "Cancel")));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
    });
    this.body.replaceChildren(form);
    this.actions.replaceChildren();
    field.focus();
  }
}
