// Markdown inside a line: code, emphasis, links. Gives a tree of plain objects; knows nothing of the page.
//
//   text   { type: "text", text }
//   code   { type: "code", text }
//   strong, em, del   { type, children }
//   link   { type: "link", href, children }
//   break  { type: "break" }
//
// Time is linear in the text: delimiters are matched by a stack, and every search that fails is remembered.

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const ADDRESS = /^(?:https?:\/\/|www\.)[^\s<>"'`]+/i;
const LONGEST_LABEL = 300;

export function parseInline(source, depth = 0) {
  return new InlineParser(source, depth).parse();
}

// What may be opened from an answer. A model can write anything, and a click must not run it.
export function safeAddress(address) {
  const text = address.trim();
  if (/^www\./i.test(text)) return `https:${"/".repeat(2)}${text}`;
  return /^(?:https?:\/\/|mailto:)/i.test(text) && !/[\u0000-\u0020]/.test(text) ? text : null;
}

class InlineParser {
  constructor(source, depth) {
    this.source = source;
    this.depth = depth;
    this.at = 0;
    this.plain = ""; // text that is not yet a node
    this.nodes = [];
    this.marks = []; // delimiters that may open: { mark, index in nodes }
    this.noClosing = new Set(); // runs of backticks that nothing closes
    this.noBracket = false; // there is no "](" any more
  }

  parse() {
    while (this.at < this.source.length) this.step(this.source[this.at]);
    this.flush();
    return merged(this.nodes);
  }

  step(character) {
    if (character === "\\" && PUNCTUATION.test(this.source[this.at + 1] ?? "")) return this.take(2, this.source[this.at + 1]);
    if (character === "`") return this.code();
    if (character === "\n") return this.lineEnd();
    if (character === "*" || character === "_" || character === "~") return this.delimiter(character);
    if (character === "!" && this.source[this.at + 1] === "[") return this.link(1);
    if (character === "[") return this.link(0);
    if (character === "<") return this.bracketed();
    if (/[hw]/i.test(character) && !/\w/.test(this.source[this.at - 1] ?? "")) return this.bare();
    return this.take(1, character);
  }

  take(length, text) {
    this.plain += text;
    this.at += length;
  }

  flush() {
    if (this.plain) this.nodes.push({ type: "text", text: this.plain });
    this.plain = "";
  }

  push(node, length) {
    this.flush();
    this.nodes.push(node);
    this.at += length;
  }

  code() {
    const run = /^`+/.exec(this.source.slice(this.at, this.at + 64))[0];
    const begin = this.at + run.length;
    let end = this.noClosing.has(run.length) ? -1 : this.source.indexOf(run, begin);
    while (end !== -1 && this.source[end + run.length] === "`") {
      let past = end;
      while (this.source[past] === "`") past++;
      end = this.source.indexOf(run, past);
    }
    if (end === -1) {
      this.noClosing.add(run.length);
      return this.take(run.length, run);
    }
    const text = this.source.slice(begin, end).replace(/\n/g, " ");
    const inner = /^ .*[^ ].* $|^ [^ ] $/.test(text) ? text.slice(1, -1) : text;
    return this.push({ type: "code", text: inner }, end + run.length - this.at);
  }

  lineEnd() {
    let end = this.plain.length;
    while (end > 0 && this.plain[end - 1] === " ") end--;
    const backslash = end === this.plain.length && this.plain[end - 1] === "\\";
    const hard = backslash || this.plain.length - end >= 2;
    this.plain = this.plain.slice(0, backslash ? end - 1 : end);
    this.push(hard ? { type: "break" } : { type: "text", text: "\n" }, 1);
  }

  // Of the whole run: ** and __ are strong, * and _ emphasis, ~~ struck out.
  delimiter(character) {
    let length = 1;
    while (length < 3 && this.source[this.at + length] === character) length++;
    const before = this.source[this.at - 1] ?? " ", after = this.source[this.at + length] ?? " ";
    const inWord = character === "_" && /\w/.test(before) && /\w/.test(after);
    const mark = character.repeat(length);
    if (inWord || (character === "~" && length !== 2)) return this.take(length, mark);
    if (!/\s/.test(before) && this.close(mark)) return undefined;
    if (/\s/.test(after) || this.marks.length > 64) return this.take(length, mark);
    this.flush();
    this.marks.push({ mark, index: this.nodes.length });
    return this.push({ type: "text", text: mark }, length);
  }

  // Everything since the last such mark becomes its content; marks in between stay text.
  close(mark) {
    const found = this.marks.findLastIndex((open) => open.mark === mark);
    if (found === -1) return false;
    this.flush();
    const { index } = this.marks[found];
    const children = merged(this.nodes.splice(index).slice(1));
    if (!children.length) {
      this.nodes.push({ type: "text", text: mark });
      return false;
    }
    this.marks.length = found;
    this.push(emphasised(mark, children), mark.length);
    return true;
  }

  // [label](address "title"), or an image, which is shown as a link: nothing is fetched for an answer. No link in a link.
  link(offset) {
    const begin = this.at + offset + 1;
    const middle = this.noBracket || this.depth > 0 ? -1 : this.labelEnd(begin);
    if (middle === -1) return this.take(offset + 1, this.source.slice(this.at, begin));
    const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')\n]*["')])?\s*\)/.exec(
      this.source.slice(middle + 1, middle + 2100),
    );
    const href = target && safeAddress(target[1]);
    if (!target) return this.take(offset + 1, this.source.slice(this.at, begin));
    const label = parseInline(this.source.slice(begin, middle), this.depth + 1);
    const length = middle + 1 + target[0].length - this.at;
    if (href === null) return this.push({ type: "text", text: this.source.slice(this.at, this.at + length) }, length);
    return this.push({ type: "link", href, children: label.length ? label : [{ type: "text", text: target[1] }] }, length);
  }

  labelEnd(begin) {
    let open = 1;
    const last = Math.min(this.source.length, begin + LONGEST_LABEL);
    for (let i = begin; i < last; i++) {
      if (this.source[i] === "\\") i++;
      else if (this.source[i] === "[") open++;
      else if (this.source[i] === "]" && --open === 0) return this.source[i + 1] === "(" ? i : -1;
    }
    if (this.source.indexOf("](", begin) === -1) this.noBracket = true;
    return -1;
  }

  // <https://…>; any other tag is text.
  bracketed() {
    const end = this.source.slice(this.at, this.at + 2100).indexOf(">");
    const inside = end === -1 ? "" : this.source.slice(this.at + 1, this.at + end);
    const href = safeAddress(inside);
    if (href === null) return this.take(1, "<");
    return this.push({ type: "link", href, children: [{ type: "text", text: inside }] }, end + 1);
  }

  bare() {
    const found = ADDRESS.exec(this.source.slice(this.at, this.at + 2100));
    if (!found) return this.take(1, this.source[this.at]);
    let text = found[0].replace(/[.,;:!?*_~]+$/, "");
    if (text.endsWith(")") && !text.includes("(")) text = text.slice(0, -1);
    const href = safeAddress(text);
    if (href === null) return this.take(text.length, text);
    return this.push({ type: "link", href, children: [{ type: "text", text }] }, text.length);
  }
}

function emphasised(mark, children) {
  if (mark === "~~") return { type: "del", children };
  if (mark.length === 1) return { type: "em", children };
  const strong = { type: "strong", children };
  return mark.length === 2 ? strong : { type: "em", children: [strong] };
}

function merged(nodes) {
  const kept = [];
  for (const node of nodes) {
    const last = kept.at(-1);
    if (node.type === "text" && last?.type === "text") kept[kept.length - 1] = { type: "text", text: last.text + node.text };
    else kept.push(node);
  }
  return kept;
}
