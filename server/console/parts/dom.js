// Making elements. Text is only ever text: nothing here, or anywhere in the console, parses HTML.

export const byId = (id) => document.getElementById(id);

// el("p.note", { title: "…" }, "text", child, …). Properties that begin with "on" are listeners, null ones are left out.
export function el(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.classList.add(...classes);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "role") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(kind, attributes = {}, ...children) {
  const shape = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  shape.append(...children);
  return shape;
}

// Told to whoever listens to the page rather than looks at it.
export function say(text) {
  byId("says").textContent = text;
}

// A line that goes by itself, with at most one thing to do about it.
export function toast(text, action = null) {
  const line = el("div.toast", { role: "status" }, el("span", {}, text));
  const leave = () => line.remove();
  if (action !== null) line.append(el("button.quiet", { type: "button", onclick: () => { leave(); action.run(); } }, action.label));
  byId("toasts").append(line);
  setTimeout(leave, action === null ? 4000 : 10_000);
}
