// The dashboard: asks for its data every two seconds while someone looks, and shows it.
import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { call, count, find, keyPanel, make, share, size, span, time } from "./common.js";

const EVERY = 2000;
const PHASES = ["queue", "prefill", "decode"];
const NAMES = {
  time_to_first_token: "Time to first token", inter_token_latency: "Between tokens", time_per_output_token: "Time per output token",
  queue_time: "Queue", prefill_time: "Prefill", decode_time: "Decode", e2e_time: "Arrival to end",
};
const percentiles = (classes) => ["p50", "p90", "p99"].map((name, i) => ({ name, classes: `${classes} ${["", "soft", "softer"][i]}` }));
const rate = (value) => (value === null ? "–" : `${count(value)}/s`);

const charts = {
  first: new Chart(find("first-chart"), "Time to first token", percentiles("prefill"), { format: time, bridge: true }),
  gap: new Chart(find("gap-chart"), "Time between tokens", percentiles("decode"), { format: time, bridge: true }),
  requests: new Chart(
    find("requests-chart"), "Requests",
    [{ name: "running", classes: "decode", area: true }, { name: "waiting", classes: "queue soft" }], { format: count, least: 2 },
  ),
  decode: new Chart(find("decode-chart"), "Tokens made a second", [{ name: "decode", classes: "decode", area: true }], { format: rate }),
  prefill: new Chart(find("prefill-chart"), "Prompt tokens computed a second", [{ name: "prefill", classes: "prefill", area: true }], { format: rate }),
  cache: new Chart(
    find("cache-chart"), "KV cache",
    [{ name: "in use", classes: "plain", area: true }, { name: "prefix hits", classes: "prefill soft" }], { format: share, top: 1, bridge: true },
  ),
};

let timer = null;
let asked = 0;
const chosen = () => document.querySelector("input[name=window]:checked").value;
const model = () => find("model").value;
const panel = keyPanel(() => look());
new Chat(() => model() || find("model").options[1]?.value, (error) => panel.ask(error.message));

function state(kind, words) {
  find("status").className = `status ${kind}`;
  find("state").textContent = words;
  find("figures").classList.toggle("stale", kind === "bad");
}

async function look() {
  clearTimeout(timer);
  const mine = ++asked;
  let again = true;
  try {
    const path = `dashboard/data/${chosen()}${model() ? `/${encodeURIComponent(model())}` : ""}`;
    const found = await (await call(path, { signal: AbortSignal.timeout(10_000) })).json();
    if (mine !== asked) return;
    show(found);
  } catch (error) {
    if (mine !== asked) return;
    again = error.status !== 401;
    if (!again) panel.ask(error.message);
    if (error.status === 404 && model()) find("model").value = "";
    if (again) state("bad", "no connection, trying again");
    else state("wait", "a key is needed");
  }
  if (again && !document.hidden) timer = setTimeout(look, EVERY);
}

function put(id, big, unit, ...sub) {
  find(`${id}-big`).replaceChildren(big, ...(unit ? [" ", make("small", {}, unit)] : []));
  find(`${id}-sub`).replaceChildren(...sub.map((part) => (typeof part === "string" ? make("span", {}, part) : part)));
}

const last = (values) => values.findLast((value) => value !== null) ?? null;
const swatch = (classes, text) => make("span", { classes: `swatch ${classes}` }, make("span", { classes: "plain" }, text));

function show(data) {
  const loading = data.models.every((one) => !one.ready);
  const words = data.draining ? "finishing, then stopping" : loading ? "no model is ready" : "serving";
  state(data.draining || loading ? "wait" : "good", `${words} · trivium ${data.version} · up ${span(data.uptime)}`);
  pick(data.models);
  measures(data);
  find("ended").textContent = `${count(data.requests_ended)} ended in this window`;
  find("all-times").replaceChildren(...Object.entries(NAMES).map(([name, words]) => quantileRow(words, data.latency[name])));
  flows(data);
  find("models").replaceChildren(...data.models.map(card));
}

function pick(models) {
  const names = models.map((one) => one.name);
  const list = find("model");
  find("model-box").hidden = names.length < 2;
  if (names.join("\n") === [...list.options].slice(1).map((one) => one.value).join("\n")) return;
  const before = list.value;
  list.replaceChildren(make("option", { value: "" }, "all models"), ...names.map((name) => make("option", { value: name }, name)));
  list.value = names.includes(before) ? before : "";
}

function measures({ latency, series, current, step, prefix_hit_rate: hits }) {
  for (const [id, name, classes] of [["first", "time_to_first_token", "prefill"], ["gap", "inter_token_latency", "decode"]]) {
    const { p50, p90, p99 } = latency[name];
    const parts = [["median", "", null], ["p90", "soft", p90], ["p99", "softer", p99]];
    put(id, time(p50), "median", ...parts.map(([words, look, value]) => swatch(`${classes} ${look}`, value === null ? words : `${words} ${time(value)}`)));
    charts[id].update(step, [series[name].p50, series[name].p90, series[name].p99], "no request ended in this window");
  }
  put("requests", count(current.running), "running", swatch("decode", "running"), swatch("queue soft", `${count(current.waiting)} waiting`),
    ...(current.waiting_tokens ? [`${count(current.waiting_tokens)} prompt tokens wait`] : []));
  charts.requests.update(step, [series.running, series.waiting], "nothing was read yet");
  for (const [id, words] of [["decode", "made for all requests"], ["prefill", "of prompts computed"]]) {
    const values = series[`${id}_tokens_per_second`];
    put(id, count(last(values)), "tokens/s", `${words}, by the wall clock`);
    charts[id].update(step, [values], "nothing was read yet");
  }
  const used = current.kv_pages ? (current.kv_pages - current.kv_pages_free) / current.kv_pages : null;
  put("cache", share(used), `of ${count(current.kv_pages)} pages in use`, swatch("plain", "in use"), swatch("prefill soft", `prefix hits ${share(hits)} of prompt tokens`));
  charts.cache.update(step, [series.kv_cache_usage, series.prefix_hit_rate], "nothing was read yet");
}

function quantileRow(words, { count: found, p50, p90, p99 }) {
  const cells = [count(found), time(p50), time(p90), time(p99)].map((text) => make("td", { classes: "n" }, text));
  return make("tr", {}, make("th", { scope: "row" }, words), ...cells);
}

function flows({ requests, now, models }) {
  const longest = scale(requests.map((one) => one.total));
  find("no-requests").hidden = requests.length > 0;
  find("flow-table").hidden = !requests.length;
  find("flows").replaceChildren(...requests.map((one) => flow(one, longest, now, models.length > 1)));
}

// What a whole bar stands for: the longest, unless it is far from all others, which is then cut off.
function scale(totals) {
  const sorted = [...totals, 1e-9].sort((a, b) => a - b);
  const [most, longest] = [1.5 * sorted[Math.floor(0.9 * (sorted.length - 1))], sorted[sorted.length - 1]];
  return longest > 2 * most ? most : longest;
}

function flow(one, longest, now, named) {
  const water = make("div", { classes: one.total > longest ? "water cut" : "water" });
  water.setAttribute("role", "img");
  water.setAttribute("aria-label", PHASES.map((phase) => `${phase} ${time(one[phase])}`).join(", "));
  water.title = water.getAttribute("aria-label");
  for (const phase of PHASES.filter((name) => one[name])) {
    const part = make("i", { classes: phase });
    part.style.width = `${(100 * one[phase]) / longest}%`;
    water.append(part);
  }
  const ago = Math.max(0, now - one.began - one.total);
  const bad = ["error", "abort"].includes(one.finish_reason);
  const speed = one.tokens_per_second === null ? "–" : `${one.tokens_per_second.toFixed(1)}`;
  return make("tr", {},
    make("td", { classes: "quiet" }, ago < 1 ? "now" : `${span(ago)} ago`, ...(named ? [make("span", { classes: "who" }, ` · ${one.model}`)] : [])),
    make("td", { classes: "wide" }, water),
    make("td", { classes: "n" }, time(one.total)),
    make("td", { classes: "n", title: `${one.prompt_tokens} prompt tokens, ${one.cached_tokens} of them cached, ${one.generated_tokens} made` }, `${one.prompt_tokens} → ${one.generated_tokens}`),
    make("td", { classes: "n less" }, one.cached_tokens ? `${one.cached_tokens}` : "–"),
    make("td", { classes: "n less" }, speed),
    make("td", { classes: "n" }, make("span", { classes: `end${bad ? " bad" : ""}` }, one.operation === "embeddings" ? "embedded" : one.finish_reason)),
  );
}

function card(one) {
  const facts = [];
  if (one.backend !== null) {
    const formats = one.weights.map((way) => `${way.storage}${way.storage === way.resident ? "" : ` → ${way.resident}`}${way.lossless ? "" : " (lossy)"}`);
    facts.push(
      ["backend", `${one.backend}:${one.device_index} ${one.backend_version}`], ["device", one.device],
      ["architecture", one.architecture], ["context", `${count(one.max_model_len)} tokens`],
      ["weights", [...new Set(formats)].join(", ")], ["KV cache", `${one.kv_format}, ${count(one.pages)} pages of ${one.page_tokens} tokens`],
      ["memory", `${size(one.weight_memory)} weights, ${size(one.kv_memory)} KV cache`],
      ["free on device", one.device_memory ? `${size(one.device_free)} of ${size(one.device_memory)}` : "–"],
    );
  }
  const list = make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const found = make("article", { classes: "model" }, make("header", {}, make("h3", {}, one.name), make("span", { classes: "end" }, one.ready ? "ready" : "not loaded")), list);
  if (one.device_memory) found.append(memory(one));
  return found;
}

// How much of the device's memory is the weights', the cache's and others'.
function memory(one) {
  const others = Math.max(one.device_memory - one.device_free - one.weight_memory - one.kv_memory, 0);
  const parts = [["prefill", "weights", one.weight_memory], ["decode", "KV cache", one.kv_memory], ["plain", "others", others]];
  const bar = make("div", { classes: "memory" });
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", parts.map(([, name, bytes]) => `${name} ${size(bytes)}`).join(", "));
  bar.title = bar.getAttribute("aria-label");
  for (const [classes, , bytes] of parts) {
    const part = make("i", { classes });
    part.style.width = `${(100 * bytes) / one.device_memory}%`;
    bar.append(part);
  }
  return bar;
}

for (const input of document.querySelectorAll("input[name=window]")) input.addEventListener("change", look);
find("model").addEventListener("change", look);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
look();
