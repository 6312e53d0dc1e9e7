// The playground: a tree of answers. A new message continues the chosen answer; a click on a token continues from there.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// One answer. Its text begins where its parent was cut: after `cut` pieces of it, or at its end (null).
class Answer {
  constructor(parent, cut, question) {
    this.parent = parent;
    this.cut = cut;
    this.question = question;
    this.children = [];
    this.pieces = []; // { text, thought, tokens }
    this.id = null;
    this.promptTokens = 0;
    this.told = "";
    this.failed = false;
    parent?.children.push(this);
  }

  // Tokens from the beginning of the prompt to the end of piece `index`.
  tokensTo(index) {
    return this.pieces.slice(0, index + 1).reduce((sum, piece) => sum + piece.tokens, this.promptTokens);
  }
}

// The events of a stream as objects, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream was cut off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

export class Chat {
  constructor(headers) {
    this.headers = headers;
    this.reset();
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.send(); }
    });
    byId("unmark").addEventListener("click", () => this.mark(null));
    byId("stop").addEventListener("click", () => this.leaving?.abort());
    byId("fresh").addEventListener("click", () => { this.leaving?.abort(); this.reset(); });
  }

  reset() {
    this.roots = [];
    this.chosen = null;
    this.marked = null; // { answer, index }
    this.leaving = null;
    this.draw();
  }

  mark(place) {
    this.marked = place;
    byId("branching").hidden = place === null;
    this.draw();
  }

  async send() {
    if (this.leaving !== null) return;
    const text = byId("text").value.trim();
    const place = this.marked;
    if (!text && place === null) return;
    const parent = place?.answer ?? this.chosen;
    const answer = new Answer(parent, place === null ? null : place.index + 1, text || null);
    if (parent === null) this.roots.push(answer);
    byId("text").value = "";
    byId("note").textContent = "";
    this.chosen = answer;
    this.mark(null);
    await this.run(answer, this.body(answer));
  }

  body(answer) {
    const body = {
      messages: answer.question === null ? [] : [{ role: "user", content: answer.question }],
      max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value),
      stream: true, stream_options: { include_usage: true }, return_token_ids: true,
    };
    if (byId("lease").checked) body.retain = true;
    if (answer.parent !== null) {
      body.continuation_of = answer.parent.id;
      if (answer.cut !== null) body.continuation_at = answer.parent.tokensTo(answer.cut - 1);
    }
    return body;
  }

  async run(answer, body) {
    this.leaving = new AbortController();
    byId("send").hidden = true;
    byId("stop").hidden = false;
    const began = performance.now();
    let first = null;
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST", signal: this.leaving.signal, body: JSON.stringify(body),
        headers: { "Content-Type": "application/json", ...this.headers() },
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const event of events(response.body)) {
        first ??= performance.now() - began;
        this.take(answer, event);
      }
      const seconds = (performance.now() - began) / 1000;
      const tokens = answer.pieces.reduce((sum, piece) => sum + piece.tokens, 0);
      answer.told += ` · ${tokens} tokens, first after ${first.toFixed(0)} ms, ${(tokens / seconds).toFixed(1)}/s`;
    } catch (error) {
      answer.failed = error.name !== "AbortError";
      if (answer.failed) byId("note").textContent = error.message;
      answer.told += answer.failed ? " · failed" : " · stopped";
    }
    this.leaving = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
    this.draw();
  }

  take(answer, event) {
    answer.id = event.id;
    const choice = event.choices[0];
    const prompt = event.prompt_token_ids ?? choice?.prompt_token_ids;
    if (prompt) answer.promptTokens = prompt.length;
    if (event.continuation) {
      const { inherited_tokens: inherited, computed_tokens: computed, source } = event.continuation;
      answer.told = `inherited ${inherited} tokens (${source}), computed ${computed}`;
    }
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    if (choice?.token_ids?.length || content || thought) {
      answer.pieces.push({ text: content || thought || "", thought: Boolean(thought), tokens: choice.token_ids?.length ?? 1 });
    }
    if (event.usage && !answer.promptTokens) answer.promptTokens = event.usage.prompt_tokens;
    this.draw();
  }

  // --- drawing

  draw() {
    this.drawPath();
    this.drawTree();
  }

  lineage() {
    const line = [];
    for (let answer = this.chosen; answer !== null; answer = answer.parent) line.unshift(answer);
    return line;
  }

  drawPath() {
    const path = byId("path");
    const line = this.lineage();
    const turns = [];
    let bubble = null;
    line.forEach((answer, depth) => {
      if (answer.question !== null) turns.push(this.turn("user", answer.question));
      if (bubble === null || answer.question !== null || answer.cut === null) turns.push(bubble = this.turn("assistant", ""));
      const child = line[depth + 1];
      const shown = child?.cut != null ? answer.pieces.slice(0, child.cut) : answer.pieces;
      const part = document.createElement("span");
      if (answer.cut !== null) part.className = "branch";
      part.append(...shown.map((piece, index) => this.token(answer, piece, index)));
      bubble.append(part);
      if (child?.cut == null && answer.told) {
        const footer = document.createElement("footer");
        footer.textContent = answer.told;
        bubble.append(footer);
      }
    });
    const atEnd = path.scrollHeight - path.scrollTop - path.clientHeight < 40;
    path.replaceChildren(...turns);
    if (atEnd) path.scrollTop = path.scrollHeight;
  }

  turn(role, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${role}`;
    turn.textContent = text;
    return turn;
  }

  token(answer, piece, index) {
    const token = document.createElement("span");
    token.className = "token";
    if (piece.thought) token.className += " thought";
    if (this.marked?.answer === answer && this.marked.index === index) token.className += " marked";
    token.textContent = piece.text;
    token.addEventListener("click", () => {
      if (this.leaving === null) { this.mark({ answer, index }); byId("text").focus(); }
    });
    return token;
  }

  // Depth goes right; each leaf has a row of its own.
  drawTree() {
    const tree = byId("tree");
    const drawn = [];
    const onPath = new Set(this.lineage());
    let row = 0;
    const place = (answer, depth) => {
      const rows = answer.children.map((child) => place(child, depth + 1));
      const y = rows.length ? rows.reduce((sum, each) => sum + each, 0) / rows.length : row++;
      const at = { x: 14 + depth * 46, y: 14 + y * 24 };
      answer.children.forEach((_, i) => drawn.unshift(this.shape("line", {
        x1: at.x, y1: at.y, x2: 14 + (depth + 1) * 46, y2: 14 + rows[i] * 24,
      })));
      drawn.push(this.knot(answer, at, onPath));
      return y;
    };
    this.roots.forEach((root) => place(root, 0));
    tree.setAttribute("height", Math.max(40, row * 24 + 10));
    tree.replaceChildren(...drawn);
  }

  knot(answer, at, onPath) {
    const group = this.shape("g", {});
    if (onPath.has(answer)) group.classList.add("on");
    if (answer === this.chosen) group.classList.add("chosen");
    if (answer.failed) group.classList.add("failed");
    const circle = this.shape("circle", { cx: at.x, cy: at.y, r: 7 });
    const title = this.shape("title", {});
    title.textContent = answer.question ?? `from token ${answer.parent?.tokensTo(answer.cut - 1)}`;
    circle.append(title);
    circle.addEventListener("click", () => { if (this.leaving === null) { this.chosen = answer; this.mark(null); } });
    const label = this.shape("text", { x: at.x + 10, y: at.y + 3 });
    label.textContent = answer.cut === null ? "" : `@${answer.parent.tokensTo(answer.cut - 1)}`;
    group.append(circle, label);
    return group;
  }

  shape(kind, attributes) {
    const shape = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
    return shape;
  }
}
