// What each pass did: its time, and the nodes that it added, removed, changed and moved.
const KINDS = ["added", "removed", "changed", "moved"];
const MEASURED = { Peak: [0, "held"], Received: [1, "received"], Exposed: [2, "exposed"] }; // of large graphs once

class Passes {
  constructor() {
    const kinds = KINDS.map((title) => ({ title, num: true, width: 88 }));
    this.table = new Table($("pass-table"), {
      label: "Passes", columns: [
        { title: "Pass", width: 210, grow: true }, { title: "Time", num: true, width: 88 },
        { title: "Calls after", num: true, width: 100 },
        { title: "Peak", num: true, width: 92, help: "bytes held at the peak without the inputs, after it" },
        { title: "Received", num: true, width: 92, help: "bytes of collectives, after it" },
        { title: "Exposed", num: true, width: 88, help: "waiting for collectives, after it; estimate" }, ...kinds,
        { title: "Operators", width: 300, grow: true, help: "the largest changes of their number" },
      ],
      cell: (i, column, cell) => this.passCell(this.passes[i], column, cell), onChoose: (i) => this.open(i),
      empty: "No passes were watched.",
    });
    const sums = (id, title, list) => new Table($(id), {
      label: title, columns: [{ title, width: 190, grow: true }, ...kinds.map((each) => ({ ...each, width: 70 }))],
      cell: (i, column, cell) => this.sumCell(list()[i], column, cell), empty: "It changed nothing.",
      onChoose: (i) => this.list((k) => this.keyOf(id, k) === list()[i].key, list()[i].key),
    });
    this.byOperator = sums("by-operator", "Operator", () => this.operators);
    this.byModule = sums("by-module", "Module", () => this.modules);
    this.changes = new Table($("changes"), {
      label: "Nodes that changed", columns: [
        { title: "How", width: 84 }, { title: "Node", width: 200, code: true },
        { title: "Before", width: 330, grow: true, code: true }, { title: "After", width: 330, grow: true, code: true },
      ],
      cell: (i, column, cell, row) => this.changeCell(this.listed[i], column, cell, row),
      onChoose: (i) => this.tell(this.listed[i]), empty: "No node of this kind.",
    });
    $("change-kind").addEventListener("change", () => this.list(() => true, ""));
  }

  use(graph) {
    this.graph = graph;
    this.passes = graph.passes;
    for (const each of this.passes) {
      each.counts = KINDS.map(() => 0);
      const net = new Map();
      each.changes.kind.forEach((kind, k) => {
        const word = graph.strings[kind];
        each.counts[KINDS.indexOf(word)] += 1;
        const sign = { added: 1, removed: -1 }[word];
        if (sign) net.set(each.changes.operator[k], (net.get(each.changes.operator[k]) || 0) + sign);
      });
      each.words = [...net].filter(([, n]) => n).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 3)
        .map(([operator, n]) => `${n > 0 ? "+" : ""}${n} ${graph.strings[operator]}`).join(", ");
    }
    const seconds = this.passes.reduce((sum, each) => sum + each.seconds, 0);
    $("passes-words").textContent = this.passes.length
      ? `${this.passes.length - 1} passes in ${time(seconds * 1e9)}. "Moved" are the fewest nodes that explain a new ` +
        "order. Choose a pass to see its nodes before and after."
      : "No passes were watched: this graph was read as it is.";
    $("change-kind").value = "";
    this.now = null;
  }

  show() {
    this.table.show(this.passes.length, true);
    if (this.now === null && this.passes.length) {
      const most = this.passes.findIndex((each) => each.changes.kind.length);
      this.table.choose(Math.max(0, most));
    } else if (this.now === null) this.list(() => false, "");
  }

  passCell(pass, column, cell) {
    const k = KINDS.indexOf(column.title);
    if (k >= 0) this.count(cell, pass.counts[k]);
    else if (column.title === "Time") cell.append(pass.name === "traced" ? "" : time(pass.seconds * 1e9));
    else if (column.title === "Calls after") this.count(cell, pass.calls);
    else if (MEASURED[column.title]) {
      const [at, measure] = MEASURED[column.title];
      if (pass.measured) number(cell, measure, pass.measured[at]);
    }
    else {
      cell.title = column.title === "Pass" ? pass.name : pass.words;
      cell.append(cell.title);
    }
  }

  count(cell, value) {
    cell.dataset.value = value;
    cell.append(value ? whole(value) : el("span", { class: "none" }, "–"));
  }

  keyOf(id, k) {
    const { graph } = this;
    const now = this.now.changes;
    return id === "by-operator" ? graph.strings[now.operator[k]] : graph.strings[now.module[k]] || "outside any module";
  }

  sumsBy(id) {
    const found = new Map();
    this.now.changes.kind.forEach((kind, k) => {
      const key = this.keyOf(id, k);
      const sum = found.get(key) || { key, counts: KINDS.map(() => 0) };
      sum.counts[KINDS.indexOf(this.graph.strings[kind])] += 1;
      found.set(key, sum);
    });
    const all = (sum) => sum.counts.reduce((a, b) => a + b, 0);
    return [...found.values()].sort((a, b) => all(b) - all(a));
  }

  sumCell(sum, column, cell) {
    const k = KINDS.indexOf(column.title);
    if (k >= 0) this.count(cell, sum.counts[k]);
    else {
      cell.title = sum.key;
      cell.append(sum.key);
    }
  }

  open(i) {
    this.now = this.passes[i];
    $("pass-title").textContent = this.now.name === "traced" ? "traced: before any pass" : `What ${this.now.name} did`;
    this.operators = this.sumsBy("by-operator");
    this.modules = this.sumsBy("by-module");
    this.byOperator.show(this.operators.length);
    this.byModule.show(this.modules.length);
    this.list(() => true, "");
  }

  list(wanted, of) {
    const kind = $("change-kind").value;
    this.listed = !this.now ? [] : this.now.changes.kind.map((_, k) => k)
      .filter((k) => (!kind || this.graph.strings[this.now.changes.kind[k]] === kind) && wanted(k));
    $("change-words").textContent = `${whole(this.listed.length)} nodes${of ? ` of ${of}` : ""}`;
    $("change").replaceChildren();
    this.changes.show(this.listed.length);
  }

  changeCell(k, column, cell) {
    const text = this.word({ How: "kind", Node: "name", Before: "before", After: "after" }[column.title], k);
    if (text && column.title === "Before") cell.classList.add("gone");
    if (text && column.title === "After") cell.classList.add("new");
    cell.title = text;
    cell.append(text);
  }

  word(key, k) {
    return this.graph.strings[this.now.changes[key][k]];
  }

  tell(k) {
    const word = (key) => this.word(key, k);
    facts($("change"), [
      [word("kind"), el("code", {}, word("name"))],
      ["before", word("before") && el("code", {}, word("before"))],
      ["after", word("after") && el("code", {}, word("after"))],
    ]);
  }
}
