// Words, numbers, and a graph's columns. All text reaches the page as text, never as markup.

const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}

const whole = (x) => Math.round(x).toLocaleString("en-US");

function digits(x) {
  if (x >= 1000) return whole(x);
  return x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
}

function scaled(x, step, units) {
  let i = 0;
  while (Math.abs(x) >= step && i < units.length - 1) {
    x /= step;
    i += 1;
  }
  return `${i ? digits(x) : whole(x)}${units[i] ? " " + units[i] : ""}`;
}

const bytes = (x) => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flops = (x) => scaled(x, 1000, ["", "k", "M", "G", "T", "P", "E"]);
const time = (ns) => scaled(ns, 1000, ["ns", "µs", "ms", "s"]);
const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(1)} %` : "0 %");

// How each measure is named, shown short, and told exactly.
const MEASURES = {
  calls: { title: "Calls", short: whole, exact: (x) => `${whole(x)} operations`, help: "operations of the graph" },
  flops: { title: "FLOPs", short: flops, exact: (x) => `${whole(x)} FLOP`, help: "of products and attention" },
  moved: { title: "Moved", short: bytes, exact: (x) => `${whole(x)} bytes`, help: "bytes read and written" },
  held: { title: "At peak", short: bytes, exact: (x) => `${whole(x)} bytes`, help: "bytes held at the step's peak" },
  received: { title: "Received", short: bytes, exact: (x) => `${whole(x)} bytes`, help: "bytes of collectives" },
  sending: { title: "Sending", short: time, exact: (x) => `${whole(x)} ns`, help: "collectives, beside the rest; estimate" },
  exposed: { title: "Exposed", short: time, exact: (x) => `${whole(x)} ns`, help: "waiting for collectives; estimate" },
  time: { title: "Time", short: time, exact: (x) => `${whole(x)} ns`, help: "with what is exposed; estimate" },
  measured: { title: "Measured", short: time, exact: (x) => `${whole(x)} ns`, help: "by the profiler" },
};
const KEYS = Object.keys(MEASURES);

// A graph's columns, with what the views ask of them.
class Graph {
  constructor(data, strings) {
    Object.assign(this, data);
    this.strings = strings;
    this.numCalls = data.calls.name.length;
    this.cost = { calls: new Float64Array(this.numCalls).fill(1) };
    for (const key of data.measures) this.cost[key] = Float64Array.from(data.calls[key]);
    this.lastBelow(); // scopes stand before what is below them
    this.sumUp();
  }

  text(table, key, i) {
    return this.strings[this[table][key][i]];
  }

  call(key, i) {
    return this.strings[this.calls[key][i]];
  }

  lastBelow() {
    const parent = this.scopes.parent;
    this.last = Int32Array.from(parent, (_, i) => i);
    this.children = parent.map(() => []);
    for (let i = parent.length - 1; i > 0; i--) this.last[parent[i]] = Math.max(this.last[parent[i]], this.last[i]);
    for (let i = 1; i < parent.length; i++) this.children[parent[i]].push(i);
  }

  // sums[(scope * parts + part) * measures + measure]
  sumUp() {
    const [P, M, parent] = [this.parts.length, KEYS.length, this.scopes.parent];
    this.sums = new Float64Array(parent.length * P * M);
    for (let i = 0; i < this.numCalls; i++) {
      const at = (this.calls.scope[i] * P + this.calls.part[i]) * M;
      for (let k = 0; k < M; k++) this.sums[at + k] += this.cost[KEYS[k]][i];
    }
    for (let i = parent.length - 1; i > 0; i--) {
      for (let k = 0; k < P * M; k++) this.sums[parent[i] * P * M + k] += this.sums[i * P * M + k];
    }
  }

  sum(scope, parts, measure) {
    const [P, M, k] = [this.parts.length, KEYS.length, KEYS.indexOf(measure)];
    return parts.reduce((total, part) => total + this.sums[(scope * P + part) * M + k], 0);
  }

  // A scope's own words: [what it is called, what it is]
  label(scope) {
    if (!scope) return ["step", "the whole graph"];
    const [name, qualname] = [this.text("scopes", "name", scope), this.text("scopes", "qualname", scope)];
    const last = qualname.slice(qualname.lastIndexOf(".") + 1);
    const count = this.scopes.count[scope] ? `#${this.scopes.count[scope]}` : "";
    return this.isModule(scope) ? [(name || "model") + count, last] : [`${name}()${count}`, ""];
  }

  isModule(scope) {
    return this.text("scopes", "type", scope) === "module";
  }

  path(scope) {
    const words = [];
    for (let each = scope; each > 0; each = this.scopes.parent[each]) words.unshift(this.label(each).filter(Boolean).join(": "));
    return words.join(" › ") || "step";
  }

  // The innermost module that a scope is in.
  moduleOf(scope) {
    let each = scope;
    while (each > 0 && !this.isModule(each)) each = this.scopes.parent[each];
    return each > 0 ? this.text("scopes", "path", each) || "the model itself" : "outside any module";
  }

  moduleOfCall(i) {
    return this.moduleOf(this.calls.scope[i]);
  }

  callsBelow(scopes, below) {
    const found = [];
    for (let i = 0; i < this.numCalls; i++) {
      const at = this.calls.scope[i];
      if (scopes.some((scope) => (below ? at >= scope && at <= this.last[scope] : at === scope))) found.push(i);
    }
    return found;
  }

  isSent(i) {
    this.sentCalls = this.sentCalls || new Set(this.collectives.call);
    return this.sentCalls.has(i);
  }
}

async function read() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser can't unpack the data (no DecompressionStream); open the file in a newer one");
  }
  const packed = Uint8Array.from(atob($("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const PART_COLORS = ["forward", "backward", "recomputed", "pf", "pb"];

// What a colour means.
function swatch(name, words) {
  const box = el("span", { class: "swatch" });
  box.style.background = `var(--${name})`;
  return [box, words];
}

// A canvas as wide as its place, sharp on every screen: gives its context, and its size in CSS pixels.
function sharp(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  return [context, width, height];
}

function hint(event, text) {
  const box = $("hint");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8))}px`;
}

function facts(host, pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  host.replaceChildren(el("dl", {}, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}
