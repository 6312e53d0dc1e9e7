// What a turn asks the server. It names its parent, so that the server inherits its cache, and brings the whole
// conversation along for the case that the parent is gone: after a restart, or when its record was dropped.
import { exchanges, find, goesOn, headOf, lineage, messagesOf, tokensTo } from "./turns.js";
import { completionBody } from "./completion.js";
import { fieldsOf } from "./settings.js";

// Where a turn takes up: { of: an answer's id, at: tokens of it, or null for its end }; null: nowhere.
function origin(conversation, turn) {
  const again = turn.again && find(conversation, turn.again);
  // Asked again: the prompt of the earlier answer is the whole of what is needed.
  if (again?.answerId && again.promptTokens) return { of: again.answerId, at: again.promptTokens, whole: true };
  const parent = turn.parent && find(conversation, turn.parent);
  if (!parent?.answerId) return null;
  if (turn.cut !== null) return { of: parent.answerId, at: tokensTo(parent, turn.cut), whole: false };
  if (goesOn(turn)) return { of: parent.answerId, at: tokensTo(parent, parent.pieces.length), whole: false };
  return { of: parent.answerId, at: null, whole: false };
}

// { path, json } of a turn. `way`: how the model is talked to. Throws Error that says which setting is wrong.
export function requestOf(conversation, turn, way) {
  if (way === "chat") return { path: "/v1/chat/completions", json: chatBody(conversation, turn) };
  return { path: "/v1/completions", json: completionBody(conversation, turn, way, origin(conversation, turn)) };
}

function chatBody(conversation, turn) {
  const { settings } = conversation;
  const line = lineage(conversation, turn);
  const fields = fieldsOf(settings);
  const before = headOf(line.slice(0, -1));
  const head = { system: settings.system.trim(), tools: settings.tools.trim() };
  // Another system prompt or other tools stand at the beginning: nothing behind them can be inherited. An answer that
  // goes on keeps those it began with.
  const changed = !goesOn(turn) && (turn.parent === null || head.system !== before.system || head.tools !== before.tools);
  if (changed) turn.head = head;
  const whole = messagesOf([...line.slice(0, -1), { ...turn, pieces: [], calls: [] }], headOf(line).system).map(onWire);
  const body = { ...fields, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const from = origin(conversation, turn);
  if (from === null || (changed && !from.whole)) return { ...body, messages: whole, ...onward(whole) };
  const given = from.whole ? [] : turn.given.map(onWire);
  Object.assign(body, { messages: given, continuation_of: from.of, continuation_fallback: whole, ...onward(whole) });
  if (from.at !== null) body.continuation_at = from.at;
  if (turn.suffixIds) body.continuation_token_ids = turn.suffixIds;
  return body;
}

// A message as the server takes it: pictures stand before the text about them.
function onWire({ pictures, ...message }) {
  if (!pictures?.length) return message;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { ...message, content: message.content ? [...parts, { type: "text", text: message.content }] : parts };
}

// A conversation that ends in an answer goes on with it, rather than with an answer to it.
function onward(messages) {
  return messages.at(-1)?.role === "assistant" ? { continue_final_message: true } : {};
}

// The likeliest tokens in place of a piece: one token is computed, and none is kept.
export function alternativesBody(conversation, turn, index) {
  const { model } = fieldsOf({ ...conversation.settings, format: "none", tools: "" });
  return {
    ...(model ? { model } : {}), messages: [], continuation_of: turn.answerId, continuation_at: tokensTo(turn, index),
    max_tokens: 1, temperature: 0, logprobs: true, top_logprobs: 8, return_tokens_as_token_ids: true, store: false,
  };
}

// [{ id, text, probability }] of the answer to that, likeliest first.
export function alternativesOf(answer) {
  const entries = answer.choices[0].logprobs?.content?.[0]?.top_logprobs ?? [];
  return entries.map(({ token, bytes, logprob }) => ({
    id: Number(token.split(":")[1]),
    text: bytes ? new TextDecoder().decode(Uint8Array.from(bytes)) : "",
    probability: Math.exp(logprob),
  }));
}

// The conversation as a text to keep.
export function asMarkdown(conversation, turn) {
  const lines = [];
  for (const { turns, parts } of exchanges(lineage(conversation, turn))) {
    for (const message of turns[0].given) lines.push(`**${message.role === "user" ? "You" : message.role}**\n\n${message.content}`);
    const text = parts.map((part) => (part.turn.prefix ?? "") + part.pieces.filter((piece) => piece.kind === "answer").map((piece) => piece.text).join("")).join("");
    lines.push(`**Answer**\n\n${text}`);
  }
  return `${lines.join("\n\n---\n\n")}\n`;
}
