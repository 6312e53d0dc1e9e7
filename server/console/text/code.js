// A block of code: its language, a button that copies it, and colours for what every language has.
import { el, say } from "../parts/dom.js";
import { icon } from "../parts/icons.js";

const WORDS = new Set(
  ("abstract and as assert async await break case catch class const continue def default defer del do " +
  "elif else enum except export extends false finally fn for foreach from func function global " +
  "go if impl implements import in include interface is lambda let loop match mut new " +
  "nil none None not null nullptr or package pass private protected pub public raise return self " +
  "static struct super switch then this throw throws trait true True False try typedef typeof " +
  "unless unsafe until using var virtual void where while with yield SELECT FROM WHERE INSERT UPDATE DELETE " +
  "CREATE TABLE JOIN ON GROUP BY ORDER LIMIT INTO VALUES SET AND OR NOT NULL AS").split(" "),
);
const HASH = new Set(["python", "py", "sh", "bash", "shell", "zsh", "ruby", "rb", "yaml", "yml", "toml", "make", "r", "dockerfile"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "markdown", "md", "console", "output"]);
const LONGEST = 50_000; // characters that are coloured

// [text, kind] with kind comment, string, number, word or null. Line by line, but for /* … */.
export function colours(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > LONGEST) return [[text, null]];
  let comment = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
  if (HASH.has(name)) comment = "#[^\\n]*";
  if (DASH.has(name)) comment = "--[^\\n]*";
  const string = "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?|`(?:[^`\\\\]|\\\\.)*`?";
  const rule = new RegExp(`(${comment})|(${string})|(\\b\\d[\\w.]*)|([A-Za-z_$][\\w$]*)`, "g");
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(rule)) {
    const kind = ["comment", "string", "number"].find((_, i) => found[i + 1] !== undefined) ?? (WORDS.has(found[0]) ? "word" : null);
    if (kind === null) continue;
    if (found.index > last) parts.push([text.slice(last, found.index), null]);
    parts.push([found[0], kind]);
    last = found.index + found[0].length;
  }
  if (last < text.length) parts.push([text.slice(last), null]);
  return parts;
}

export async function copy(text, button = null) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyOldWay(text); // a page that is not on loopback or TLS has no clipboard
  }
  say("Copied");
  if (button === null) return;
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1500);
}

function copyOldWay(text) {
  const field = el("textarea.unseen", { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function codeBlock({ language, text }) {
  const button = el("button.icon.copy", { type: "button", title: "Copy the code", "aria-label": "Copy the code" }, icon("copy"));
  button.addEventListener("click", () => copy(text, button));
  const code = el("code", {}, colours(text, language).map(([part, kind]) => (kind ? el(`span.${kind}`, {}, part) : part)));
  return el("figure.code", {},
    el("figcaption", {}, el("span", {}, language || "code"), button),
    el("pre", { tabIndex: 0, "aria-label": language ? `Code, ${language}` : "Code", role: "region" }, code));
}
