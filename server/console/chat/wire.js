// Talking to the server: the key, errors as one kind of object, and the events of a stream.

const KEY = "bequest.key";

// The key lives as long as the tab: it is not written to the disk.
export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => sessionStorage.setItem(KEY, key);

export class Failure extends Error {
  constructor(message, { code = null, status = 0, retryAfter = null } = {}) {
    super(message);
    this.code = code;
    this.status = status;
    this.retryAfter = retryAfter; // seconds
  }
}

const authorised = () => (getKey() ? { Authorization: `Bearer ${getKey()}` } : {});

// A response that is fine, or a Failure; AbortError passes.
export async function call(path, { body, json, signal } = {}) {
  const options = { headers: authorised(), signal };
  if (json !== undefined || body !== undefined) options.method = "POST";
  if (json !== undefined) {
    options.body = JSON.stringify(json);
    options.headers["Content-Type"] = "application/json";
  } else if (body !== undefined) options.body = body;
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer. It may have stopped, or the network is down.", { code: "unreachable" });
  }
  if (response.ok) return response;
  throw await failureOf(response);
}

async function failureOf(response) {
  const wait = Number(response.headers.get("Retry-After"));
  const more = { status: response.status, retryAfter: wait > 0 ? wait : null };
  try {
    const { error } = await response.json();
    return new Failure(error.message, { ...more, code: error.code });
  } catch {
    return new Failure(`The server answered with status ${response.status}.`, more);
  }
}

// The events of a stream as objects, until [DONE]. A stream that ends without it has failed.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) throw new Failure("The connection was lost in the middle of the answer.", { code: "cut_off" });
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Failure(event.error.message, { code: event.error.code });
      yield event;
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { done: true };
  }
}
