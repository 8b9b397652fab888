// Turns rows and runs into lines: points with all values that an axis or a tooltip may need. Nothing here draws.

const AXES = {
  bytes: { text: "Bytes sent", title: "bytes sent by one replica", log: true },
  received: { text: "Bytes received", title: "bytes received by one replica", log: true },
  steps: { text: "Steps", title: "local steps" },
  wall: { text: "Wall-clock", title: "wall-clock time", clock: true },
  link: { text: "On a link", title: "time on the link", clock: true },
};

const CARRIED = ["step", "bytes", "received", "hops", "seconds"];
const OF_CURVE = new Set([...CARRIED, "overlapped", "loss", "average"]);

// Every column of a curve that is not listed above is another metric, such as top1.
function measuresOf(group) {
  const names = group.runs.flatMap((run) => Object.keys(run.curve).filter((name) => !OF_CURVE.has(name)));
  return ["loss", ...new Set(names)];
}

const isBroken = (run) => run.status !== "finished";

// Evaluations without a value are left out: the line of a diverged run ends at its last finite value.
function pointsOf(run, column) {
  const values = run.curve[column] ?? [];
  const points = [];
  const visits = new Map(); // a step may be evaluated twice: before finish() and after it
  run.curve.step.forEach((step, i) => {
    const visit = visits.get(step) ?? 0;
    visits.set(step, visit + 1);
    if (values[i] == null) return;
    points.push({ key: `${step}/${visit}`, y: values[i], ...pointAt(run, i) });
  });
  return points;
}

function meanOf(lines) {
  if (lines.length === 1) return lines[0];
  const others = lines.slice(1).map((points) => new Map(points.map((point) => [point.key, point])));
  return lines[0].flatMap((point) => {
    const all = [point, ...others.map((line) => line.get(point.key))];
    if (all.includes(undefined)) return [];
    return [{ key: point.key, seeds: all, ...Object.fromEntries(["y", ...CARRIED].map((name) => [name, mean(all.map((one) => one[name]))])) }];
  });
}

// The runs that count, as Row.counted in overtone/report/standings.py: those that have finished, or all if none has.
function countedOf(runs) {
  const ended = runs.filter((run) => run.finish);
  return ended.length ? ended : runs;
}

// One line per row: the mean over the seeds that count, where all have a value, and each seed by itself.
function seriesOf(group, measure) {
  return group.rows.flatMap((row) => {
    if (measure !== "loss" && row.of === "average") return []; // other metrics are of the shared model or replica 0
    const runs = row.runs.map((index) => group.runs[index]);
    const column = measure === "loss" ? row.of : measure;
    const seeds = runs.map((run) => ({ run, points: pointsOf(run, column) })).filter((seed) => seed.points.length);
    if (!seeds.length) return [];
    const counted = countedOf(seeds.map((seed) => seed.run));
    const line = meanOf(seeds.filter((seed) => counted.includes(seed.run)).map((seed) => seed.points));
    return [{ row, label: row.label, seeds, mean: line, broken: counted.some(isBroken) }];
  });
}

function place(point, axis, link) {
  return { bytes: point.bytes, received: point.received, steps: point.step, wall: point.seconds, link: linkSeconds(point, link) }[axis];
}

// A row that has exchanged nothing has no place on a logarithmic axis of bytes.
const isSilent = (row, axis) => AXES[axis].log && row[axis] === 0;

// A row's time on the link: the mean over the seeds that have finished. The time of an unfinished run says nothing.
function rowSeconds(row, group) {
  const ends = row.runs.map((index) => group.runs[index]).filter((run) => run.finish).map((run) => pointAt(run, -1));
  return ends.length ? linkSeconds({ seeds: ends }, group.link) : null;
}

function pointAt(run, index) {
  if (!run.curve.step.length) return null;
  const counts = Object.fromEntries(CARRIED.map((name) => [name, run.curve[name]?.at(index) ?? 0]));
  return { ...counts, overlapped: run.curve.overlapped?.at(index), in_store: run.in_store };
}

const sorted = (values) => [...values].sort((a, b) => a - b);

// The range worth looking at. Losses begin high and fall fast: the first points would press all ends into one line.
// Where values grow (accuracy) the same holds upside down.
function usefulRange(series) {
  const lines = series.map((one) => one.mean.map((point) => point.y)).filter((values) => values.length);
  if (!lines.length) return {};
  const growing = lines.filter((values) => values.at(-1) > values[0]).length > lines.length / 2;
  const sign = growing ? -1 : 1;
  const all = sorted(lines.flat().map((value) => sign * value));
  const sound = series.filter((one) => !one.broken && one.mean.length).map((one) => sign * one.mean.at(-1).y);
  const low = all[0];
  const high = sound.length ? Math.max(...sound) : all.at(-1);
  const cap = Math.max(low + 1.7 * (high - low), all[Math.floor(0.6 * (all.length - 1))]);
  if (cap > low + 0.8 * (all.at(-1) - low)) return {};
  const edge = low - 0.06 * (cap - low);
  return growing ? { min: -cap, max: -edge } : { min: edge, max: cap };
}
