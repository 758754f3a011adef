// What is held while each operation runs, and what holds it.

class Memory {
  constructor(goTo) {
    this.canvas = $("memory-chart");
    this.holders = new Table($("holders"), {
      label: "Held, by module", columns: [
        { title: "Module", width: 190, grow: true }, { title: "Bytes", num: true, width: 92 },
        { title: "Share", num: true, width: 72 }, { title: "Values", num: true, width: 70 },
      ],
      cell: (i, column, cell) => this.holderCell(this.byModule[i], column, cell),
      onChoose: (i) => this.showValues(this.byModule[i].module), empty: "Nothing is held here beside the inputs.",
    });
    this.values = new Table($("values"), {
      label: "Held, value by value", columns: [
        { title: "Value of", width: 190, grow: true, code: true }, { title: "Bytes", num: true, width: 92 },
        { title: "Shape", width: 170, code: true }, { title: "Part", width: 145 },
        { title: "Held until", width: 160, code: true },
      ],
      cell: (i, column, cell) => this.valueCell(this.shown[i], column, cell), onOpen: (i) => goTo(this.shown[i].owner),
      empty: "Nothing is held here beside the inputs.",
    });
    $("memory-at").addEventListener("input", () => this.at(Number($("memory-at").value)));
    $("held-kinds").addEventListener("change", () => this.at(this.now));
    $("to-peak").addEventListener("click", () => this.at(this.graph.memory.peak));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", (event) => hint(event, ""));
    this.canvas.addEventListener("click", (event) => this.at(this.callAt(event)));
  }

  use(graph) {
    this.graph = graph;
    const { memory, numCalls } = graph;
    const change = new Float64Array(numCalls + 1);
    memory.bytes.forEach((size, k) => {
      change[memory.begin[k]] += size;
      change[memory.end[k] + 1] -= size;
    });
    this.held = new Float64Array(numCalls);
    for (let i = 0, now = 0; i < numCalls; i++) this.held[i] = now += change[i];
    memory.scratch_at.forEach((i, k) => (this.held[i] += memory.scratch[k]));
    this.most = this.held[memory.peak] || 0;
    $("memory-at").max = Math.max(0, numCalls - 1);
    const name = numCalls ? graph.call("name", memory.peak) : "";
    $("memory-words").dataset.value = this.most;
    $("memory-words").textContent = this.most
      ? `${bytes(this.most)} at the peak, while ${name} (${graph.moduleOfCall(memory.peak)}) runs; beside the graph's ` +
        "inputs (parameters, batch). Point at the curve to see the bytes, click to see what holds them. Colours: what runs."
      : "This graph holds nothing beside its inputs.";
    this.now = memory.peak;
  }

  show() {
    $("memory-legend").replaceChildren(...this.graph.parts.flatMap((words, k) => swatch(PART_COLORS[k], words)));
    this.at(this.now);
  }

  callAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const i = Math.floor(((event.clientX - box.left) / box.width) * this.graph.numCalls);
    return Math.max(0, Math.min(this.graph.numCalls - 1, i));
  }

  point(event) {
    if (!this.graph.numCalls) return;
    const i = this.callAt(event);
    const most = this.groups(i).slice(0, 3).map((each) => `${each.module}: ${bytes(each.bytes)}`);
    hint(event, [`${this.graph.call("name", i)}: ${bytes(this.held[i])}`, ...most].join("\n"));
  }

  heldAt(i) {
    const { memory } = this.graph;
    const found = [];
    for (let k = 0; k < memory.owner.length; k++) {
      if (memory.begin[k] <= i && i <= memory.end[k]) {
        found.push({ owner: memory.owner[k], bytes: memory.bytes[k], until: memory.end[k] });
      }
    }
    const scratch = memory.scratch_at.indexOf(i);
    if (scratch >= 0) found.push({ owner: i, bytes: memory.scratch[scratch], until: i, scratch: true });
    return found.sort((a, b) => b.bytes - a.bytes);
  }

  moduleOf(call) {
    const module = this.graph.moduleOfCall(call);
    return $("held-kinds").checked ? module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*") : module;
  }

  groups(i) {
    const found = new Map();
    for (const each of this.heldAt(i)) {
      const module = this.moduleOf(each.owner);
      const group = found.get(module) || { module, bytes: 0, count: 0 };
      group.bytes += each.bytes;
      group.count += 1;
      found.set(module, group);
    }
    return [...found.values()].sort((a, b) => b.bytes - a.bytes);
  }

  at(i) {
    const { graph } = this;
    this.now = i;
    $("memory-at").value = i;
    this.draw();
    if (!graph.numCalls) return;
    $("memory-now").textContent = `operation ${whole(i + 1)} of ${whole(graph.numCalls)}, ${graph.call("name", i)} ` +
      `(${graph.parts[graph.calls.part[i]]}, ${graph.moduleOfCall(i)}): ${bytes(this.held[i])} held`;
    this.byModule = this.groups(i);
    this.holders.show(this.byModule.length);
    this.showValues(null);
  }

  showValues(module) {
    this.shown = this.heldAt(this.now).filter((each) => !module || this.moduleOf(each.owner) === module);
    $("values-title").textContent = module ? `Held there of ${module}` : "Held there, value by value";
    this.values.show(this.shown.length);
  }

  holderCell(group, column, cell) {
    if (column.title === "Bytes") number(cell, "held", group.bytes, this.held[this.now]);
    else if (column.title === "Share") cell.append(percent(group.bytes, this.held[this.now]));
    else if (column.title === "Values") cell.append(whole(group.count));
    else {
      cell.title = group.module;
      cell.append(group.module);
    }
  }

  valueCell(each, column, cell) {
    const graph = this.graph;
    if (column.title === "Bytes") {
      number(cell, "held", each.bytes);
      return;
    }
    cell.title = column.title === "Value of" ? graph.path(graph.calls.scope[each.owner]) : "";
    cell.append({
      "Value of": graph.call("name", each.owner) + (each.scratch ? " (while it runs)" : ""),
      Shape: each.scratch ? "" : graph.call("value", each.owner),
      Part: graph.parts[graph.calls.part[each.owner]],
      "Held until": graph.call("name", each.until),
    }[column.title]);
  }

  draw() {
    const [context, width, height] = sharp(this.canvas, 240);
    const { graph, held } = this;
    const n = graph.numCalls;
    if (!this.most || !width) return;
    const [top, bottom] = [22, height - 20];
    const y = (value) => bottom - (value / this.most) * (bottom - top);
    const columns = Math.min(width, n);
    const fills = PART_COLORS.map(color);
    for (let c = 0; c < columns; c++) {
      const [from, to] = [Math.floor((c * n) / columns), Math.max(Math.floor(((c + 1) * n) / columns), 1)];
      let most = 0;
      for (let i = from; i < Math.max(to, from + 1); i++) most = Math.max(most, held[i]);
      context.fillStyle = fills[graph.calls.part[from]];
      context.fillRect((c * width) / columns, y(most), Math.ceil(width / columns) + 0.5, bottom - y(most));
    }
    context.fillStyle = color("soft");
    for (const part of [0.5, 1]) {
      context.fillText(bytes(this.most * part), 6, y(this.most * part) - 4);
      context.fillRect(0, Math.round(y(this.most * part)), width, 1);
    }
    context.fillText("operation 1", 6, height - 5);
    context.textAlign = "right";
    context.fillText(whole(n), width - 6, height - 5);
    const x = ((this.now + 0.5) / n) * width;
    context.fillStyle = color("wait");
    context.fillRect(Math.round(x), top - 6, 2, bottom - top + 6);
    context.textAlign = x > width - 130 ? "right" : "left";
    const words = `${this.now === graph.memory.peak ? "the peak, " : ""}${bytes(held[this.now])}`;
    context.fillText(words, x + (x > width - 130 ? -6 : 6), 12);
  }
}
