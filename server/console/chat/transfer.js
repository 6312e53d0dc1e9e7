// Conversations as files: what is exported is what is imported. A file may come from anybody, so everything in it is
// checked, and what is not known is dropped.
import { DEFAULTS, FORMATS, NUMBERS } from "./settings.js";
import { newId } from "./turns.js";

const FORMAT = "bequest.conversations", VERSION = 1;

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

export function download(name, text, type = "application/json") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// The conversations of a file, with new ids. Throws Error that says what is wrong.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT) throw new Error("The file holds no conversations of this console.");
  if (!(file.version <= VERSION)) throw new Error(`The file is of version ${file.version}; this console reads up to ${VERSION}.`);
  if (!Array.isArray(file.conversations)) throw new Error("The file's list of conversations is missing.");
  return file.conversations.map(conversationOf);
}

const string = (value, fallback = "") => (typeof value === "string" ? value : fallback);
const number = (value, fallback = 0) => (Number.isFinite(value) ? value : fallback);
const orNull = (check, value) => (value === null || value === undefined ? null : check(value));
const list = (value, check) => (Array.isArray(value) ? value.map(check) : []);

function conversationOf(value) {
  if (typeof value !== "object" || value === null) throw new Error("A conversation in the file is not an object.");
  const ids = new Map(list(value.turns, (turn) => [string(turn?.id), newId()]));
  const seen = new Set();
  const turns = list(value.turns, (turn) => turnOf(turn, ids, seen));
  return {
    id: newId(), title: string(value.title), created: number(value.created, Date.now()), changed: number(value.changed, Date.now()),
    settings: settingsOf(value.settings ?? {}), turns, chosen: ids.get(value.chosen) ?? turns.at(-1)?.id ?? null,
  };
}

// A parent stands before its children, so that there is no circle.
function turnOf(value, ids, seen) {
  const parent = value.parent === null || value.parent === undefined ? null : value.parent;
  if (parent !== null && !seen.has(parent)) throw new Error("A turn in the file has no parent before it.");
  seen.add(value.id);
  return {
    id: ids.get(value.id), parent: parent === null ? null : ids.get(parent), cut: orNull(number, value.cut),
    given: list(value.given, messageOf), via: string(value.via, "send"), head: orNull(headFrom, value.head),
    pieces: list(value.pieces, pieceOf), calls: list(value.calls, callOf), state: value.state === "failed" ? "failed" : value.state === "stopped" ? "stopped" : "done",
    finish: orNull(string, value.finish), failure: orNull(failureFrom, value.failure), answerId: orNull(string, value.answerId),
    promptTokens: number(value.promptTokens), inheritance: orNull(inheritanceFrom, value.inheritance), began: number(value.began, Date.now()),
    firstMs: orNull(number, value.firstMs), ms: orNull(number, value.ms), prefix: string(value.prefix) || undefined,
  };
}

const messageOf = (value) => ({
  role: ["user", "tool", "system", "assistant"].includes(value?.role) ? value.role : "user", content: string(value?.content),
  ...(value?.tool_call_id ? { tool_call_id: string(value.tool_call_id) } : {}),
  ...(list(value?.pictures, pictureOf).length ? { pictures: list(value.pictures, pictureOf).filter(Boolean) } : {}),
});
const pictureOf = (value) => (/^data:image\/(png|jpeg|webp|gif);base64,/.test(string(value)) ? value : "");
const pieceOf = (value) => ({ text: string(value?.text), kind: value?.kind === "thought" ? "thought" : "answer", tokens: number(value?.tokens, 1) });
const callOf = (value) => ({ id: string(value?.id), name: string(value?.name), args: string(value?.args) });
const headFrom = (value) => ({ system: string(value.system), tools: string(value.tools) });
const failureFrom = (value) => ({ message: string(value.message), code: orNull(string, value.code), status: number(value.status), retryAfter: null });
const inheritanceFrom = (value) => ({
  at: number(value.at), inherited_tokens: number(value.inherited_tokens), computed_tokens: number(value.computed_tokens), source: string(value.source),
});

function settingsOf(value) {
  const numbers = Object.fromEntries(Object.keys(NUMBERS).filter((name) => Number.isFinite(value.numbers?.[name])).map((name) => [name, value.numbers[name]]));
  const texts = ["model", "system", "stop", "formatText", "tools"].map((name) => [name, string(value[name])]);
  return {
    ...structuredClone(DEFAULTS), ...Object.fromEntries(texts), numbers, format: value.format in FORMATS ? value.format : "none",
    toolChoice: ["auto", "required", "none"].includes(value.toolChoice) ? value.toolChoice : "auto",
    thinking: ["auto", "on", "off"].includes(value.thinking) ? value.thinking : "auto",
    lease: value.lease === true, leaseSeconds: number(value.leaseSeconds, DEFAULTS.leaseSeconds),
  };
}
