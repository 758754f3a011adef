// The page as a whole: which graph, which view, and the search over all.
const VIEWS = ["run", "costs", "memory", "sent", "passes"];

class Search {
  constructor(page) {
    this.page = page;
    this.table = new Table($("found").appendChild(el("div", { class: "table", id: "found-table" })), {
      label: "Search results", columns: [
        { title: "What", width: 100 }, { title: "Name", width: 300, grow: true, code: true },
        { title: "Where", width: 420, grow: true },
      ],
      cell: (i, column, cell) => {
        const text = this.results[i][{ What: 0, Name: 1, Where: 2 }[column.title]];
        cell.title = text;
        cell.append(text);
      },
      onOpen: (i) => this.open(i), onKey: (key) => key === "Escape" && this.close(),
    });
    $("found-table").addEventListener("click", (event) => {
      if (event.target.closest(".row")) this.open(this.table.chosen);
    });
    $("search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.look(), 120);
    });
    $("search").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
      if (event.key === "ArrowDown" || event.key === "Enter") {
        this.look();
        if (this.results.length) {
          $("found-table").focus();
          this.table.choose(0);
        }
        event.preventDefault();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
      $("search").focus();
      event.preventDefault();
    });
  }

  // Whole words are not asked for: any part of a name is found, in upper or lower case.
  look() {
    const { graph } = this.page;
    const wanted = $("search").value.trim().toLowerCase();
    $("found").hidden = !wanted;
    this.results = [];
    if (!wanted) return;
    const known = new Map(); // a string is looked at once
    const has = (number) => {
      if (!known.has(number)) known.set(number, graph.strings[number].toLowerCase().includes(wanted));
      return known.get(number);
    };
    for (let scope = 1; scope < graph.scopes.parent.length; scope++) {
      if (!["name", "qualname", "path"].some((key) => has(graph.scopes[key][scope]))) continue;
      const name = graph.isModule(scope) ? graph.text("scopes", "path", scope) || "the model" : graph.label(scope)[0];
      const what = graph.isModule(scope) ? "module" : "function";
      this.results.push([what, name, graph.path(scope), () => this.page.toScope(scope)]);
    }
    const operators = new Map();
    graph.calls.operator.forEach((operator, i) => {
      if (!has(operator)) return;
      if (!operators.has(operator)) operators.set(operator, []);
      operators.get(operator).push(i);
    });
    for (const [operator, calls] of operators) {
      const name = graph.strings[operator];
      const where = `${whole(calls.length)} operations`;
      this.results.push(["operator", name, where, () => this.page.toCalls(calls, name)]);
    }
    graph.calls.name.forEach((name, i) => {
      if (!has(name) && !has(graph.calls.source[i])) return;
      this.results.push(["node", graph.strings[name], graph.path(graph.calls.scope[i]), () => this.page.toCall(i)]);
    });
    this.table.empty = `Nothing is called “${$("search").value.trim()}”: no module, function, operator, node or source line.`;
    this.table.show(this.results.length);
  }

  open(i) {
    const result = this.results[i];
    this.close();
    result[3]();
  }

  close() {
    $("search").value = "";
    $("found").hidden = true;
    return true;
  }
}

class Page {
  constructor(data) {
    this.data = data;
    const goTo = (call) => this.toCall(call);
    this.calls = new Calls();
    this.calls.goTo = goTo;
    this.tree = new Tree((entry) => {
      this.calls.ofScopes(entry.scopes, entry.scopes.length > 1 ? this.tree.labelOf(entry).join(" ") : this.graph.path(entry.scopes[0]));
    });
    this.memory = new Memory(goTo);
    this.sent = new Timeline(goTo);
    this.passes = new Passes();
    this.search = new Search(this);
    this.run = data.run && new Run(data.run);
    this.views = VIEWS.filter((view) => view !== "run" || this.run);
    $("tab-run").hidden = !this.run;
    for (const view of VIEWS) $(`tab-${view}`).addEventListener("click", () => this.open(view));
    $("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const { views } = this;
      this.open(views[(views.indexOf(this.view) + step + views.length) % views.length]);
      $(`tab-${this.view}`).focus();
    });
    $("needs").hidden = !data.needs.length;
    $("needs-lines").textContent = data.needs.join("\n");
    $("graph").replaceChildren(...data.graphs.map((each, i) => el("option", { value: i }, each.name)));
    $("graph-label").hidden = data.graphs.length < 2;
    $("graph").addEventListener("change", () => this.use(Number($("graph").value)));
    const redraw = () => this.view && this.redraw();
    window.addEventListener("resize", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    this.view = this.views[0];
    this.use(0);
  }

  use(number) {
    this.graph = this.graphs && this.graphs[number] ? this.graphs[number] : new Graph(this.data.graphs[number], this.data.strings);
    this.graphs = { ...this.graphs, [number]: this.graph };
    $("facts").textContent = [...this.data.facts, ...this.graph.notes].join("\n");
    this.search.close();
    this.calls.use(this.graph);
    this.memory.use(this.graph);
    this.sent.use(this.graph);
    this.passes.use(this.graph);
    this.open(this.view, () => this.tree.use(this.graph));
  }

  open(view, prepare) {
    this.view = view;
    for (const each of VIEWS) {
      $(each).hidden = each !== view;
      $(`tab-${each}`).setAttribute("aria-selected", each === view);
      $(`tab-${each}`).tabIndex = each === view ? 0 : -1;
    }
    if (prepare) prepare();
    this.redraw();
  }

  redraw() {
    if (this.view === "run") this.run.show();
    else if (this.view === "memory") this.memory.show();
    else if (this.view === "sent") this.sent.show();
    else if (this.view === "passes") this.passes.show();
    else this.tree.table.draw();
  }

  toScope(scope) {
    this.open("costs");
    this.tree.reveal(scope);
    $("tree").focus();
  }

  toCalls(calls, title) {
    this.open("costs");
    $("below").parentElement.hidden = true;
    this.calls.open(calls, title);
    $("ops-title").scrollIntoView({ block: "nearest" });
    $("ops").focus();
  }

  toCall(call) {
    this.open("costs");
    if (!this.calls.calls || !this.calls.calls.includes(call)) this.tree.reveal(this.graph.calls.scope[call]);
    this.calls.reveal(call);
    $("op").scrollIntoView({ block: "nearest" });
    $("ops").focus();
  }
}

read().then((data) => {
  new Page(data);
  $("loading").remove();
}).catch((error) => {
  $("loading").textContent = `The page can't be shown: ${error.message}`;
  throw error;
});
