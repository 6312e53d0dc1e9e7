// Numbers, sizes and times as people read them.

const COUNT = new Intl.NumberFormat("en");

export const count = (number) => COUNT.format(number);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// `then` and `now` in milliseconds.
export function ago(then, now = Date.now()) {
  const seconds = Math.max(0, (now - then) / 1000);
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(then).toLocaleDateString();
}

export function bytes(number) {
  const units = ["B", "KB", "MB", "GB"];
  const step = Math.min(3, Math.floor(Math.log10(Math.max(1, number)) / 3));
  return `${(number / 1000 ** step).toFixed(step && number < 10 * 1000 ** step ? 1 : 0)} ${units[step]}`;
}

// A short number for an axis or a legend.
export function short(number) {
  if (number >= 10_000) return `${Math.round(number / 1000)}k`;
  if (number >= 1000) return `${(number / 1000).toFixed(1)}k`;
  if (number >= 10 || number === Math.round(number)) return String(Math.round(number));
  return number.toPrecision(2);
}
