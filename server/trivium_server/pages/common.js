// What the pages share: elements, figures in words, and calls with the key, which stays in this tab's sessionStorage.
const STORE = "trivium-key";

export const find = (id) => document.getElementById(id);

export function make(name, given = {}, ...inside) {
  const { classes, ...rest } = given;
  const one = Object.assign(document.createElement(name), rest);
  if (classes) one.className = classes;
  one.append(...inside);
  return one;
}

export const key = {
  get: () => sessionStorage.getItem(STORE) || "",
  set: (text) => (text ? sessionStorage.setItem(STORE, text) : sessionStorage.removeItem(STORE)),
};

export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    message = text.slice(0, 200) || reply.statusText;
  }
  throw Object.assign(new Error(message), { status: reply.status });
}

// The panel that asks for the key. changed(): there is another one.
export function keyPanel(changed) {
  const [panel, form, field, said, opener, drop] = ["key-panel", "key-form", "key", "key-said", "key-open", "key-drop"].map(find);
  const shown = (on) => {
    panel.hidden = !on;
    opener.setAttribute("aria-expanded", String(on));
    drop.hidden = !key.get();
  };
  opener.addEventListener("click", () => {
    shown(panel.hidden);
    if (!panel.hidden) field.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    field.value = "";
    shown(false);
    changed();
  });
  drop.addEventListener("click", () => {
    key.set("");
    shown(false);
    changed();
  });
  return {
    ask(message) {
      said.textContent = key.get() ? message : "";
      if (panel.hidden) shown(true);
    },
  };
}

const trimmed = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });

// A time in words; null is a dash.
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1e3;
  if (ms < 10) return `${trimmed(ms, ms < 1 ? 2 : 1)} ms`;
  if (ms < 1000) return `${trimmed(ms, 0)} ms`;
  return seconds < 100 ? `${trimmed(seconds, seconds < 10 ? 2 : 1)} s` : `${trimmed(seconds, 0)} s`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : trimmed(value, value < 10 ? 1 : 0);
}

export const share = (value) => (value === null || value === undefined ? "–" : `${trimmed(value * 100, value < 0.1 ? 1 : 0)} %`);

export function size(bytes) {
  if (!bytes) return "–";
  const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(bytes) / 10), steps.length - 1);
  return `${trimmed(bytes / 1024 ** power, power < 2 ? 0 : 1)} ${steps[power]}`;
}

export function span(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([unit]) => seconds >= unit);
  if (at < 0) return "0 s";
  const [unit, name] = parts[at];
  const rest = parts[at + 1] && Math.floor((seconds % unit) / parts[at + 1][0]);
  return `${Math.floor(seconds / unit)} ${name}${rest && at < 2 ? ` ${rest} ${parts[at + 1][1]}` : ""}`;
}
