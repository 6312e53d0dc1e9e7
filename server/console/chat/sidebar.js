// The list of conversations, by when they were last changed.
import { byId, el, toast } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { openMenu } from "../parts/menu.js";
import { asMarkdown } from "./request.js";
import { download, exported, imported } from "./transfer.js";
import { find, titleOf } from "./turns.js";

const DAY = 86_400_000;

export class Sidebar {
  constructor(chat, onopen) {
    this.chat = chat;
    this.onopen = onopen;
    byId("new-chat").addEventListener("click", () => { chat.fresh(); onopen(); });
    byId("search").addEventListener("input", () => this.draw());
    byId("export-all").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", ({ target }) => { this.take(target.files[0]); target.value = ""; });
    for (const event of ["list", "thread"]) chat.addEventListener(event, () => this.draw());
  }

  draw() {
    const wanted = byId("search").value.trim().toLowerCase();
    const found = this.chat.conversations.filter((each) => !wanted || matches(each, wanted));
    const groups = new Map();
    for (const conversation of found) {
      const name = when(conversation.changed);
      groups.set(name, [...(groups.get(name) ?? []), conversation]);
    }
    const lists = [...groups].map(([name, each]) => el("section", { "aria-label": name }, el("h2", {}, name), el("ul", {}, each.map((one) => this.entry(one)))));
    const nothing = el("p.help", {}, wanted ? "No conversation has these words." : "Conversations are kept in this browser. They will show here.");
    byId("conversations").replaceChildren(...(lists.length ? lists : [nothing]));
    byId("title").textContent = titleOf(this.chat.current);
    document.title = this.chat.current.turns.length ? `${titleOf(this.chat.current)} · Bequest` : "Bequest";
  }

  entry(conversation) {
    const here = conversation === this.chat.current;
    const busy = conversation.turns.some((turn) => this.chat.running.has(turn));
    const open = el("button.open", { type: "button", "aria-current": here ? "true" : null, onclick: () => { this.chat.open(conversation); this.onopen(); } },
      titleOf(conversation), busy ? el("span.dot", { title: "answering" }) : null);
    const more = el("button.icon", { type: "button", "aria-label": `More about ${titleOf(conversation)}`, "aria-haspopup": "menu" }, icon("more"));
    more.addEventListener("click", () => openMenu(more, [
      { label: "Rename", run: () => this.rename(conversation) },
      { label: "Export as JSON", run: () => download(`${fileName(conversation)}.json`, exported([conversation])) },
      { label: "Export as Markdown", run: () => this.exportText(conversation) },
      { label: "Delete", danger: true, run: () => this.remove(conversation) },
    ]));
    return el("li", {}, open, more);
  }

  rename(conversation) {
    const item = [...byId("conversations").querySelectorAll(".open")].find((each) => each.textContent.startsWith(titleOf(conversation)));
    const field = el("input", { value: titleOf(conversation), "aria-label": "Name of the conversation" });
    const done = (keep) => { field.onblur = null; if (keep) this.chat.rename(conversation, field.value); else this.draw(); };
    field.onblur = () => done(true);
    field.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === "Escape") { event.stopPropagation(); done(event.key === "Enter"); } });
    item.replaceWith(field);
    field.select();
  }

  async remove(conversation) {
    const copy = structuredClone(conversation);
    await this.chat.remove(conversation);
    toast(`Deleted “${titleOf(copy)}”.`, { label: "Undo", run: () => this.chat.add([copy]) });
  }

  exportText(conversation) {
    download(`${fileName(conversation)}.md`, asMarkdown(conversation, find(conversation, conversation.chosen)), "text/markdown");
  }

  exportAll() {
    if (!this.chat.conversations.length) return toast("There is nothing to export yet.");
    return download("conversations.json", exported(this.chat.conversations));
  }

  async take(file) {
    if (!file) return;
    try {
      const conversations = imported(await file.text());
      await this.chat.add(conversations);
      if (conversations.length) this.chat.open(conversations[0]);
      toast(`Imported ${conversations.length} conversation${conversations.length === 1 ? "" : "s"}.`);
    } catch (error) {
      toast(`Nothing was imported. ${error.message}`);
    }
  }
}

function matches(conversation, words) {
  if (titleOf(conversation).toLowerCase().includes(words)) return true;
  return conversation.turns.some((turn) => turn.given.some((message) => message.content.toLowerCase().includes(words)) ||
    turn.pieces.map((piece) => piece.text).join("").toLowerCase().includes(words));
}

function when(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "This week" : "Earlier";
}

const fileName = (conversation) => titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation";
