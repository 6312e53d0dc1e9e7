// What can be done with conversations: the one place that changes them. Views are told, and draw.
import { Running } from "./running.js";
import { lastSettings, rememberSettings } from "./settings.js";
import { addTurn, find, lineage, newConversation, newId, tip } from "./turns.js";

export class Chat extends EventTarget {
  constructor(store) {
    super();
    this.store = store;
    this.conversations = [];
    this.current = newConversation(lastSettings()); // not among the others until something is said
    this.place = null; // { turn, cut } that the next message follows, where that is not the end of what is shown
    this.running = new Running((conversation, turn) => this.progressed(conversation, turn), store.files);
    this.server = { way: "chat", durable: false }; // how its model is talked to; whether its leases may last
    store.onForeignChange((id) => this.reload(id));
  }

  meet(server) {
    this.server = server;
    this.running.way = server.way;
  }

  async load(wanted) {
    this.conversations = await this.store.load();
    const found = this.conversations.find((each) => each.id === wanted);
    if (found) this.current = found;
    this.tell("list");
    this.tell("thread");
  }

  tell(what, detail = null) {
    this.dispatchEvent(new CustomEvent(what, { detail }));
  }

  get chosen() {
    return find(this.current, this.current.chosen);
  }

  get line() {
    return lineage(this.current, this.chosen);
  }

  get busyTurn() {
    return this.current.turns.find((turn) => this.running.has(turn)) ?? null;
  }

  // --- conversations

  fresh() {
    if (this.current.turns.length) this.current = newConversation(lastSettings());
    this.moveTo(null);
  }

  open(conversation) {
    this.current = conversation;
    this.moveTo(null);
  }

  rename(conversation, title) {
    conversation.title = title.trim().slice(0, 200);
    this.keep(conversation);
  }

  async remove(conversation) {
    conversation.turns.forEach((turn) => this.running.stop(turn));
    this.conversations = this.conversations.filter((each) => each !== conversation);
    await this.store.remove(conversation);
    if (this.current === conversation) {
      this.current = newConversation(lastSettings());
      this.moveTo(null);
    }
    this.tell("list");
  }

  async add(conversations) {
    for (const conversation of conversations) await this.store.save(conversation, true);
    this.conversations = [...conversations, ...this.conversations].sort((a, b) => b.changed - a.changed);
    this.tell("list");
  }

  setSettings(settings) {
    this.current.settings = settings;
    rememberSettings({ ...settings, system: "", tools: "" });
    if (this.current.turns.length) this.keep(this.current);
    this.tell("settings");
  }

  async reload(id) {
    const open = this.conversations.find((each) => each.id === id);
    if (open?.turns.some((turn) => this.running.has(turn))) return;
    const stored = await this.store.get(id);
    this.conversations = this.conversations.filter((each) => each.id !== id);
    if (stored) this.conversations.unshift(stored);
    this.conversations.sort((a, b) => b.changed - a.changed);
    if (this.current.id === id) {
      this.current = stored ?? newConversation(lastSettings());
      this.tell("thread");
    }
    this.tell("list");
  }

  // --- turns

  // The place that the next message follows; null: the end of what is shown.
  moveTo(place) {
    this.place = place;
    this.tell("thread");
  }

  choose(turn) {
    this.current.chosen = turn.id;
    if (this.current.turns.length) this.keep(this.current);
    this.moveTo(null);
  }

  chooseVersion(turn) {
    this.choose(tip(this.current, turn));
  }

  async send(text, file = null, pictures = []) {
    const place = this.place;
    const parent = place?.turn ?? this.chosen;
    const given = text || pictures.length ? [{ role: "user", content: text, ...(pictures.length ? { pictures } : {}) }] : [];
    const more = file === null ? {} : { file: await this.keepFile(file) };
    this.start({ parent: parent?.id ?? null, cut: place?.cut ?? null, given, via: place?.cut == null ? "send" : "branch", ...more });
  }

  async keepFile({ blob, model }) {
    const id = newId();
    await this.store.files.put(id, blob);
    return { id, name: blob.name, size: blob.size, type: blob.type, model };
  }

  // Another answer to the same question.
  again(turn) {
    this.start({ parent: turn.parent, cut: turn.cut, given: turn.given, via: "again", again: turn.id, ...(turn.file ? { file: turn.file } : {}) });
  }

  // Its pictures stay.
  edit(turn, text) {
    const given = [{ ...turn.given[0], role: "user", content: text }];
    this.start({ parent: turn.parent, cut: turn.cut, given, via: "edit" });
  }

  // An answer that was cut, by the limit or by its reader, goes on.
  goOn(turn) {
    this.start({ parent: turn.id, via: "continue" });
  }

  // The answer is written anew behind its first `cut` pieces.
  branch(turn, cut) {
    this.start({ parent: turn.id, cut, via: "branch" });
  }

  // The same with another token in place of the next.
  branchWith(turn, cut, { id, text }) {
    this.start({ parent: turn.id, cut, via: "token", suffixIds: [id], prefix: text });
  }

  answerCalls(turn, results) {
    const given = turn.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: results[i] }));
    this.start({ parent: turn.id, given, via: "tool" });
  }

  // In place: what failed has no answer worth keeping.
  retry(turn) {
    Object.assign(turn, { pieces: [], calls: [], state: "running", finish: null, failure: null, answerId: null, promptTokens: 0, inheritance: null, firstMs: null, ms: null, began: Date.now() });
    this.begin(turn);
  }

  stop() {
    if (this.busyTurn) this.running.stop(this.busyTurn);
  }

  start(terms) {
    if (this.busyTurn) return;
    this.place = null;
    this.begin(addTurn(this.current, terms));
  }

  begin(turn) {
    const conversation = this.current;
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.keep(conversation);
    const done = this.running.run(conversation, turn);
    this.tell("thread");
    this.tell("began", turn);
    done.then(() => this.tell("ended", turn));
  }

  progressed(conversation, turn) {
    conversation.changed = Date.now();
    const over = turn.state !== "running";
    this.store.save(conversation, over);
    if (conversation === this.current) this.tell(over ? "thread" : "progress", turn);
    if (over) this.tell("list");
  }

  keep(conversation) {
    conversation.changed = Date.now();
    this.conversations.sort((a, b) => b.changed - a.changed);
    this.store.save(conversation, true);
    this.tell("list");
  }

  // How an answer can be taken up: "continue" where it was cut, "call" where tools are to answer; else null.
  openEnd(turn) {
    if (this.running.has(turn)) return null;
    if (turn.calls.length && turn.finish === "tool_calls") return "call";
    const cut = turn.finish === "length" || turn.state === "stopped" || (turn.state === "failed" && turn.pieces.length > 0);
    return cut && turn.answerId && turn.pieces.length && !turn.file ? "continue" : null;
  }
}
