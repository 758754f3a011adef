// A table that draws only the rows that are seen.
//
// columns   [{title, sub, help, width, grow, num, group, code, sort}] or a function that gives them: `width` in pixels;
//           what is left over is shared by those that grow; `sort` is what a click on the head hands to `onSort`
// cell      (row, column, element) writes a cell
// empty     the words in place of no rows
const ROW = 26;

class Table {
  constructor(host, options) {
    Object.assign(this, { count: 0, chosen: -1, sorted: null }, options, { host });
    host.tabIndex = 0;
    host.setAttribute("role", options.role || "grid");
    host.setAttribute("aria-label", options.label);
    this.head = el("div", { class: "head", role: "row" });
    this.body = el("div", { class: "body", role: "rowgroup" });
    host.replaceChildren(this.head, this.body);
    host.addEventListener("scroll", () => this.later());
    host.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      if (this.now) this.fit();
      this.later();
    }).observe(host);
  }

  show(count, keepPlace) {
    this.count = count;
    this.host.setAttribute("aria-rowcount", count);
    const columns = typeof this.columns === "function" ? this.columns() : this.columns;
    this.now = columns;
    this.fit();
    this.head.replaceChildren(...columns.map((each, k) => this.headCell(each, k)));
    this.head.hidden = !count;
    this.body.style.height = `${count ? count * ROW : 0}px`;
    if (!keepPlace) {
      this.host.scrollTop = 0;
      this.chosen = -1;
    }
    this.draw();
  }

  // All rows have one and the same widths, whatever is in them.
  fit() {
    const isNarrow = this.host.clientWidth < 600; // the first column stands still: leave room beside it
    const widths = this.now.map((each, k) => Math.min(each.width || 88, isNarrow && !k ? 150 : 1000));
    const spare = Math.max(0, this.host.clientWidth - widths.reduce((a, b) => a + b, 0));
    const growing = this.now.filter((each) => each.grow).length;
    this.grid = this.now.map((each, k) => `${widths[k] + (each.grow ? Math.floor(spare / growing) : 0)}px`).join(" ");
    this.head.style.gridTemplateColumns = this.grid;
  }

  headCell(column, k) {
    const order = this.sorted === column.sort && column.sort !== undefined;
    const words = [column.title, order ? " ▾" : "", column.sub ? el("small", {}, column.sub) : ""];
    const inside = column.sort === undefined || !this.onSort
      ? el("span", {}, ...words)
      : el("button", { onclick: () => this.onSort(column.sort) }, ...words);
    return el("div", {
      class: this.classes(column, k), role: "columnheader", title: column.help || "",
      "aria-sort": order ? "descending" : "none",
    }, inside);
  }

  classes(column, k) {
    return `cell${column.num ? " num" : ""}${k ? "" : " first"}${column.group ? " group" : ""}${column.code ? " code" : ""}`;
  }

  later() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => {
      this.waits = false;
      this.draw();
    });
  }

  draw() {
    if (!this.count) {
      this.body.replaceChildren();
      this.body.style.height = "auto";
      this.body.append(el("div", { class: "empty" }, this.empty || "Nothing to show."));
      return;
    }
    const first = Math.max(0, Math.floor(this.host.scrollTop / ROW) - 4);
    const last = Math.min(this.count, Math.ceil((this.host.scrollTop + (this.host.clientHeight || 400)) / ROW) + 4);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.row(i));
    this.body.replaceChildren(...rows);
  }

  row(i) {
    const made = el("div", {
      class: "row", role: "row", id: `${this.host.id}-${i}`, "aria-rowindex": i + 1,
      "aria-selected": i === this.chosen ? "true" : "false",
      onclick: () => this.choose(i), ondblclick: () => this.onOpen && this.onOpen(i),
    });
    made.style.top = `${i * ROW}px`;
    made.style.gridTemplateColumns = this.grid;
    this.now.forEach((column, k) => {
      const cell = el("div", { class: this.classes(column, k), role: "gridcell" });
      this.cell(i, column, cell, made);
      made.append(cell);
    });
    return made;
  }

  choose(i, quietly) {
    if (!this.count) return;
    this.chosen = Math.max(0, Math.min(this.count - 1, i));
    this.host.setAttribute("aria-activedescendant", `${this.host.id}-${this.chosen}`);
    const top = this.chosen * ROW;
    const room = this.host.clientHeight - this.head.offsetHeight - ROW;
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top > this.host.scrollTop + room) this.host.scrollTop = top - room;
    this.draw();
    if (!quietly && this.onChoose) this.onChoose(this.chosen);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.host.clientHeight / ROW) - 2);
    const to = {
      ArrowDown: this.chosen + 1, ArrowUp: Math.max(0, this.chosen - 1), PageDown: this.chosen + page,
      PageUp: this.chosen - page, Home: 0, End: this.count - 1,
    }[event.key];
    if (event.target.tagName === "BUTTON" && (event.key === "Enter" || event.key === " ")) return;
    if (to !== undefined) this.choose(to);
    else if (event.key === "Enter" && this.chosen >= 0 && this.onOpen) this.onOpen(this.chosen);
    else if (!(this.onKey && this.chosen >= 0 && this.onKey(event.key, this.chosen))) return;
    event.preventDefault();
  }
}

// Write a number: short, and exactly where the pointer rests.
function number(cell, measure, value, all) {
  const { short, exact } = MEASURES[measure];
  cell.dataset.value = value;
  cell.title = exact(value);
  if (value) cell.append(short(value));
  else cell.append(el("span", { class: "none" }, "–"));
  if (all && value) {
    cell.classList.add("share");
    cell.style.setProperty("--share", `${Math.min(100, (100 * value) / all)}%`);
  }
}
