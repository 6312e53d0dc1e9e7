// What a turn asks a model that does not converse. One that completes goes on with the text that it is given; one that
// rewrites reads each message alone and writes another text.
import { fieldsOf } from "./settings.js";
import { exchanges, goesOn, lineage, textOf } from "./turns.js";

const LONGEST = 256; // tokens of an answer, where the settings name no number: the server's own is 16

// `from`: where the turn takes up, as in request.js.
export function completionBody(conversation, turn, way, from) {
  const fields = fieldsOf({ ...conversation.settings, tools: "", thinking: "auto" });
  const body = { max_tokens: LONGEST, ...fields, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const line = lineage(conversation, turn);
  const given = givenText(turn);
  const alone = way === "rewrite" && !goesOn(turn) && !from?.whole;
  const whole = way === "rewrite" ? givenText(exchanges(line).at(-1).turns[0]) : wholeText(line);
  if (from === null || alone) return { ...body, prompt: alone ? given : whole };
  Object.assign(body, { prompt: from.whole ? "" : given, continuation_of: from.of, continuation_fallback: whole });
  if (from.at !== null) body.continuation_at = from.at;
  if (turn.suffixIds) body.continuation_token_ids = turn.suffixIds;
  return body;
}

const givenText = (turn) => turn.given.map((message) => message.content).join("");

// Everything that stands before the answer: texts that were given and texts that were written, one behind the other.
function wholeText(line) {
  return exchanges(line).map(({ turns, parts }) =>
    givenText(turns[0]) + parts.map(({ turn, pieces }) => (turn.prefix ?? "") + textOf(pieces)).join("")).join("");
}
