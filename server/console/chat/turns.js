// A conversation is a tree of turns. A turn is what was given (messages, or nothing) and the answer to it.
//
// A turn begins where its parent was cut: after `cut` pieces of its answer, or at its end (null). Where nothing was
// given, the answer of the parent itself goes on: the two are one message, to whoever reads and to the model.
//
//   turn.given    [{ role, content, pictures }]: a text, and the data: URLs of pictures that came with it, if any
//   turn.pieces   [{ text, kind: "answer" | "thought", tokens }], one per event of the stream
//   turn.state    "running", "done", "stopped" or "failed"
//   turn.via      "send", "again", "edit", "continue", "branch", "token", "tool": how it came about
//   turn.head     { system, tools } that its prompt began with; null: its parent's
//
// Plain objects, so that they can be stored, exported and compared.

export const newId = () => crypto.randomUUID?.() ?? `${Date.now().toString(16)}-${Math.random().toString(16).slice(2)}`;

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, settings: structuredClone(settings), turns: [], chosen: null };
}

export function addTurn(conversation, { parent = null, cut = null, given = [], via = "send", ...more }) {
  const turn = {
    id: newId(), parent, cut, given, via, head: null, pieces: [], calls: [], state: "running", finish: null,
    failure: null, answerId: null, promptTokens: 0, inheritance: null, began: Date.now(), firstMs: null, ms: null, ...more,
  };
  conversation.turns.push(turn);
  conversation.chosen = turn.id;
  return turn;
}

export const find = (conversation, id) => conversation.turns.find((turn) => turn.id === id) ?? null;

export const children = (conversation, turn) =>
  conversation.turns.filter((other) => other.parent === (turn === null ? null : turn.id));

// From the root to the turn.
export function lineage(conversation, turn) {
  const byId = new Map(conversation.turns.map((each) => [each.id, each]));
  const line = [];
  for (let each = turn; each; each = byId.get(each.parent)) line.unshift(each);
  return line;
}

export const textOf = (pieces, kind = "answer") =>
  pieces.filter((piece) => piece.kind === kind).map((piece) => piece.text).join("");

export const countTokens = (pieces) => pieces.reduce((sum, piece) => sum + piece.tokens, 0);

// Tokens from the beginning of the prompt to behind the first `length` pieces.
export const tokensTo = (turn, length) => turn.promptTokens + countTokens(turn.pieces.slice(0, length));

export const goesOn = (turn) => turn.given.length === 0 && turn.parent !== null;

// The line as messages of people: [{ turns: [turn, …], parts: [{ turn, pieces }] }], one for each answer.
export function exchanges(line) {
  const found = [];
  line.forEach((turn, depth) => {
    const child = line[depth + 1];
    const pieces = child?.cut != null ? turn.pieces.slice(0, child.cut) : turn.pieces;
    if (!goesOn(turn) || !found.length) found.push({ turns: [], parts: [] });
    found.at(-1).turns.push(turn);
    found.at(-1).parts.push({ turn, pieces });
  });
  return found;
}

// The line as the model's messages, for a server that does not know the parent any more. `system` may be empty.
export function messagesOf(line, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { turns, parts } of exchanges(line)) {
    messages.push(...turns[0].given);
    const written = parts.map(({ turn, pieces }) => (turn.prefix ?? "") + textOf(pieces)).join("");
    const calls = turns.at(-1).calls;
    if (calls.length) messages.push({ role: "assistant", content: written || null, tool_calls: calls.map(asCall) });
    else if (parts.some(({ pieces }) => pieces.length) || written) messages.push({ role: "assistant", content: written });
  }
  return messages;
}

const asCall = ({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } });

// What the prompt of a turn began with.
export function headOf(line) {
  return line.findLast((turn) => turn.head !== null)?.head ?? { system: "", tools: "" };
}

// The answers that a reader can choose between in place of this exchange: other answers to the same question, edited
// questions, and other ways in which the answer went on.
export function versions(conversation, exchange) {
  const first = exchange.turns[0];
  const family = conversation.turns.filter((turn) => turn.parent === first.parent && turn.cut === first.cut && goesOn(turn) === goesOn(first));
  const found = [];
  const walk = (turn) => {
    const on = children(conversation, turn).filter(goesOn);
    if (!on.some((child) => child.cut === null || child.cut >= turn.pieces.length)) found.push(turn);
    on.forEach(walk);
  };
  family.forEach(walk);
  return found;
}

// The turn that is furthest down below this one, the latest of several.
export function tip(conversation, turn) {
  for (let at = turn; ;) {
    const next = children(conversation, at).filter((child) => !goesOn(child) && child.cut === null).at(-1);
    if (next === undefined) return at;
    at = next;
  }
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.turns.flatMap((turn) => turn.given).find((message) => message.role === "user");
  const file = conversation.turns[0]?.file?.name;
  const text = (first?.content || file || "New chat").replace(/\s+/g, " ").trim();
  return text.length > 60 ? `${text.slice(0, 57)}…` : text;
}
