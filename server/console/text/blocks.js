// Markdown as blocks: paragraphs, headings, lists, quotes, tables, code. Gives plain objects; knows nothing of the page.
//
//   { type: "paragraph", text }            { type: "heading", level, text }      { type: "rule" }
//   { type: "code", language, text, open } { type: "quote", blocks }             { type: "table", align, head, rows }
//   { type: "list", ordered, start, items: [{ blocks, done }] }                  done: null, true or false
//
// `open` is code whose fence is not closed yet, as in an answer that is still being written.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12; // lists in quotes in lists …

export function parseBlocks(source) {
  return new BlockParser(source.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0).parse();
}

class BlockParser {
  constructor(lines, depth) {
    this.lines = lines;
    this.depth = depth;
    this.at = 0;
    this.blocks = [];
  }

  parse() {
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      if (!line.trim()) this.at++;
      else this.blocks.push(this.block(line));
    }
    return this.blocks;
  }

  block(line) {
    if (FENCE.test(line)) return this.code(line);
    const heading = HEADING.exec(line);
    if (heading) {
      this.at++;
      return { type: "heading", level: heading[1].length, text: heading[2] ?? "" };
    }
    if (RULE.test(line)) {
      this.at++;
      return { type: "rule" };
    }
    if (this.depth < DEEPEST && QUOTE.test(line)) return this.quote();
    if (this.depth < DEEPEST && ITEM.test(line)) return this.list(line);
    if (this.isTable()) return this.table();
    return this.paragraph();
  }

  code(line) {
    const [, fence, language] = FENCE.exec(line);
    const indent = /^ */.exec(line)[0].length;
    const body = [];
    for (this.at++; this.at < this.lines.length; this.at++) {
      const text = this.lines[this.at];
      const trimmed = text.trim();
      if (trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length)) {
        this.at++;
        return { type: "code", language, text: body.join("\n"), open: false };
      }
      body.push(text.startsWith(" ".repeat(indent)) ? text.slice(indent) : text.trimStart());
    }
    return { type: "code", language, text: body.join("\n"), open: true };
  }

  quote() {
    const inside = [];
    while (this.at < this.lines.length && (QUOTE.test(this.lines[this.at]) || this.isLazy())) {
      inside.push(this.lines[this.at++].replace(QUOTE, ""));
    }
    return { type: "quote", blocks: new BlockParser(inside, this.depth + 1).parse() };
  }

  // A line of text right behind a quoted paragraph belongs to it.
  isLazy() {
    const line = this.lines[this.at], before = this.lines[this.at - 1] ?? "";
    return line.trim() !== "" && QUOTE.test(before) && before.replace(QUOTE, "").trim() !== "" && !this.begins(line);
  }

  list(line) {
    const [, , first] = ITEM.exec(line);
    const ordered = /\d/.test(first);
    const items = [];
    for (;;) {
      const found = this.at < this.lines.length ? ITEM.exec(this.lines[this.at]) : null;
      if (!found || RULE.test(this.lines[this.at]) || found[2].at(-1) !== first.at(-1)) break;
      items.push(this.item(found));
    }
    return { type: "list", ordered, start: ordered ? parseInt(first, 10) : 1, items };
  }

  item([, indent, mark, space, rest]) {
    const width = indent.length + mark.length + Math.min(Math.max(space.length, 1), 4);
    const inside = [rest];
    this.at++;
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      const indented = line.startsWith(" ".repeat(Math.min(width, 2)));
      if (!line.trim()) {
        const next = this.lines[this.at + 1] ?? "";
        if (!next.startsWith(" ".repeat(Math.min(width, 2))) && !ITEM.test(next)) break;
        if (ITEM.test(next) && !next.startsWith(" ".repeat(Math.min(width, 2)))) { this.at++; break; }
      } else if (!indented && (this.begins(line) || !inside.at(-1).trim())) break;
      const leading = /^ */.exec(line)[0].length;
      inside.push(line.slice(Math.min(leading, width)));
      this.at++;
    }
    const task = /^\[([ xX])\] /.exec(inside[0]);
    if (task) inside[0] = inside[0].slice(4);
    return { blocks: new BlockParser(inside, this.depth + 1).parse(), done: task ? task[1] !== " " : null };
  }

  begins(line) {
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  }

  isTable() {
    const next = this.lines[this.at + 1] ?? "";
    return this.lines[this.at].includes("|") && next.includes("-") && DIVIDER.test(next) && next.includes("|");
  }

  table() {
    const head = cells(this.lines[this.at]);
    const align = cells(this.lines[this.at + 1]).map((cell) => {
      if (cell.startsWith(":") && cell.endsWith(":")) return "center";
      return cell.endsWith(":") ? "right" : "left";
    });
    const rows = [];
    for (this.at += 2; this.at < this.lines.length && this.lines[this.at].includes("|"); this.at++) {
      rows.push(cells(this.lines[this.at]).slice(0, head.length));
    }
    return { type: "table", align, head, rows };
  }

  paragraph() {
    const text = [this.lines[this.at++].trimStart()];
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      if (!line.trim() || (this.begins(line) && !/^ {0,3}(?:0|[2-9]|\d{2,})/.test(line)) || this.isTable()) break;
      text.push(line.trimStart());
      this.at++;
    }
    return { type: "paragraph", text: text.join("\n") };
  }
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.replace(/\\\|/g, "|").trim());
}
