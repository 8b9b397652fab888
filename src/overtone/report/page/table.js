// The final table. It sorts on raw values and hides no row. A missing value is shown as an empty cell and sorts last.
// A column without any value is left out.

// A column: { name, title, value(row), write(row), text? (sorted as words), bar?(row): 0..1 }
function columnsOf(group) {
  const metrics = [...new Set(group.rows.flatMap((row) => Object.keys(row.metrics ?? {})))].filter((name) => name !== "loss");
  const number = (name, value, write, more = {}) => ({ name, value, write: (row) => (value(row) == null ? "" : write(value(row))), ...more });
  const against = (name, value, there) => ({
    name: `bytes vs ${name}`, title: `bytes sent against ${name}, or bytes received where these are more`, value,
    write: (row) => fewer(value(row), row.bytes === 0 && row.received === 0 && there(row) && hasEnded(row, group)),
  });
  const unequal = group.rows.some((row) => row.received !== row.bytes); // otherwise one column says it all
  const slowest = () => Math.max(...group.rows.map((row) => rowSeconds(row, group) ?? 0));
  const columns = [
    { name: "method", value: (row) => row.label, write: (row) => row.label, text: true },
    number("loss", (row) => row.loss, (value) => fixed(value), { title: "mean over the seeds" }),
    {
      name: "spread", title: "half the difference between the best and the worst seed", value: (row) => row.spread,
      write: (row) => (row.spread == null ? (row.seeds.length > 1 ? "" : "one seed") : `±${fixed(row.spread / 2, row.spread < 0.019 ? 4 : 3)}`),
      hint: (row) => row.runs.map((index) => seedWords(group.runs[index], row.of)).join("\n"),
    },
    ...metrics.map((name) => number(readable(name), (row) => row.metrics?.[name], (value) => digits(value, 4))),
    number("loss vs DiLoCo", (row) => row.loss_vs_diloco, signedPercent, { title: "above 0: worse than DiLoCo" }),
    number("gain kept", (row) => row.gain_kept, (value) => percent(value), {
      title: "100%: as good as DiLoCo; 0%: no better than alone", bar: (row) => row.gain_kept,
    }),
    number("bytes sent", (row) => row.bytes, humanBytes, { title: "by one replica over the whole run" }),
    number("bytes received", (row) => (unequal ? row.received : null), humanBytes, { title: "by one replica over the whole run" }),
    against("DiLoCo", (row) => row.less_than_diloco, (row) => row.has_diloco),
    against("DDP", (row) => row.less_than_ddp, (row) => row.has_ddp),
    number("time on link", (row) => rowSeconds(row, group), humanSeconds, {
      title: "local steps, and waiting for exchanges that they do not hide, on the link chosen above", bar: (row) => rowSeconds(row, group) / slowest(),
    }),
    number("drift", (row) => row.drift, (value) => percent(value, 1), { title: "drift between replicas: the largest distance of a replica's weights from the mean of all, relative" }),
    number("rounds", (row) => row.rounds, whole),
    number("waiting", (row) => row.waiting, (value) => percent(value), { title: "share of the time in which a replica stood still for others" }),
  ];
  return columns.filter((column) => group.rows.some((row) => column.write(row) !== ""));
}

const hasEnded = (row, group) => row.runs.some((index) => group.runs[index].finish);

function seedWords(run, of) {
  const last = (run.curve[of] ?? []).at(-1);
  return `seed ${run.seed}: ${maybe(last, (value) => fixed(value, 4))}${isBroken(run) ? `, ${run.status}` : ""}`;
}

function ordered(rows, column, down) {
  if (!column) return rows;
  const compare = column.text ? (a, b) => a.localeCompare(b, "en", { numeric: true }) : (a, b) => a - b;
  const known = rows.filter((row) => column.value(row) != null);
  const unknown = rows.filter((row) => column.value(row) == null);
  known.sort((a, b) => (down ? -1 : 1) * compare(column.value(a), column.value(b)));
  return [...known, ...unknown];
}

class FinalTable {
  constructor(table, styles) {
    this.table = table;
    this.styles = styles;
    this.sort = { name: null, down: false };
  }

  show(group) {
    this.group = group;
    this.columns = columnsOf(group);
    if (!this.columns.some((column) => column.name === this.sort.name)) this.sort = { name: null, down: false };
    const heads = this.columns.map((column) => {
      const button = el("button", { type: "button", title: column.title, onclick: () => this.by(column.name) }, column.name);
      return el("th", { scope: "col", class: column.text ? null : "number" }, button);
    });
    this.table.tHead.replaceChildren(el("tr", {}, ...heads));
    this.refresh();
  }

  by(name) {
    this.sort = { name, down: this.sort.name === name && !this.sort.down };
    this.refresh();
  }

  refresh() {
    const { name, down } = this.sort;
    this.columns.forEach((column, i) => {
      const state = column.name === name ? (down ? "descending" : "ascending") : "none";
      this.table.tHead.rows[0].cells[i].setAttribute("aria-sort", state);
    });
    const rows = ordered(this.group.rows, this.columns.find((column) => column.name === name), down);
    this.table.tBodies[0].replaceChildren(...rows.map((row) => this.line(row)));
  }

  line(row) {
    const statuses = [...new Set(row.runs.map((index) => this.group.runs[index]).filter(isBroken).map((run) => run.status))];
    const [first, ...rest] = this.columns;
    const head = el("span", { class: "label" }, first.write(row));
    const tags = statuses.flatMap((status) => [" ", el("span", { class: "tag" }, status)]);
    const marks = row.marks.length ? el("span", { class: "marks" }, row.marks.join("; ")) : null;
    const cells = rest.map((column) => {
      const cell = el("td", { class: "number", title: column.hint?.(row) }, column.write(row));
      const share = column.bar?.(row);
      if (share > 0) cell.append(el("span", { class: "share", style: `--share: ${Math.min(1, share)}`, "aria-hidden": "true" }));
      return cell;
    });
    const name = el("th", { scope: "row" }, el("div", {}, swatch(this.styles.of(row.label)), el("span", {}, head, ...tags, marks)));
    return el("tr", { class: [row.reference ? "reference" : "", statuses.length ? "broken" : ""].join(" ").trim() || null }, name, ...cells);
  }
}
