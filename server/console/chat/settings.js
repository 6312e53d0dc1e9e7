// What a conversation is asked with. Empty fields are left to the server, which knows the model's own values.

export const NUMBERS = {
  max_tokens: { label: "Longest answer", min: 1, step: 1, help: "In tokens. An answer that is cut there can go on." },
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.1, help: "0 always takes the likeliest token; higher values vary more." },
  top_p: { label: "Top p", min: 0, max: 1, step: 0.05, help: "Samples from the likeliest tokens that together have this probability." },
  top_k: { label: "Top k", min: 0, step: 1, help: "Samples from so many of the likeliest tokens." },
  min_p: { label: "Min p", min: 0, max: 1, step: 0.01, help: "Leaves out tokens below this part of the likeliest one's probability." },
  repetition_penalty: { label: "Repetition penalty", min: 0.1, max: 2, step: 0.05, help: "Above 1 makes tokens that were there before less likely." },
  presence_penalty: { label: "Presence penalty", min: -2, max: 2, step: 0.1, help: "Makes tokens less likely that the answer already has." },
  frequency_penalty: { label: "Frequency penalty", min: -2, max: 2, step: 0.1, help: "The same, by how often it has them." },
  seed: { label: "Seed", min: 0, step: 1, help: "The same seed gives the same answer to the same prompt." },
};

export const FORMATS = {
  none: "Free text",
  json_object: "Any JSON object",
  json_schema: "JSON that fits a schema",
  regex: "Text that fits a regular expression",
  choice: "One of several lines",
  grammar: "A grammar",
};

export const DEFAULTS = {
  model: "", system: "", numbers: {}, stop: "", format: "none", formatText: "", tools: "", toolChoice: "auto",
  lease: false, leaseSeconds: 600, durable: false, thinking: "auto",
};

const KEPT = "bequest.settings";

// Those of the last conversation that were changed. New ones begin with them.
export function lastSettings() {
  try {
    return { ...structuredClone(DEFAULTS), ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return structuredClone(DEFAULTS);
  }
}

export function rememberSettings(settings) {
  localStorage.setItem(KEPT, JSON.stringify(settings));
}

// The fields of a request's body. Throws Error that says which setting is wrong.
export function fieldsOf(settings) {
  const fields = {};
  if (settings.model) fields.model = settings.model;
  for (const [name, value] of Object.entries(settings.numbers)) if (value !== "" && value !== null) fields[name] = Number(value);
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (settings.lease) fields.retain = { ttl: Number(settings.leaseSeconds) || DEFAULTS.leaseSeconds, ...(settings.durable ? { durable: true } : {}) };
  if (settings.thinking !== "auto") fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return { ...fields, ...formatOf(settings), ...toolsOf(settings) };
}

function formatOf({ format, formatText }) {
  switch (format) {
    case "json_object": return { response_format: { type: "json_object" } };
    case "json_schema": return { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema: json(formatText, "The JSON schema") } } };
    case "regex": return { structured_outputs: { regex: formatText.trim() } };
    case "choice": return { structured_outputs: { choice: formatText.split("\n").map((line) => line.trim()).filter(Boolean) } };
    case "grammar": return { structured_outputs: { grammar: formatText } };
    default: return {};
  }
}

function toolsOf({ tools, toolChoice }) {
  if (!tools.trim()) return {};
  const given = json(tools, "The list of tools");
  const list = Array.isArray(given) ? given : [given];
  return { tools: list.map((tool) => (tool.type ? tool : { type: "function", function: tool })), tool_choice: toolChoice };
}

function json(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`);
  }
}
