// The console: puts the parts together, and asks the server once a second how it stands.
import { Tree } from "./branches/tree.js";
import { Chat } from "./chat/chat.js";
import { Composer } from "./chat/composer.js";
import { openSettings } from "./chat/settings_dialog.js";
import { Sidebar } from "./chat/sidebar.js";
import { Store } from "./chat/store.js";
import { Thread } from "./chat/thread.js";
import { getKey, setKey } from "./chat/wire.js";
import { askKey, showShortcuts } from "./parts/dialogs.js";
import { byId, toast } from "./parts/dom.js";
import { icon } from "./parts/icons.js";
import { openMenu } from "./parts/menu.js";
import { Panel } from "./parts/panel.js";
import { Watch } from "./watch/watch.js";

const THEME = "bequest.theme", LAST = "bequest.open";
const ICONS = { "open-sidebar": "menu", "open-settings": "settings", "open-branches": "branches", "open-watch": "server", "open-more": "more" };

const store = await Store.open();
const chat = new Chat(store);
const composer = new Composer(chat);
const thread = new Thread(chat, composer);
const sidebar = new Sidebar(chat, () => showSidebar(false));
const tree = new Tree(chat, byId("branches"));
const watch = new Watch(byId("watch"), { onmodel: meet, onstate: showState });
const panel = new Panel((tab) => { tree.show(tab === "branches"); watch.show(tab === "watch"); });
let models = [];

for (const [id, name] of Object.entries(ICONS)) {
  byId(id).prepend(icon(name));
  byId(id).title = byId(id).getAttribute("aria-label") ?? byId(id).textContent;
}

function meet({ names, takes, way, durable }) {
  models = names;
  chat.meet({ way, durable });
  byId("model").textContent = names[0];
  composer.setModel({ name: names[0], takes });
  if (!chat.current.turns.length) chat.tell("thread");
}

function showState(text, kind) {
  byId("state").textContent = text;
  byId("server").className = kind;
  byId("server").title = text;
}

function showSidebar(open) {
  document.body.classList.toggle("with-sidebar", open);
  byId("open-sidebar").setAttribute("aria-expanded", String(open));
  if (open) byId("new-chat").focus();
}

function changeKey() {
  askKey(getKey(), "Servers with keys ask for one with every request.", (key) => { setKey(key); watch.soon(); });
}

function setTheme(theme) {
  if (theme === "system") {
    localStorage.removeItem(THEME);
    delete document.documentElement.dataset.theme;
  } else {
    localStorage.setItem(THEME, theme);
    document.documentElement.dataset.theme = theme;
  }
  watch.redraw();
}

function openMore() {
  const now = localStorage.getItem(THEME) ?? "system";
  const themes = { system: "Light or dark, as the system", light: "Light", dark: "Dark" };
  openMenu(byId("open-more"), [
    { label: "API key …", run: changeKey },
    { label: "Keys of the keyboard", run: showShortcuts },
    ...Object.entries(themes).map(([theme, label]) => ({ label, checked: theme === now, run: () => setTheme(theme) })),
  ]);
}

byId("open-sidebar").addEventListener("click", () => showSidebar(!document.body.classList.contains("with-sidebar")));
byId("main").addEventListener("pointerdown", (event) => {
  if (document.body.classList.contains("with-sidebar") && !byId("open-sidebar").contains(event.target)) showSidebar(false);
});
byId("open-settings").addEventListener("click", () => openSettings(chat, models));
byId("open-more").addEventListener("click", openMore);
chat.addEventListener("thread", () => sessionStorage.setItem(LAST, chat.current.turns.length ? chat.current.id : ""));

const ALT = { n: () => { chat.fresh(); byId("text").focus(); }, s: () => openSettings(chat, models), b: () => panel.toggle("branches"), w: () => panel.toggle("watch") };

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const writing = event.target.matches("input, textarea, select");
  if (event.altKey && ALT[event.key.toLowerCase()]) ALT[event.key.toLowerCase()]();
  else if (event.key === "Escape" && document.body.classList.contains("with-sidebar")) { showSidebar(false); byId("open-sidebar").focus(); }
  else if (event.key === "Escape" && chat.busyTurn) chat.stop();
  else if (!writing && event.key === "?") showShortcuts();
  else if (!writing && event.key === "/") byId("text").focus();
  else return;
  event.preventDefault();
});

await chat.load(sessionStorage.getItem(LAST));
sidebar.draw();
composer.draw();
store.onfailure = (error) => toast(`The browser did not keep the conversation: ${error.message} Export it to keep it.`);
if (!store.lasting) toast("This browser keeps nothing for this page: conversations are lost on reload. Export them to keep them.");
if (innerWidth > 720) byId("text").focus();
watch.start();
