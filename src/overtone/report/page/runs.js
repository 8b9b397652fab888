// All details of every run. The charts of a run are made when the reader opens it: a page may hold a hundred runs.

// Nested settings as names with dots. A setting that is null was not set, and is left out.
function flat(value, prefix = "") {
  return Object.entries(value ?? {}).flatMap(([name, item]) => {
    if (item == null) return [];
    const key = prefix ? `${prefix}.${name}` : name;
    if (Array.isArray(item) && item.every((one) => typeof one !== "object")) return [[key, item.join(" ")]];
    return typeof item === "object" ? flat(item, key) : [[key, String(item)]];
  });
}

function pairs(title, entries) {
  if (!entries.length) return null;
  const rows = entries.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)));
  return el("section", {}, el("h3", {}, title), el("div", { class: "scroll" }, el("table", { class: "pairs" }, el("tbody", {}, ...rows))));
}

// Entries for `pairs`, and a function that adds one unless its value is missing.
function notes() {
  const entries = [];
  return [entries, (name, value, write) => value != null && entries.push([name, write(value)])];
}

function numbersOf(run) {
  const [entries, note] = notes();
  note("rounds", run.rounds_done, whole);
  note("rounds of finish", run.finish?.rounds_finish, whole);
  note("drift of the last round, norm", run.rounds.drift.at(-1), digits);
  note("residual after it, norm", run.rounds.residual.at(-1), digits);
  note("drift between replicas", run.spread_of_replicas?.value.at(-1), (value) => percent(value, 1));
  for (const [phase, one] of Object.entries(run.finish?.bytes ?? {})) {
    const asked = one.requests ? `, ${whole(one.requests)} requests` : "";
    const waited = one.waiting ? `, ${humanSeconds(one.waiting)} waiting` : "";
    entries.push([`bytes, ${phase}`, `${humanBytes(one.sent)} sent, ${humanBytes(one.received)} received${asked}${waited}`]);
  }
  return entries;
}

// Where the time went. A simulation has two clocks: the seconds of rounds and of waiting are virtual, the others are not.
function timesOf(run) {
  const [entries, note] = notes();
  const { waiting, hidden } = run.rounds;
  const virtual = run.simulated ? ", virtual time" : "";
  note(`standing still for others${virtual}`, run.finish?.waiting_share, (value) => percent(value, 1));
  if (waiting.length) {
    note(`per round, standing still${virtual}`, mean(waiting), humanSeconds);
    note(`per round, behind training${virtual}`, hidden?.some((value) => value) ? mean(hidden) : null, humanSeconds);
  }
  note(run.simulated ? "wall-clock of the simulation" : "wall-clock", pointAt(run, -1)?.seconds, humanSeconds);
  for (const [name, share] of Object.entries(run.finish?.shares ?? {})) note(`of it, ${name}`, share, (value) => percent(value, 1));
  return entries;
}

function chartsOf(run) {
  const { rounds, train, spread_of_replicas: spread } = run;
  const number = (value) => digits(value);
  return [
    ["bytes sent per round", rounds.step, rounds.bytes, humanBytes],
    ["drift of a round, norm", rounds.step, rounds.drift, number],
    ["residual after a round, norm", rounds.step, rounds.residual, number],
    ["seconds of a round standing still", rounds.step, rounds.waiting, humanSeconds],
    ["seconds of a round behind training", rounds.step, rounds.hidden, humanSeconds],
    ["drift between replicas", spread?.step, spread?.value, (value) => `${digits(100 * value)}%`],
    ["training loss", train?.step, train?.loss, number, false],
  ].filter(([, steps, values]) => steps?.length && values?.some((value) => value)); // all null or zero: nothing to see
}

function figure([title, steps, values, write, fromZero = true], style) {
  const known = values.filter((value) => value != null);
  const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const said = `${title}: from ${write(known[0])} to ${write(known.at(-1))} over ${known.length} values, between ${write(low)} and ${write(high)}`;
  const canvas = el("canvas", { role: "img", "aria-label": said });
  const element = el("figure", {}, el("figcaption", {}, title), el("div", { class: "canvas low" }, canvas));
  return { canvas, element, config: () => small(steps, values, write, style(), fromZero) };
}

class Runs {
  constructor(place, styles) {
    this.place = place;
    this.styles = styles;
    this.canvases = [];
  }

  show(group) {
    this.canvases.forEach(forget);
    this.canvases = [];
    this.place.replaceChildren(...group.runs.map((run, index) => this.entry(run, group.rows.find((row) => row.runs.includes(index)))));
  }

  entry(run, row) {
    const style = () => this.styles.of(row?.label ?? run.label);
    const end = pointAt(run, -1);
    const loss = run.curve.loss.findLast((value) => value != null);
    const summary = el(
      "summary", {}, swatch(style()), el("span", { class: "label" }, run.label), el("span", { class: "dim" }, `seed ${run.seed}`),
      isBroken(run) ? el("span", { class: "tag" }, run.status) : null,
      el("span", { class: "dim end" }, `${maybe(loss, (value) => `loss ${fixed(value)}`)}${end ? `, ${humanBytes(end.bytes)}` : ""}`),
    );
    const details = el("details", {}, summary);
    details.addEventListener("toggle", () => details.open && details.children.length === 1 && this.fill(details, run, style));
    return details;
  }

  fill(details, run, style) {
    const figures = chartsOf(run).map((chart) => figure(chart, style));
    details.append(
      el("div", { class: "inside" },
        run.marks.length ? el("p", { class: "hint" }, run.marks.join("; ")) : null,
        figures.length ? el("div", { class: "figures" }, ...figures.map((one) => one.element)) : null,
        el("div", { class: "columns" },
          el("div", {}, pairs("Numbers", numbersOf(run)), pairs("Where the time went", timesOf(run))),
          pairs("Configuration", flat(run.config)), pairs("Environment", flat(run.environment))),
        run.command ? el("h3", {}, "Command") : null, run.command ? command(run.command) : null),
    );
    for (const { canvas, config } of figures) {
      draw(canvas, config);
      this.canvases.push(canvas);
    }
  }
}
