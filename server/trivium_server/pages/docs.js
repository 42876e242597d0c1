// The API, from openapi.json alone.
import { call, find, keyPanel, make } from "./common.js";

let document_ = null;
const panel = keyPanel(() => read());
const resolve = (schema) => (schema?.$ref ? document_.components.schemas[schema.$ref.split("/").pop()] : schema);
const refName = (schema) => schema?.$ref?.split("/").pop();

async function read() {
  try {
    document_ = await (await call("openapi.json")).json();
    find("status").className = "status good";
    find("state").textContent = `trivium ${document_.info.version}, OpenAPI ${document_.openapi}`;
    find("api").replaceChildren(...groups());
    filter();
  } catch (error) {
    find("status").className = "status bad";
    find("state").textContent = error.status === 401 ? "a key is needed" : error.message;
    if (error.status === 401) panel.ask(error.message);
  }
}

// Operations by the first part of their path.
function groups() {
  const found = new Map();
  for (const [path, methods] of Object.entries(document_.paths)) {
    const head = `/${path.split("/")[1]}`;
    if (!found.has(head)) found.set(head, []);
    for (const [method, operation] of Object.entries(methods)) found.get(head).push(entry(method, path, operation));
  }
  const several = [...found].filter(([, entries]) => entries.length > 1);
  const single = [...found].filter(([, entries]) => entries.length === 1).flatMap(([, entries]) => entries);
  return [...several, ["others", single]].map(([head, entries]) => make("section", { classes: "group" }, make("h2", {}, head), ...entries));
}

function entry(method, path, operation) {
  const open = operation.security?.length === 0 ? " · no key" : "";
  const head = make("summary", {}, make("span", { classes: `verb ${method}` }, method.toUpperCase()), make("code", {}, path), make("span", { classes: "quiet" }, `${operation.summary}${open}`));
  const found = make("details", { classes: "op", id: operation.operationId }, head);
  found.dataset.words = JSON.stringify([path, operation, fieldsOf(operation)]).toLowerCase();
  found.addEventListener("toggle", () => {
    if (found.open && found.childElementCount === 1) found.append(inside(operation));
  });
  return found;
}

const bodyOf = (operation) => operation.requestBody?.content?.["application/json"]?.schema;
const fieldsOf = (operation) => Object.keys(resolve(bodyOf(operation))?.properties ?? {});

function inside(operation) {
  const found = make("div", { classes: "inside" });
  for (const one of operation.parameters ?? []) found.append(make("p", {}, make("code", {}, one.name), ` in the ${one.in}`, one.required ? ", needed" : ""));
  for (const [media, { schema }] of Object.entries(operation.requestBody?.content ?? {})) found.append(...part(`Body, ${media}`, schema));
  for (const [status, reply] of Object.entries(operation.responses)) {
    const medias = Object.entries(reply.content ?? {});
    if (!medias.length) found.append(make("h3", {}, `${status}: ${reply.description}`));
    for (const [media, { schema }] of medias) found.append(...part(`${status}: ${reply.description}, ${media}`, schema));
  }
  return found;
}

function part(title, schema) {
  const shown = schema && Object.keys(schema).length ? [shape(schema, [])] : [];
  return [make("h3", {}, title), ...shown];
}

// A schema: its words, then its fields. seen: names of those around it, as types may hold themselves.
function shape(schema, seen) {
  const whole = resolve(schema);
  const name = refName(schema);
  const found = make("div", {});
  if (whole.description) found.append(make("p", { classes: "quiet" }, whole.description));
  const fields = Object.entries(whole.properties ?? {});
  if (!fields.length) {
    found.append(make("code", {}, kind(whole)));
    found.append(...nested(whole, [...seen, name]));
    return found;
  }
  fields.sort(([one], [other]) => Boolean(whole.required?.includes(other)) - Boolean(whole.required?.includes(one)));
  const rows = fields.map(([field, value]) => row(field, value, whole.required?.includes(field), [...seen, name]));
  const head = make("thead", {}, make("tr", {}, ...["field", "type"].map((text) => make("th", { scope: "col" }, text))));
  found.append(make("div", { classes: "scroll" }, make("table", {}, head, make("tbody", {}, ...rows))));
  return found;
}

function row(field, value, needed, seen) {
  const name = make("td", {}, make("code", {}, field), ...(needed ? [make("span", { classes: "must", title: "needed" }, " needed")] : []));
  const words = [make("code", {}, kind(value))];
  if (value.description) words.push(make("p", { classes: "quiet" }, value.description));
  return make("tr", {}, name, make("td", {}, ...words, ...nested(value, seen)));
}

// The types that a schema speaks of, to be opened.
function nested(schema, seen) {
  const names = [...new Set(refs(schema))].filter((name) => !seen.includes(name));
  return names.map((name) => {
    const found = make("details", {}, make("summary", {}, make("code", {}, name)));
    found.addEventListener("toggle", () => {
      if (found.open && found.childElementCount === 1) found.append(shape({ $ref: `#/components/schemas/${name}` }, seen));
    });
    return found;
  });
}

function refs(schema) {
  if (!schema || typeof schema !== "object") return [];
  const own = schema.$ref ? [refName(schema)] : [];
  return [...own, ...[...(schema.anyOf ?? []), schema.items, schema.additionalProperties, ...(schema.prefixItems ?? [])].flatMap(refs)];
}

// A type in words.
function kind(schema) {
  if (schema.$ref) return refName(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(kind).join(" | ");
  const limits = [["minimum", "≥"], ["maximum", "≤"], ["exclusiveMinimum", ">"], ["exclusiveMaximum", "<"], ["pattern", "like"]];
  const bounds = limits.filter(([name]) => schema[name] !== undefined).map(([name, sign]) => ` ${sign} ${schema[name]}`);
  const base = schema.type === "array" ? `${schema.items ? kind(schema.items) : "any"}[]` : [schema.type ?? "any"].flat().join(" | ");
  const def = schema.default === undefined || schema.default === null ? "" : ` = ${JSON.stringify(schema.default)}`;
  return `${base}${bounds.join(",")}${def}`;
}

function filter() {
  const word = find("filter").value.trim().toLowerCase();
  for (const one of document.querySelectorAll(".op")) one.hidden = !one.dataset.words.includes(word);
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".op:not([hidden])");
}

find("filter").addEventListener("input", filter);
read();
