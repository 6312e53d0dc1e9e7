// Conversations in the browser's own database. Where it has none (a private window may not), they live in memory and
// the page says so.

const NAME = "bequest", VERSION = 1;

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, VERSION);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("conversations", { keyPath: "id" });
      asked.result.createObjectStore("files");
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
    asked.onblocked = () => reject(new Error("another tab holds an older database open"));
  });
}

const settled = (asked) => new Promise((resolve, reject) => {
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

class InMemory {
  constructor() { this.maps = { conversations: new Map(), files: new Map() }; }
  async all() { return [...this.maps.conversations.values()]; }
  async put(kind, value, key = value.id) { this.maps[kind].set(key, value); }
  async get(kind, key) { return this.maps[kind].get(key); }
  async remove(kind, key) { this.maps[kind].delete(key); }
}

class InDatabase {
  constructor(database) { this.database = database; }
  on(kind, mode) { return this.database.transaction(kind, mode).objectStore(kind); }
  all() { return settled(this.on("conversations", "readonly").getAll()); }
  get(kind, key) { return settled(this.on(kind, "readonly").get(key)); }
  remove(kind, key) { return settled(this.on(kind, "readwrite").delete(key)); }
  put(kind, value, key) {
    return settled(kind === "files" ? this.on(kind, "readwrite").put(value, key) : this.on(kind, "readwrite").put(value));
  }
}

export class Store {
  static async open() {
    try {
      return new Store(new InDatabase(await opened()), true);
    } catch {
      return new Store(new InMemory(), false);
    }
  }

  constructor(place, lasting) {
    this.place = place;
    this.lasting = lasting; // whether a reload finds them again
    this.others = new BroadcastChannel("bequest");
    this.pending = new Map(); // id → timer
    this.onfailure = null; // called with the error when a conversation could not be kept
  }

  // Called when another tab has changed a conversation or taken it away.
  onForeignChange(listener) {
    this.others.onmessage = ({ data }) => listener(data);
  }

  // All conversations, latest first. What ran when its page was closed has stopped.
  async load() {
    const found = await this.place.all();
    for (const turn of found.flatMap((conversation) => conversation.turns)) if (turn.state === "running") turn.state = "stopped";
    return found.sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    return this.place.get("conversations", id);
  }

  // At most twice a second while an answer comes, and at once with `now`.
  save(conversation, now = false) {
    if (now) {
      clearTimeout(this.pending.get(conversation.id));
      this.pending.delete(conversation.id);
      return this.write(conversation);
    }
    if (this.pending.has(conversation.id)) return undefined;
    const timer = setTimeout(() => { this.pending.delete(conversation.id); this.write(conversation); }, 500);
    this.pending.set(conversation.id, timer);
    return undefined;
  }

  // The browser may refuse: its disk is full, or it was told to keep nothing.
  async write(conversation) {
    try {
      await this.place.put("conversations", structuredClone(conversation));
      this.others.postMessage(conversation.id);
    } catch (error) {
      this.onfailure?.(error);
    }
  }

  async remove(conversation) {
    clearTimeout(this.pending.get(conversation.id));
    this.pending.delete(conversation.id);
    await this.place.remove("conversations", conversation.id);
    for (const turn of conversation.turns) if (turn.file) await this.place.remove("files", turn.file.id);
    this.others.postMessage(conversation.id);
  }

  files = {
    put: (id, blob) => this.place.put("files", blob, id),
    get: (id) => this.place.get("files", id),
  };
}
