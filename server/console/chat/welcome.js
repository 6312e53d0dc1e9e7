// What a new chat looks like before anything is said, by how the model is talked to.
import { el } from "../parts/dom.js";

const WELCOMES = {
  chat: {
    title: "What shall we work on?",
    about: "Every answer leaves its cache behind. Ask again, edit, or branch at any token: the server goes on from there and computes only what is new.",
    starts: [
      ["Explain", "Why does bread rise? Explain it in three sentences."],
      ["Write", "Write a short poem about a lighthouse in winter."],
      ["Code", "Write a Python function that merges two sorted lists, with an example."],
      ["Plan", "Plan a weekend in a city by the sea. Answer with a list."],
    ],
  },
  complete: {
    title: "What shall it go on with?",
    about: "This model has no chat template: it does not answer questions, it goes on with the text that you write. What you write next follows what it wrote.",
    starts: [
      ["A story", "The lighthouse had been dark for a week when"],
      ["A list", "Three things to pack for a weekend by the sea:\n1."],
      ["Code", "def merge(a, b):\n    \"\"\"Merges two sorted lists.\"\"\"\n"],
    ],
  },
  rewrite: {
    title: "What shall it read?",
    about: "This model reads one text and writes another, such as a summary or a translation. It reads each message alone.",
    starts: [],
  },
  hear: {
    title: "What was said?",
    about: "This model turns speech into text. Attach a recording below: WAV, FLAC, OGG or MP3.",
    starts: [],
  },
};

// `suggest` is called with a text to begin with.
export function welcome(suggest, way) {
  const { title, about, starts } = WELCOMES[way];
  const cards = starts.map(([label, text]) => el("button.start", { type: "button", onclick: () => suggest(text) }, el("strong", {}, label), el("span", {}, text)));
  return el("div.welcome", {}, el("h2", {}, title), el("p", {}, about), cards.length ? el("div.starts", {}, cards) : null);
}
