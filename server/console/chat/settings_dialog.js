// The settings of a conversation, as a form. They hold from the next message on.
import { el } from "../parts/dom.js";
import { icon } from "../parts/icons.js";
import { DEFAULTS, FORMATS, NUMBERS, fieldsOf } from "./settings.js";

const MAIN = ["max_tokens", "temperature", "top_p"];
const PLACEHOLDERS = {
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
  regex: "[A-Z]{3}-[0-9]{4}", choice: "yes\nno\nmaybe", grammar: 'start: "yes" | "no"',
};
const TOOL = '[{"name": "get_weather", "description": "The weather at a place",\n  "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}]';

let serial = 0;

// A field with its label and help, which belong together for a screen reader.
function labelled(label, field, help = null) {
  field.id ||= `field-${serial++}`;
  const hint = help === null ? null : el("p.help", { id: `${field.id}-help` }, help);
  if (hint) field.setAttribute("aria-describedby", hint.id);
  return el("div.field", {}, el("label", { htmlFor: field.id }, label), field, hint);
}

const choiceOf = (value, options) => el("select", { value }, Object.entries(options).map(([name, label]) => el("option", { value: name, selected: name === value }, label)));

export function openSettings(chat, models) {
  const settings = { ...structuredClone(DEFAULTS), ...structuredClone(chat.current.settings) };
  const fields = makeFields(settings, models);
  const fault = el("p.fault", { role: "alert", hidden: true });
  const dialog = el("dialog.sheet", { "aria-label": "Settings of this conversation" });
  const save = (event) => {
    event.preventDefault();
    const wanted = read(fields, settings);
    try {
      fieldsOf(wanted);
    } catch (error) {
      fault.textContent = error.message;
      fault.hidden = false;
      return;
    }
    chat.setSettings(wanted);
    dialog.close();
  };
  const reset = () => { chat.setSettings(structuredClone(DEFAULTS)); dialog.close(); };
  dialog.append(el("form", { onsubmit: save },
    el("header", {}, el("h2", {}, "Settings"), el("button.icon", { type: "button", "aria-label": "Close", onclick: () => dialog.close() }, icon("close"))),
    el("div.sheet-body", {}, sections(fields, chat.server)),
    fault,
    el("footer", {}, el("button.quiet", { type: "button", onclick: reset }, "Back to the defaults"), el("button.primary", { type: "submit" }, "Use these"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function makeFields(settings, models) {
  const numbers = Object.fromEntries(Object.entries(NUMBERS).map(([name, { min, max, step }]) =>
    [name, el("input", { type: "number", min, max, step, placeholder: "model's own", value: settings.numbers[name] ?? "" })]));
  const format = choiceOf(settings.format, FORMATS);
  const formatText = el("textarea.code", { rows: 5, value: settings.formatText, spellcheck: false });
  const follow = () => {
    formatText.placeholder = PLACEHOLDERS[format.value] ?? "";
    formatText.closest(".field")?.toggleAttribute("hidden", !(format.value in PLACEHOLDERS));
  };
  format.addEventListener("change", follow);
  queueMicrotask(follow);
  return {
    numbers, format, formatText,
    model: choiceOf(settings.model, Object.fromEntries([["", "The server's first"], ...models.map((name) => [name, name])])),
    system: el("textarea", { rows: 4, value: settings.system, placeholder: "You are a helpful assistant." }),
    stop: el("textarea.code", { rows: 2, value: settings.stop, spellcheck: false }),
    tools: el("textarea.code", { rows: 6, value: settings.tools, placeholder: TOOL, spellcheck: false }),
    toolChoice: choiceOf(settings.toolChoice, { auto: "When it likes", required: "Always", none: "Never" }),
    thinking: choiceOf(settings.thinking, { auto: "As the model does", on: "On", off: "Off" }),
    lease: el("input", { type: "checkbox", checked: settings.lease }),
    leaseSeconds: el("input", { type: "number", min: 1, step: 1, value: settings.leaseSeconds }),
    durable: el("input", { type: "checkbox", checked: settings.durable }),
  };
}

// What the server cannot do is not offered.
function sections(fields, { way, durable }) {
  const chats = way === "chat";
  const number = (name) => labelled(NUMBERS[name].label, fields.numbers[name], NUMBERS[name].help);
  const fold = (title, open, ...inside) => el("details", { open }, el("summary", {}, title), inside);
  return [
    chats ? labelled("System prompt", fields.system, "What the model is told first. A change holds from the next message on, whose history is then read anew.") : null,
    el("div.grid", {}, MAIN.map(number)),
    fold("More sampling", Object.entries(fields.numbers).some(([name, field]) => !MAIN.includes(name) && field.value !== ""),
      el("div.grid", {}, Object.keys(NUMBERS).filter((name) => !MAIN.includes(name)).map(number)),
      labelled("Stop at", fields.stop, "One text per line. The answer ends before any of them."),
      chats ? labelled("Thinking", fields.thinking, "For models that can think before they answer.") : null),
    fold("Structured output", fields.format.value !== "none",
      labelled("The answer is", fields.format), labelled("Rule", fields.formatText, "The answer is held to it token by token.")),
    chats ? fold("Tools", fields.tools.value !== "",
      labelled("Tools", fields.tools, "A list of functions, as OpenAI writes them. You give the results; the console runs nothing."),
      labelled("The model calls them", fields.toolChoice)) : null,
    fold("Model and cache", fields.lease.checked || fields.model.value !== "",
      labelled("Model", fields.model),
      el("div.field.inline", {}, el("label", {}, fields.lease, " Lease the cache of every answer")),
      labelled("Lease (seconds)", fields.leaseSeconds, "Without a lease the cache of an answer stays warm as long as nobody needs its room."),
      durable ? el("div.field.inline", {}, el("label", {}, fields.durable, " Leases outlive the server: they are written to its disk")) : null),
  ];
}

function read(fields, before) {
  const numbers = Object.fromEntries(Object.entries(fields.numbers).filter(([, field]) => field.value !== "").map(([name, field]) => [name, Number(field.value)]));
  const texts = ["format", "formatText", "model", "system", "stop", "tools", "toolChoice", "thinking"].map((name) => [name, fields[name].value]);
  return { ...before, ...Object.fromEntries(texts), numbers, lease: fields.lease.checked, durable: fields.durable.checked, leaseSeconds: Number(fields.leaseSeconds.value) || DEFAULTS.leaseSeconds };
}
