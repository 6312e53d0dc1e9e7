// A menu at a button: arrow keys walk, Escape closes, the focus goes back to the button.
import { el } from "./dom.js";

let closeLast = null;

// items: [{ label, run, danger, checked }]; `checked` undefined: not one of several.
export function openMenu(button, items) {
  closeLast?.();
  const menu = el("div.menu", { role: "menu" }, items.map((item) => el(`button${item.danger ? ".danger" : ""}`, {
    type: "button", role: item.checked === undefined ? "menuitem" : "menuitemradio", "aria-checked": item.checked === undefined ? null : String(item.checked),
    onclick: () => { close(); item.run(); },
  }, item.label)));
  const outside = (event) => { if (!menu.contains(event.target)) close(); };
  function close(back = true) {
    document.removeEventListener("pointerdown", outside, true);
    menu.remove();
    button.setAttribute("aria-expanded", "false");
    if (back && button.isConnected) button.focus();
    closeLast = null;
  }
  menu.addEventListener("keydown", (event) => {
    const all = [...menu.children], at = all.indexOf(document.activeElement);
    if (event.key === "Escape" || event.key === "Tab") close();
    else if (event.key === "ArrowDown") all[(at + 1) % all.length].focus();
    else if (event.key === "ArrowUp") all[(at + all.length - 1) % all.length].focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  document.body.append(menu);
  const box = button.getBoundingClientRect(), size = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(box.right - size.width, innerWidth - size.width - 8))}px`;
  menu.style.top = `${box.bottom + size.height + 8 > innerHeight ? box.top - size.height - 4 : box.bottom + 4}px`;
  button.setAttribute("aria-expanded", "true");
  document.addEventListener("pointerdown", outside, true);
  closeLast = () => close(false);
  menu.firstChild.focus();
}
