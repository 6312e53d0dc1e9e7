// Calls of tools: what the model wants to know, and fields for the results. The console runs nothing by itself.
import { el } from "../parts/dom.js";
import { codeBlock } from "../text/code.js";

// `open`: results can be given.
export function callForm(chat, turn, open) {
  const fields = [];
  const cards = turn.calls.map((call, i) => {
    const field = el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the tool answers" });
    fields.push(field);
    return el("div.call", {},
      el("p.label", {}, "Calls ", el("strong", {}, call.name || "a tool")),
      codeBlock({ language: "json", text: pretty(call.args) }),
      open ? field : null);
  });
  const send = (event) => {
    event.preventDefault();
    chat.answerCalls(turn, fields.map((field) => field.value));
  };
  return el("form", { onsubmit: send }, cards, open ? el("button.primary.busy-off", { type: "submit" }, turn.calls.length > 1 ? "Send the results" : "Send the result") : null);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
