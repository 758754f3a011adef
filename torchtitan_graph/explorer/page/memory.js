// What is held while each operation runs, and what holds it.

const THUMB = 16; // the slider's, as style.css has it

class Memory {
  constructor(goTo) {
    this.canvas = $("memory-chart");
    this.purposes = new Table($("purposes"), {
      label: "Held, by what for", columns: [
        { title: "For", width: 250, grow: true }, { title: "Bytes", num: true, width: 92 },
        { title: "Share", num: true, width: 72 },
      ],
      cell: (i, column, cell) => this.sumCell(this.byPurpose[i], this.rest + this.held[this.now], column, cell),
      onChoose: (i) => this.showValues(this.byPurpose[i].name, (each) => each.purpose === this.byPurpose[i].name),
    });
    this.holders = new Table($("holders"), {
      label: "Held, by module", columns: [
        { title: "Module", width: 190, grow: true }, { title: "Bytes", num: true, width: 92 },
        { title: "Share", num: true, width: 72 }, { title: "Values", num: true, width: 70 },
      ],
      cell: (i, column, cell) => this.sumCell(this.byModule[i], this.held[this.now], column, cell),
      onChoose: (i) => this.showValues(this.byModule[i].name, (each) => this.moduleOf(each.owner) === this.byModule[i].name),
      empty: "Nothing is held here beside what lies there from step to step.",
    });
    this.values = new Table($("values"), {
      label: "Held, value by value", columns: [
        { title: "Value of", width: 190, grow: true, code: true }, { title: "Bytes", num: true, width: 92 },
        { title: "Shape", width: 170, code: true }, { title: "Part", width: 145 },
        { title: "Held until", width: 160, code: true },
      ],
      cell: (i, column, cell) => this.valueCell(this.shown[i], column, cell), onOpen: (i) => goTo(this.shown[i].owner),
      empty: "No value of the graph: what lies there from step to step has none.",
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
    this.rest = memory.rest.reduce((sum, [, size]) => sum + size, 0);
    $("memory-at").max = Math.max(0, numCalls - 1);
    const name = numCalls ? graph.call("name", memory.peak) : "";
    $("memory-words").dataset.value = this.most;
    $("memory-words").textContent = this.most
      ? `${bytes(this.rest + this.most)} at the peak, while ${name} (${graph.moduleOfCall(memory.peak)}) runs: ` +
        `${bytes(this.rest)} lie there from step to step, ${bytes(this.most)} are the step's own. ` +
        "Point at the curve to see the bytes, click to see what holds them. Colours: what runs."
      : "This graph holds nothing beside what lies there from step to step.";
    this.now = memory.peak;
  }

  show() {
    $("memory-legend").replaceChildren(...this.graph.parts.flatMap((words, k) => swatch(PART_COLORS[k], words)),
      ...swatch("rest", "there from step to step"));
    this.at(this.now);
  }

  // The curve begins half a thumb from the chart's edges, so that the slider below can point at its ends.
  callAt(event) {
    const left = this.canvas.getBoundingClientRect().left + this.canvas.clientLeft + THUMB / 2;
    const i = Math.floor(((event.clientX - left) / (this.canvas.clientWidth - THUMB)) * this.graph.numCalls);
    return Math.max(0, Math.min(this.graph.numCalls - 1, i));
  }

  point(event) {
    if (!this.graph.numCalls) return;
    const i = this.callAt(event);
    const most = this.groups(this.heldAt(i), (each) => this.moduleOf(each.owner)).slice(0, 3);
    hint(event, [`${this.graph.call("name", i)}: ${bytes(this.rest)} + ${bytes(this.held[i])}`,
      ...most.map((each) => `${each.name}: ${bytes(each.bytes)}`)].join("\n"));
  }

  heldAt(i) {
    const { memory } = this.graph;
    const found = [];
    for (let k = 0; k < memory.owner.length; k++) {
      if (memory.begin[k] <= i && i <= memory.end[k]) {
        found.push({ owner: memory.owner[k], bytes: memory.bytes[k], until: memory.end[k], purpose: this.graph.strings[memory.purpose[k]] });
      }
    }
    const scratch = memory.scratch_at.indexOf(i);
    if (scratch >= 0) found.push({ owner: i, bytes: memory.scratch[scratch], until: i, scratch: true, purpose: memory.workspace });
    return found.sort((a, b) => b.bytes - a.bytes);
  }

  moduleOf(call) {
    const module = this.graph.moduleOfCall(call);
    return $("held-kinds").checked ? module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*") : module;
  }

  groups(held, nameOf) {
    const found = new Map();
    for (const each of held) {
      const name = nameOf(each);
      const group = found.get(name) || { name, bytes: 0, count: 0 };
      group.bytes += each.bytes;
      group.count += 1;
      found.set(name, group);
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
      `(${graph.parts[graph.calls.part[i]]}, ${graph.moduleOfCall(i)}): ${bytes(this.rest + this.held[i])}`;
    this.heldNow = this.heldAt(i);
    this.byModule = this.groups(this.heldNow, (each) => this.moduleOf(each.owner));
    this.holders.show(this.byModule.length);
    const rest = graph.memory.rest.map(([name, size]) => ({ name, bytes: size }));
    this.byPurpose = [...rest, ...this.groups(this.heldNow, (each) => each.purpose)];
    this.purposes.show(this.byPurpose.length);
    this.showValues("", () => true);
  }

  showValues(of, wanted) {
    this.shown = this.heldNow.filter(wanted);
    $("values-title").textContent = of ? `Held there: ${of}` : "Held there, value by value";
    this.values.show(this.shown.length);
  }

  sumCell(group, all, column, cell) {
    if (column.title === "Bytes") number(cell, "held", group.bytes, all);
    else if (column.title === "Share") cell.append(percent(group.bytes, all));
    else if (column.title === "Values") cell.append(whole(group.count));
    else {
      cell.title = group.name;
      cell.append(group.name);
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
    const { graph, held, rest } = this;
    const n = graph.numCalls;
    if (!n || !width) return;
    const [left, wide, top, bottom, all] = [THUMB / 2, width - THUMB, 22, height - 20, rest + this.most];
    const y = (value) => bottom - (value / (all || 1)) * (bottom - top);
    const columns = Math.min(wide, n);
    const fills = PART_COLORS.map(color);
    for (let c = 0; c < columns; c++) {
      const [from, to] = [Math.floor((c * n) / columns), Math.max(Math.floor(((c + 1) * n) / columns), 1)];
      let most = 0;
      for (let i = from; i < Math.max(to, from + 1); i++) most = Math.max(most, held[i]);
      context.fillStyle = fills[graph.calls.part[from]];
      context.fillRect(left + (c * wide) / columns, y(rest + most), Math.ceil(wide / columns) + 0.5, y(rest) - y(rest + most));
    }
    context.fillStyle = color("rest");
    context.fillRect(left, y(rest), wide, bottom - y(rest));
    context.fillStyle = color("soft");
    for (const part of [0.5, 1]) {
      context.fillText(bytes(all * part), 6, y(all * part) - 4);
      context.fillRect(0, Math.round(y(all * part)), width, 1);
    }
    context.fillText("operation 1", 6, height - 5);
    context.textAlign = "right";
    context.fillText(whole(n), width - 6, height - 5);
    const x = left + ((this.now + 0.5) / n) * wide;
    context.fillStyle = color("wait");
    context.fillRect(Math.round(x) - 1, top - 6, 2, bottom - top + 6);
    context.textAlign = x > width - 130 ? "right" : "left";
    const words = `${this.now === graph.memory.peak ? "the peak, " : ""}${bytes(rest + held[this.now])}`;
    context.fillText(words, x + (x > width - 130 ? -6 : 6), 12);
    // The middle of its thumb goes from half a thumb behind the slider's begin to half a thumb before its end.
    const slider = $("memory-at");
    slider.style.marginLeft = `${this.canvas.clientLeft + left + wide / (2 * n) - THUMB / 2}px`;
    slider.style.width = `${wide - wide / n + THUMB}px`;
  }
}
