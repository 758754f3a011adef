// A run: how far it came, what it logged, and its files. Where there is none, the page has no such view.

class Run {
  constructor(run) {
    this.run = run;
    this.canvas = $("curve");
    this.names = Object.keys(run.curves);
    facts($("run-facts"), [["folder", run.folder], ...run.facts]);
    $("run-config").textContent = run.config;
    $("curve-name").replaceChildren(...this.names.map((name) => el("option", {}, name)));
    $("curve-name").value = this.names.includes("loss") ? "loss" : this.names[0];
    $("curve-name").addEventListener("change", () => this.draw());
    for (const id of ["curve-bar", "curve"]) $(id).hidden = !this.names.length;
    this.canvas.addEventListener("pointermove", (event) => hint(event, this.wordsAt(event)));
    this.canvas.addEventListener("pointerleave", (event) => hint(event, ""));
    this.files = new Table($("run-files"), {
      label: "Files of the run",
      columns: [{ title: "File", width: 400, grow: true, code: true }, { title: "Bytes", num: true, width: 100 }],
      cell: (i, column, cell) => this.fileCell(run.files[i], column, cell), empty: "The folder has no files.",
    });
  }

  show() {
    this.files.show(this.run.files.length, true);
    this.draw();
  }

  fileCell([name, address, size], column, cell) {
    if (column.title === "Bytes") number(cell, "held", size);
    else cell.append(el("a", { href: address }, name));
  }

  get points() {
    return this.run.curves[$("curve-name").value] || [];
  }

  place(width, height) {
    const [steps, values] = [0, 1].map((k) => this.points.map((point) => point[k]));
    const [first, last, low, high] = [steps[0], steps[steps.length - 1], Math.min(...values), Math.max(...values)];
    return {
      x: (step) => 8 + ((step - first) / (last - first || 1)) * (width - 16),
      y: (value) => height - 24 - ((value - low) / (high - low || 1)) * (height - 48),
      first, last, low, high,
    };
  }

  draw() {
    if (!this.points.length) return;
    const [context, width, height] = sharp(this.canvas, 240);
    const { x, y, first, last, low, high } = this.place(width, height);
    context.strokeStyle = color("forward");
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [step, value] of this.points) context.lineTo(x(step), y(value));
    context.stroke();
    context.fillStyle = color("forward");
    for (const [step, value] of this.points.length < 60 ? this.points : []) context.fillRect(x(step) - 2, y(value) - 2, 4, 4);
    context.fillStyle = color("soft");
    context.fillText(shortNumber(high), 6, 14);
    context.fillText(`${shortNumber(low)}, step ${whole(first)}`, 6, height - 6);
    context.textAlign = "right";
    context.fillText(`step ${whole(last)}`, width - 6, height - 6);
  }

  wordsAt(event) {
    if (!this.points.length) return "";
    const box = this.canvas.getBoundingClientRect();
    const { x } = this.place(box.width, box.height);
    const at = event.clientX - box.left;
    const [step, value] = this.points.reduce((a, b) => (Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a));
    return `step ${whole(step)}: ${$("curve-name").value} ${shortNumber(value)}`;
  }
}

const shortNumber = (x) => String(Number(x.toPrecision(6)));
