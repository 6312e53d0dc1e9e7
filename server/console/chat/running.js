// Turns that are being answered: one request each, whose events become pieces. Knows nothing of the page.
import { alternativesBody, alternativesOf, requestOf } from "./request.js";
import { Failure, call, events } from "./wire.js";

export class Running {
  // `changed(conversation, turn)` is called with every event, and at the end.
  constructor(changed, files) {
    this.changed = changed;
    this.files = files; // what was attached, by turn
    this.way = "chat"; // how the model is talked to: "chat", "complete" or "rewrite"
    this.open = new Map(); // id of a turn → AbortController
  }

  has(turn) {
    return this.open.has(turn.id);
  }

  stop(turn) {
    this.open.get(turn.id)?.abort();
  }

  async run(conversation, turn) {
    const leaving = new AbortController();
    this.open.set(turn.id, leaving);
    const began = performance.now();
    const seen = () => { turn.firstMs ??= performance.now() - began; };
    try {
      if (turn.file) await this.hear(conversation, turn, leaving.signal, seen);
      else await this.ask(conversation, turn, leaving.signal, seen);
      turn.state = "done";
    } catch (error) {
      turn.state = error.name === "AbortError" ? "stopped" : "failed";
      if (turn.state === "failed") turn.failure = asPlain(error);
    }
    turn.ms = performance.now() - began;
    this.open.delete(turn.id);
    this.changed(conversation, turn);
  }

  async ask(conversation, turn, signal, seen) {
    const { path, json } = requestOf(conversation, turn, this.way);
    const response = await call(path, { json, signal });
    for await (const event of events(response)) {
      seen();
      take(turn, event);
      this.changed(conversation, turn);
    }
  }

  // A recording, for a model that hears.
  async hear(conversation, turn, signal, seen) {
    const file = await this.files.get(turn.file.id);
    if (!file) throw new Failure("The recording is not in this browser any more: attach it again.", { code: "file_gone" });
    const form = new FormData();
    form.append("file", file, turn.file.name);
    form.append("model", conversation.settings.model || turn.file.model);
    form.append("stream", "true");
    if (turn.given[0]?.content) form.append("prompt", turn.given[0].content);
    const response = await call("/v1/audio/transcriptions", { body: form, signal });
    for await (const event of events(response)) {
      seen();
      if (event.type === "transcript.text.delta") turn.pieces.push({ text: event.delta, kind: "answer", tokens: 0 });
      this.changed(conversation, turn);
    }
  }

  // The likeliest tokens in place of piece `index` of an answer.
  async alternatives(conversation, turn, index, signal) {
    const response = await call("/v1/chat/completions", { json: alternativesBody(conversation, turn, index), signal });
    return alternativesOf(await response.json());
  }
}

function asPlain(error) {
  return { message: error.message, code: error.code ?? null, status: error.status ?? 0, retryAfter: error.retryAfter ?? null };
}

export function take(turn, event) {
  turn.answerId = event.id ?? turn.answerId;
  const choice = event.choices?.[0];
  const prompt = event.prompt_token_ids ?? choice?.prompt_token_ids;
  if (prompt) turn.promptTokens = prompt.length;
  if (event.continuation) turn.inheritance = event.continuation;
  if (event.usage) turn.usage = { prompt: event.usage.prompt_tokens, completion: event.usage.completion_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0 };
  if (event.usage && !turn.promptTokens) turn.promptTokens = event.usage.prompt_tokens;
  if (event.retained) turn.retained = event.retained;
  if (!choice) return;
  if (choice.finish_reason) turn.finish = choice.finish_reason;
  takeDelta(turn, choice);
}

function takeDelta(turn, choice) {
  const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? { content: choice.text };
  const tokens = choice.token_ids?.length ?? (content || thought ? 1 : 0);
  if (thought) turn.pieces.push({ text: thought, kind: "thought", tokens: content ? 0 : tokens });
  if (content || (!thought && tokens)) turn.pieces.push({ text: content ?? "", kind: "answer", tokens });
  for (const { index, id, function: called } of calls ?? []) {
    turn.calls[index] ??= { id: "", name: "", args: "" };
    if (id) turn.calls[index].id = id;
    if (called?.name) turn.calls[index].name = called.name;
    turn.calls[index].args += called?.arguments ?? "";
  }
}
