// The costs: a tree of scopes beside their sums, and the operations of what is chosen in it.

const SPLITS = {
  both: [["forward", [0, 3]], ["backward", [1, 2, 4]]],
  total: [["", [0, 1, 2, 3, 4]]],
  five: [["forward", [0]], ["backward", [1]], ["recomputed", [2]], ["passes, fwd", [3]], ["passes, bwd", [4]]],
};
const ALL = SPLITS.total[0][1];

class Tree {
  constructor(openCalls) {
    this.openCalls = openCalls;
    this.split = "both";
    this.table = new Table($("tree"), {
      role: "treegrid", label: "Costs by scope", columns: () => this.columns(),
      cell: (i, column, cell, row) => this.cell(i, column, cell, row),
      onChoose: (i) => this.openCalls(this.rows[i]),
      onOpen: (i) => this.fold(this.rows[i]),
      onKey: (key, i) => this.key(key, i),
      onSort: (sort) => this.sortBy(sort),
    });
    $("split").addEventListener("change", () => {
      this.split = $("split").value;
      this.sort = null;
      this.show(true);
    });
    $("kinds").addEventListener("change", () => this.begin());
    $("fold-all").addEventListener("click", () => {
      this.open.clear();
      this.open.add(this.root.key);
      this.show();
    });
    $("unfold-all").addEventListener("click", () => {
      const add = (entry) => {
        this.open.add(entry.key);
        this.below(entry).forEach(add);
      };
      add(this.root);
      this.show();
    });
  }

  use(graph) {
    this.graph = graph;
    const there = KEYS.filter((key) => graph.sum(0, ALL, key) > 0);
    this.measures = new Set(there.filter((key) => !["sending", "exposed"].includes(key)));
    $("measures").replaceChildren(...KEYS.map((key) => this.measureBox(key, there.includes(key))));
    $("cost-words").textContent = graph.is_measured
      ? "Measured: the profiler's, of a run. Time: an estimate, by the rates above."
      : "Not measured: give a run's folder with a profile in it to see measured times beside the estimates.";
    this.begin();
  }

  measureBox(key, isThere) {
    const box = el("input", {
      type: "checkbox", checked: this.measures.has(key), disabled: !isThere,
      onchange: () => {
        if (box.checked) this.measures.add(key);
        else this.measures.delete(key);
        this.show(true);
      },
    });
    const { title, help } = MEASURES[key];
    return el("label", {}, box, ` ${title}: ${isThere ? help : "none in this graph"}`);
  }

  begin() {
    this.root = this.entry([0], 0, "");
    this.open = new Set([this.root.key]);
    this.sort = null;
    // Begin where there is something to choose among.
    const calls = (entry) => this.value(entry, "calls", ALL);
    for (let each = this.root, rows = 1; rows < 8 && this.below(each).length; ) {
      this.open.add(each.key);
      rows += this.below(each).length;
      each = this.below(each).reduce((a, b) => (calls(b) > calls(a) ? b : a));
    }
    this.show();
    this.table.choose(0);
  }

  entry(scopes, depth, above) {
    return { scopes, depth, key: `${above}/${scopes[0]}` };
  }

  below(entry) {
    if (entry.children) return entry.children;
    const scopes = entry.scopes.flatMap((scope) => this.graph.children[scope]);
    const kinds = new Map();
    for (const scope of scopes) {
      const kind = $("kinds").checked ? this.kind(scope) : scope;
      if (!kinds.has(kind)) kinds.set(kind, []);
      kinds.get(kind).push(scope);
    }
    entry.children = [...kinds.values()].map((each) => this.entry(each, entry.depth + 1, entry.key));
    return entry.children;
  }

  // Modules of one class that are numbered, or have one name; calls of one function.
  kind(scope) {
    const [name, what] = ["name", "qualname"].map((key) => this.graph.text("scopes", key, scope));
    return this.graph.isModule(scope) ? `${what} ${/^\d+$/.test(name) ? "*" : name}` : what;
  }

  value(entry, measure, parts) {
    return entry.scopes.reduce((total, scope) => total + this.graph.sum(scope, parts, measure), 0);
  }

  columns() {
    const measures = KEYS.filter((key) => this.measures.has(key));
    const found = [{ title: "Scope", width: 240, grow: true, help: "modules, and functions()", sort: "" }];
    for (const key of measures) {
      SPLITS[this.split].forEach(([sub, parts], k) => {
        const { title, help } = MEASURES[key];
        const words = `${title}${sub ? ", " + sub : ""}: ${help}`;
        found.push({
          title: k ? "\u00a0" : title, sub, num: true, group: !k, width: this.split === "total" ? 100 : 82, key, parts,
          help: words, sort: `${key} ${k}`,
        });
      });
    }
    return found;
  }

  sortBy(sort) {
    this.sort = sort && sort !== this.sort ? sort : null;
    this.show(true);
  }

  show(keepPlace) {
    const chosen = keepPlace && this.rows ? this.rows[this.table.chosen] : null;
    const order = this.sort ? this.columns().find((each) => each.sort === this.sort) : null;
    this.table.sorted = order ? this.sort : null;
    this.rows = [];
    const add = (entry) => {
      this.rows.push(entry);
      if (!this.open.has(entry.key)) return;
      let children = this.below(entry);
      if (order) {
        const weight = new Map(children.map((each) => [each, this.value(each, order.key, order.parts)]));
        children = [...children].sort((a, b) => weight.get(b) - weight.get(a));
      }
      children.forEach(add);
    };
    add(this.root);
    this.table.chosen = chosen ? this.rows.findIndex((each) => each.key === chosen.key) : this.table.chosen;
    this.table.show(this.rows.length, true);
  }

  cell(i, column, cell, row) {
    const entry = this.rows[i];
    if (column.key) {
      number(cell, column.key, this.value(entry, column.key, column.parts), this.value(this.root, column.key, ALL));
      return;
    }
    const isOpen = this.open.has(entry.key);
    const has = this.below(entry).length > 0;
    row.setAttribute("aria-level", entry.depth + 1);
    if (has) row.setAttribute("aria-expanded", isOpen);
    cell.style.paddingLeft = `${4 + entry.depth * 14}px`;
    const [name, what] = this.labelOf(entry);
    cell.title = this.tip(entry);
    cell.append(
      el("button", {
        class: "fold", tabindex: "-1", "aria-label": isOpen ? "fold" : "unfold", disabled: !has,
        onclick: (event) => {
          event.stopPropagation();
          this.fold(entry);
        },
      }, has ? (isOpen ? "▾" : "▸") : ""),
      el("span", {}, name), what ? el("span", { class: "soft" }, ` ${what}`) : "",
    );
  }

  labelOf(entry) {
    const [name, what] = this.graph.label(entry.scopes[0]);
    if (entry.scopes.length === 1) return [name, what];
    const plain = this.graph.text("scopes", "name", entry.scopes[0]);
    const shared = this.graph.isModule(entry.scopes[0]) ? (/^\d+$/.test(plain) ? "each" : plain) : `${plain}()`;
    return [shared, `${what} × ${entry.scopes.length}`.trim()];
  }

  tip(entry) {
    const scope = entry.scopes[0];
    if (!scope) return "the whole graph";
    return ["qualname", "path"].map((key) => this.graph.text("scopes", key, scope)).filter(Boolean).join("\n");
  }

  fold(entry) {
    if (!this.below(entry).length) return;
    if (this.open.has(entry.key)) this.open.delete(entry.key);
    else this.open.add(entry.key);
    this.show(true);
  }

  key(key, i) {
    const entry = this.rows[i];
    const isOpen = this.open.has(entry.key) && this.below(entry).length;
    if (key === "ArrowRight" && !isOpen) this.fold(entry);
    else if (key === "ArrowRight") this.table.choose(i + 1);
    else if (key === "ArrowLeft" && isOpen) this.fold(entry);
    else if (key === "ArrowLeft") this.table.choose(this.parent(i));
    else if (key === "*") {
      this.below(entry).forEach((each) => this.open.add(each.key));
      this.open.add(entry.key);
      this.show(true);
    } else return false;
    return true;
  }

  parent(i) {
    for (let k = i - 1; k >= 0; k--) if (this.rows[k].depth < this.rows[i].depth) return k;
    return 0;
  }

  // Unfold to a scope, and choose it.
  reveal(scope) {
    const path = [];
    for (let each = scope; each > 0; each = this.graph.scopes.parent[each]) path.unshift(each);
    let entry = this.root;
    for (const each of path) {
      this.open.add(entry.key);
      entry = this.below(entry).find((child) => child.scopes.includes(each));
    }
    this.show(true);
    this.table.choose(this.rows.indexOf(entry));
  }
}

const CALL_COLUMNS = [
  { title: "Node", width: 210, grow: true, code: true }, { title: "Operator", width: 230, grow: true, code: true },
  { title: "Value", width: 190, code: true }, { title: "Part", width: 150 }, { title: "Source", width: 160, code: true },
];

// The operations of some scopes, of an operator, or those that a search found.
class Calls {
  constructor() {
    this.table = new Table($("ops"), {
      label: "Operations", columns: () => this.columns(), cell: (i, column, cell) => this.cell(i, column, cell),
      onChoose: (i) => this.tell(this.calls[i]), onSort: (sort) => this.sortBy(sort),
      empty: "No operation is charged to this scope itself; those of the scopes below are left out.",
    });
    $("below").addEventListener("change", () => this.scopes && this.ofScopes(this.scopes, this.title));
  }

  use(graph) {
    this.graph = graph;
    $("op").replaceChildren();
  }

  ofScopes(scopes, title) {
    $("below").parentElement.hidden = false;
    this.open(this.graph.callsBelow(scopes, $("below").checked), title);
    this.scopes = scopes;
  }

  open(calls, title) {
    [this.scopes, this.calls, this.title, this.sort] = [null, calls, title, null];
    this.all = calls;
    $("ops-title").textContent = `Operations: ${title}`;
    $("ops-words").textContent = calls.length ? `${whole(calls.length)}, in the order in which they run` : "";
    $("op").replaceChildren();
    this.table.sorted = null;
    this.table.show(calls.length);
  }

  columns() {
    const { graph } = this;
    const measures = KEYS.filter((key) => key !== "calls" && graph.cost[key] && graph.sum(0, ALL, key) > 0);
    return [...CALL_COLUMNS, ...measures.map((key) => ({
      title: MEASURES[key].title, help: MEASURES[key].help, num: true, width: 92, key, sort: key,
    }))];
  }

  sortBy(key) {
    this.sort = this.sort === key ? null : key;
    this.table.sorted = this.sort;
    const cost = this.graph.cost[key];
    this.calls = this.sort ? [...this.all].sort((a, b) => cost[b] - cost[a]) : this.all;
    this.table.show(this.calls.length);
  }

  cell(i, column, cell) {
    const [graph, call] = [this.graph, this.calls[i]];
    if (column.key) {
      number(cell, column.key, graph.cost[column.key][call]);
      return;
    }
    const text = {
      Node: graph.call("name", call), Operator: graph.call("operator", call), Value: graph.call("value", call),
      Part: this.part(call), Source: graph.call("source", call),
    }[column.title];
    cell.title = text;
    cell.append(text);
  }

  part(call) {
    const [part, origin] = [this.graph.parts[this.graph.calls.part[call]], this.graph.call("origin", call)];
    return part.startsWith("passes") ? `${part.split(" ").pop()}, ${origin}` : part;
  }

  reveal(call) {
    const place = this.calls.indexOf(call);
    if (place < 0) {
      this.open([call], this.graph.call("name", call));
      this.table.choose(0);
    } else this.table.choose(place);
  }

  link(call) {
    if (call < 0) return el("code", {}, `${this.graph.strings[-1 - call]} (given) `);
    return el("button", { class: "code", onclick: () => this.goTo(call) }, this.graph.call("name", call));
  }

  links(calls) {
    if (!calls.length) return "";
    const some = calls.slice(0, 40).map((each) => this.link(each));
    return el("span", {}, ...some, calls.length > 40 ? `and ${calls.length - 40} more` : "");
  }

  users(call) {
    if (!this.graph.users) {
      this.graph.users = this.graph.calls.name.map(() => []);
      this.graph.calls.inputs.forEach((inputs, i) => inputs.forEach((x) => x >= 0 && this.graph.users[x].push(i)));
    }
    return this.graph.users[call];
  }

  tell(call) {
    const graph = this.graph;
    const lives = graph.memory.owner.flatMap((owner, k) => (owner === call ? [k] : []));
    const name = (i) => graph.call("name", i);
    facts($("op"), [
      ["node", el("code", {}, name(call))],
      ["call", el("code", {}, graph.call("call", call))],
      ["value", el("code", {}, graph.call("value", call))],
      ["scope", graph.path(graph.calls.scope[call])],
      ["made by", this.part(call)],
      ["source", graph.call("source", call)],
      ["stands for", graph.call("places", call)],
      ["reads", this.links(graph.calls.inputs[call])],
      ["read by", this.links(this.users(call))],
      ["memory", lives.map((k) => `${bytes(graph.memory.bytes[k])}, from ${name(graph.memory.begin[k])} to ` +
        `${name(graph.memory.end[k])}`).join("\n")],
      ["estimate", `${time(graph.calls.begin[call])} to ${time(graph.calls.end[call])} after the step's begin` +
        `${graph.isSent(call) ? ", on its group's stream" : ""}`],
      ...KEYS.filter((key) => key !== "calls" && graph.cost[key] && graph.cost[key][call])
        .map((key) => [MEASURES[key].title.toLowerCase(), MEASURES[key].exact(graph.cost[key][call])]),
    ]);
  }
}
