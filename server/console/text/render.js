// Markdown on the page. Blocks that have not changed since the last time keep their elements, so that an answer can be
// drawn again with every token.
import { el } from "../parts/dom.js";
import { parseBlocks } from "./blocks.js";
import { codeBlock } from "./code.js";
import { parseInline } from "./inline.js";

const drawn = new WeakMap(); // container → what each of its blocks was drawn from

export function renderMarkdown(container, source) {
  const blocks = parseBlocks(source);
  const keys = blocks.map((block) => JSON.stringify(block));
  const known = drawn.get(container) ?? [];
  const before = known.length === container.childNodes.length ? known : []; // else something else stood there
  let same = 0;
  while (same < keys.length && same < before.length && keys[same] === before[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(blockElement));
  drawn.set(container, keys);
}

function blockElement(block) {
  switch (block.type) {
    case "heading": return el(`h${Math.min(block.level + 1, 6)}`, {}, inline(block.text));
    case "rule": return el("hr");
    case "code": return codeBlock(block);
    case "quote": return el("blockquote", {}, block.blocks.map(blockElement));
    case "list": return list(block);
    case "table": return table(block);
    default: return el("p", {}, inline(block.text));
  }
}

function list(block) {
  const tight = block.items.every((item) => item.blocks.length <= 1 || item.blocks[1].type === "list");
  const items = block.items.map((item) => {
    const box = item.done === null ? null : el("input", { type: "checkbox", checked: item.done, disabled: true, "aria-label": item.done ? "done" : "to do" });
    const inside = item.blocks.map((child, i) => (tight && i === 0 && child.type === "paragraph" ? inline(child.text) : blockElement(child)));
    return el(item.done === null ? "li" : "li.task", {}, box, inside.flat());
  });
  return el(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: block.start } : {}, items);
}

function table({ align, head, rows }) {
  const cell = (tag, text, column) => el(`${tag}.${align[column] ?? "left"}`, {}, inline(text));
  return el("div.table", { tabIndex: 0, role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((text, i) => cell("th", text, i)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text, i) => cell("td", text, i)))))));
}

function inline(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(node) {
  switch (node.type) {
    case "text": return document.createTextNode(node.text);
    case "code": return el("code", {}, node.text);
    case "break": return el("br");
    case "link": return el("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }, node.children.map(inlineNode));
    default: return el(node.type, {}, node.children.map(inlineNode));
  }
}
