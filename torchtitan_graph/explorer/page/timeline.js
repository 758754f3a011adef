// Collectives on a timeline, by axis, above what computes beside them: an estimate.
const LANE = 26;

class Timeline {
  constructor(goTo) {
    this.goTo = goTo;
    this.canvas = $("timeline");
    this.sums = new Table($("sums"), {
      label: "Sums by axis and kind", columns: [
        { title: "Axis", width: 110 }, { title: "Kind", width: 220, grow: true, code: true },
        { title: "Number", num: true, width: 84 }, { title: "Received", num: true, width: 100 },
        { title: "Sending", num: true, width: 100 }, { title: "Exposed", num: true, width: 100 },
      ], cell: (i, column, cell) => this.sumCell(this.bySum[i], column, cell),
    });
    this.table = new Table($("collectives"), {
      label: "Collectives", columns: [
        { title: "Node", width: 230, grow: true, code: true }, { title: "Axis", width: 90 },
        { title: "Kind", width: 190, code: true }, { title: "Ranks", width: 120 },
        { title: "Received", num: true, width: 92, sort: "received" }, { title: "Starts", num: true, width: 92 },
        { title: "Sending", num: true, width: 92, sort: "sending" },
        { title: "Exposed", num: true, width: 92, sort: "exposed" },
        { title: "Mostly beside", width: 230, grow: true },
      ],
      cell: (i, column, cell) => this.cell(this.order[i], column, cell), onChoose: (i) => this.tell(this.order[i]),
      onOpen: (i) => goTo(this.graph.collectives.call[this.order[i]]), onSort: (sort) => this.sortBy(sort),
    });
    const zoom = (factor) => {
      const [from, to] = this.view;
      const [middle, half] = [(from + to) / 2, ((to - from) * factor) / 2];
      this.look(middle - half, middle + half);
    };
    const shift = (part) => {
      const [from, to] = this.view;
      this.look(from + (to - from) * part, to + (to - from) * part);
    };
    const keys = {
      "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25),
      0: () => this.look(0, this.end),
    };
    $("zoom-in").addEventListener("click", keys["+"]);
    $("zoom-out").addEventListener("click", keys["-"]);
    $("zoom-left").addEventListener("click", keys.ArrowLeft);
    $("zoom-right").addEventListener("click", keys.ArrowRight);
    $("zoom-all").addEventListener("click", keys[0]);
    this.canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key]) return;
      keys[event.key]();
      event.preventDefault();
    });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8);
    }, { passive: false });
    this.canvas.addEventListener("pointermove", (event) => hint(event, this.wordsAt(event)));
    this.canvas.addEventListener("pointerleave", (event) => hint(event, ""));
    this.canvas.addEventListener("click", (event) => this.choose(event));
  }

  use(graph) {
    this.graph = graph;
    const { collectives, calls } = graph;
    this.end = calls.end.reduce((a, b) => Math.max(a, b), 1);
    this.view = [0, this.end];
    this.lanes = [...new Set(collectives.axis)];
    this.order = collectives.call.map((_, k) => k);
    // What computes, in order: collectives begin when their streams are free.
    this.computing = calls.begin.map((_, i) => i).filter((i) => !graph.isSent(i) && calls.end[i] > calls.begin[i]);
    const sums = new Map();
    for (const k of this.order) {
      const key = `${collectives.axis[k]} ${collectives.kind[k]}`;
      const sum = sums.get(key) || { k, number: 0, received: 0, sending: 0, exposed: 0 };
      sum.number += 1;
      sum.received += graph.cost.received[collectives.call[k]];
      sum.sending += graph.cost.sending[collectives.call[k]];
      sum.exposed += this.exposed(k);
      sums.set(key, sum);
    }
    this.bySum = [...sums.values()];
    this.chosen = -1;
    $("beside").replaceChildren();
    const sends = this.order.length > 0;
    for (const id of ["zoom", "timeline", "sent-legend", "sums", "sent-title", "collectives"]) $(id).hidden = !sends;
    const all = (measure) => graph.sum(0, ALL, measure);
    $("sent-words").textContent = sends
      ? `An estimate: ${time(all("time"))} a run of this graph, of which ${time(all("exposed"))} stand still for ` +
        `collectives; these take ${time(all("sending"))}, and the rest of that is hidden behind arithmetic.`
      : "This graph sends nothing: it runs on one rank, or its ranks only meet outside of it.";
  }

  exposed(k) {
    const wait = this.graph.collectives.wait[k];
    return wait < 0 ? 0 : this.graph.cost.exposed[wait];
  }

  // A wait ends when its collective does; that may stand behind others of its group.
  wordsOf(k) {
    const [sending, exposed] = [this.graph.cost.sending[this.graph.collectives.call[k]], this.exposed(k)];
    const queue = exposed > sending ? ", also for what its group sends before it" : "";
    return `sends for ${time(sending)}; its wait stands still for ${time(exposed)}${queue}`;
  }

  show() {
    if (!this.order.length) return;
    this.draw();
    this.sums.show(this.bySum.length, true);
    this.table.show(this.order.length, true);
    $("sent-legend").replaceChildren(
      ...this.graph.parts.flatMap((words, k) => swatch(PART_COLORS[k], words)),
      ...swatch("wait", "standing still for a collective"), ...swatch("sent", "a collective"),
    );
  }

  look(from, to) {
    const least = Math.min(this.end, 100);
    const size = Math.max(least, Math.min(this.end, to - from));
    const begin = Math.max(0, Math.min(this.end - size, from));
    this.view = [begin, begin + size];
    this.draw();
  }

  draw() {
    const [context, width, height] = sharp(this.canvas, (this.lanes.length + 1) * (LANE + 18) + 22);
    const { graph } = this;
    const [from, to] = this.view;
    const x = (t) => ((t - from) / (to - from)) * width;
    const bar = (begin, end, top, fill) => {
      if (end < from || begin > to) return;
      context.fillStyle = fill;
      context.fillRect(x(begin), top, Math.max(0.7, x(end) - x(begin)), LANE - 2);
    };
    const fills = Object.fromEntries([...PART_COLORS, "wait", "sent", "soft", "accent"].map((name) => [name, color(name)]));
    const top = (lane) => 16 + lane * (LANE + 18);
    for (const i of this.computing) {
      const waits = graph.cost.exposed[i] > 0;
      bar(graph.calls.begin[i], graph.calls.end[i], top(0), fills[waits ? "wait" : PART_COLORS[graph.calls.part[i]]]);
    }
    graph.collectives.call.forEach((call, k) => {
      const lane = 1 + this.lanes.indexOf(graph.collectives.axis[k]);
      bar(graph.calls.begin[call], graph.calls.end[call], top(lane), fills[k === this.chosen ? "accent" : "sent"]);
    });
    context.fillStyle = fills.soft;
    ["computes", ...this.lanes.map((axis) => graph.strings[axis])].forEach((words, k) => {
      context.fillText(words, 4, top(k) - 4);
    });
    context.fillText(time(from), 4, height - 6);
    context.textAlign = "right";
    context.fillText(time(to), width - 4, height - 6);
    $("zoom-words").textContent = `${time(from)} to ${time(to)} of ${time(this.end)}; keys + - ← → 0`;
  }

  // What is drawn where the pointer is: a call, and of a collective its number.
  find(event) {
    const box = this.canvas.getBoundingClientRect();
    const [from, to] = this.view;
    const at = from + ((event.clientX - box.left) / box.width) * (to - from);
    const near = ((to - from) / box.width) * 2;
    const lane = Math.floor((event.clientY - box.top - 8) / (LANE + 18));
    const { calls, collectives } = this.graph;
    if (lane === 0) return [this.computing.find((i) => calls.begin[i] - near <= at && at <= calls.end[i] + near), -1];
    const k = collectives.call.findIndex((call, each) => collectives.axis[each] === this.lanes[lane - 1] &&
      calls.begin[call] - near <= at && at <= calls.end[call] + near);
    return [k < 0 ? undefined : collectives.call[k], k];
  }

  wordsAt(event) {
    const [call, k] = this.find(event);
    if (call === undefined) return "";
    const { graph } = this;
    const words = [graph.call("name", call), graph.path(graph.calls.scope[call])];
    if (k >= 0) words.push(this.wordsOf(k));
    else words.push(`${time(graph.cost.time[call])}${graph.cost.exposed[call] ? ", waiting" : ""}`);
    return words.join("\n");
  }

  choose(event) {
    const [call, k] = this.find(event);
    if (k >= 0) this.table.choose(this.order.indexOf(k));
    else if (call !== undefined) this.goTo(call);
  }

  // What computes while a collective is under way: [module and phase, nanoseconds], the longest first.
  beside(k) {
    const { calls, collectives, cost } = this.graph;
    const call = collectives.call[k];
    const [begin, end] = [calls.begin[call], calls.end[call]];
    let [low, high] = [0, this.computing.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (calls.end[this.computing[middle]] > begin) high = middle;
      else low = middle + 1;
    }
    const found = new Map();
    for (; low < this.computing.length && calls.begin[this.computing[low]] < end; low++) {
      const i = this.computing[low];
      const shared = Math.min(end, calls.end[i] - cost.exposed[i]) - Math.max(begin, calls.begin[i]);
      const key = `${this.graph.moduleOfCall(i)}, ${this.graph.parts[calls.part[i]]}`;
      if (shared > 0) found.set(key, (found.get(key) || 0) + shared);
    }
    return [...found].sort((a, b) => b[1] - a[1]);
  }

  sortBy(sort) {
    this.table.sorted = this.table.sorted === sort ? null : sort;
    const of = (k) => (sort === "exposed" ? this.exposed(k) : this.graph.cost[sort][this.graph.collectives.call[k]]);
    this.order = this.graph.collectives.call.map((_, k) => k);
    if (this.table.sorted) this.order.sort((a, b) => of(b) - of(a));
    this.table.show(this.order.length);
  }

  sumCell(sum, column, cell) {
    const { collectives, strings } = this.graph;
    if (column.title === "Axis") cell.append(strings[collectives.axis[sum.k]]);
    else if (column.title === "Kind") cell.append(strings[collectives.kind[sum.k]]);
    else if (column.title === "Number") cell.append(whole(sum.number));
    else number(cell, column.title.toLowerCase(), sum[column.title.toLowerCase()]);
  }

  cell(k, column, cell) {
    const { graph } = this;
    const { collectives, calls, strings } = graph;
    const call = collectives.call[k];
    if (["Received", "Sending"].includes(column.title)) {
      number(cell, column.title.toLowerCase(), graph.cost[column.title.toLowerCase()][call]);
    } else if (column.title === "Exposed") number(cell, "exposed", this.exposed(k));
    else {
      const text = {
        Node: () => graph.call("name", call), Axis: () => strings[collectives.axis[k]],
        Kind: () => strings[collectives.kind[k]], Ranks: () => strings[collectives.ranks[k]],
        Starts: () => time(calls.begin[call]),
        "Mostly beside": () => this.beside(k).slice(0, 1).map(([words, ns]) => `${words} (${time(ns)})`)[0] || "nothing",
      }[column.title]();
      cell.title = text;
      cell.append(text);
    }
  }

  tell(k) {
    this.chosen = k;
    this.draw();
    const { graph } = this;
    const call = graph.collectives.call[k];
    const beside = this.beside(k);
    facts($("beside"), [
      ["collective", el("button", { class: "code", onclick: () => this.goTo(call) }, graph.call("name", call))],
      ["scope", graph.path(graph.calls.scope[call])],
      ["value", graph.call("value", call)],
      ["over", `${graph.strings[graph.collectives.axis[k]]}, ${graph.strings[graph.collectives.ranks[k]]}`],
      ["estimate", this.wordsOf(k)],
      ["beside it", beside.slice(0, 12).map(([words, ns]) => `${time(ns)}  ${words}`).join("\n") || "nothing computes"],
    ]);
  }
}
