// The panel beside the chat: branches or server. On a phone it covers the chat.
import { byId } from "./dom.js";
import { icon } from "./icons.js";

const TABS = ["branches", "watch"];
const KEPT = "bequest.panel";

export class Panel {
  // `shown(tab)` is called when a tab comes into sight; null: none is.
  constructor(shown) {
    this.shown = shown;
    this.tab = null;
    byId("widen").append(icon("widen"));
    byId("close-panel").append(icon("close"));
    for (const tab of TABS) {
      byId(`open-${tab}`).addEventListener("click", () => this.toggle(tab));
      byId(`tab-${tab}`).addEventListener("click", () => this.open(tab));
      byId(`tab-${tab}`).addEventListener("keydown", (event) => this.key(event));
    }
    byId("close-panel").addEventListener("click", () => { const from = this.tab; this.open(null); byId(`open-${from}`).focus(); });
    byId("widen").addEventListener("click", () => this.widen());
    const kept = localStorage.getItem(KEPT);
    this.open(TABS.includes(kept) && innerWidth > 1000 ? kept : null);
  }

  toggle(tab) {
    this.open(this.tab === tab ? null : tab);
  }

  key(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    this.open(TABS[1 - TABS.indexOf(this.tab)]);
    byId(`tab-${this.tab}`).focus();
  }

  widen() {
    const wide = byId("panel").classList.toggle("wide");
    byId("widen").setAttribute("aria-pressed", String(wide));
    document.body.classList.toggle("wide-panel", wide);
    this.shown(this.tab);
  }

  open(tab) {
    this.tab = tab;
    localStorage.setItem(KEPT, tab ?? "");
    byId("panel").hidden = tab === null;
    document.body.classList.toggle("with-panel", tab !== null);
    for (const each of TABS) {
      const here = each === tab;
      byId(each).hidden = !here;
      byId(`tab-${each}`).setAttribute("aria-selected", String(here));
      byId(`tab-${each}`).tabIndex = here ? 0 : -1;
      byId(`open-${each}`).setAttribute("aria-pressed", String(here));
    }
    this.shown(tab);
  }
}
