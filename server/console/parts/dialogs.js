// Small dialogs: the key, and the list of keys on the keyboard.
import { el } from "./dom.js";

function opened(dialog) {
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

// `save` is called with the key, which may be empty.
export function askKey(key, why, save) {
  const field = el("input", { type: "password", value: key, id: "key", autocomplete: "off", placeholder: "sk-…" });
  const dialog = el("dialog.small", { "aria-label": "API key" });
  dialog.append(el("form", { onsubmit: (event) => { event.preventDefault(); save(field.value.trim()); dialog.close(); } },
    el("h2", {}, "API key"), el("p", {}, why),
    el("div.field", {}, el("label", { htmlFor: "key" }, "Key"), field, el("p.help", {}, "It is kept until this tab is closed.")),
    el("footer", {}, el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), el("button.primary", { type: "submit" }, "Use this key"))));
  opened(dialog);
}

const SHORTCUTS = [
  ["Enter", "Send the message"], ["Shift + Enter", "New line"], ["↑ in an empty field", "Edit the last message"],
  ["Esc", "Stop the answer, close what is open"], ["Alt + N", "New chat"], ["Alt + S", "Settings"],
  ["Alt + B", "Branches"], ["Alt + W", "Server"], ["/", "Go to the message field"],
  ["← → in tokens", "Walk through the tokens of an answer; Enter chooses one"], ["?", "This list"],
];

export function showShortcuts() {
  const dialog = el("dialog.small", { "aria-label": "Keys of the keyboard" });
  const rows = SHORTCUTS.flatMap(([keys, what]) => [el("dt", {}, el("kbd", {}, keys)), el("dd", {}, what)]);
  dialog.append(el("h2", {}, "Keys"), el("dl.keys", {}, rows),
    el("footer", {}, el("button.primary", { type: "button", onclick: () => dialog.close() }, "Close")));
  opened(dialog);
}
