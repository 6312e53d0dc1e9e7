// What a new chat looks like before anything is said.
import { el } from "../parts/dom.js";

const STARTS = [
  ["Explain", "Why does bread rise? Explain it in three sentences."],
  ["Write", "Write a short poem about a lighthouse in winter."],
  ["Code", "Write a Python function that merges two sorted lists, with an example."],
  ["Plan", "Plan a weekend in a city by the sea. Answer with a list."],
];

// `suggest` is called with a text to begin with; `hears`: the model takes recordings and nothing else.
export function welcome(suggest, hears) {
  if (hears) {
    return el("div.welcome", {}, el("h2", {}, "What was said?"),
      el("p", {}, "This model turns speech into text. Attach a recording below: WAV, FLAC, OGG or MP3."));
  }
  const cards = STARTS.map(([label, text]) => el("button.start", { type: "button", onclick: () => suggest(text) }, el("strong", {}, label), el("span", {}, text)));
  return el("div.welcome", {},
    el("h2", {}, "What shall we work on?"),
    el("p", {}, "Every answer leaves its cache behind. Ask again, edit, or branch at any token: the server goes on from there and computes only what is new."),
    el("div.starts", {}, cards));
}
