// The charts of a report: the large one, the small ones of each run, and the one of several numbers of replicas.

// The large chart. `view`: { group, axis, measure, whole, log, off, styles }.
function curves(view) {
  const axis = AXES[view.axis];
  const log = axis.log || view.log;
  const all = seriesOf(view.group, view.measure);
  const shown = all.filter((one) => !view.off.has(one.label));
  const at = (point) => place(point, view.axis, view.group.link);
  const spots = shown.flatMap((one) => one.seeds.flatMap((seed) => seed.points.map(at))).filter((x) => x > 0);
  const unit = axis.clock ? clockUnit(Math.max(0, ...spots)) : { size: 1 };
  const range = view.whole ? {} : usefulRange(shown);
  const isInside = ({ y }) => y <= (range.max ?? Infinity) && y >= (range.min ?? -Infinity);
  const inSight = shown.flatMap((one) => one.mean.filter((point, i) => isInside(point) || (one.broken && i === one.mean.length - 1)).map(at));
  // On a logarithmic axis the first points, high above the range, would take a third of the chart.
  const edges = [Math.min(...inSight.filter((x) => x > 0), Math.max(...spots)) / 1.5, Math.max(...spots)];

  const dataset = (one, points, broken, more) => {
    const data = points.map((point) => ({ ...point, value: point.y, x: at(point) / unit.size, link: linkSeconds(point, view.group.link) }));
    // A line that leaves the range for good ends at its edge, or its cross would not be seen.
    if (broken && data.length && range.max != null) {
      const edge = 0.02 * (range.max - range.min);
      data.at(-1).y = Math.max(range.min + edge, Math.min(range.max - edge, data.at(-1).y));
    }
    const style = view.styles.of(one.label);
    return {
      label: one.label, hidden: view.off.has(one.label), borderColor: style.color, backgroundColor: style.color, borderDash: style.dash,
      data: log ? data.filter((point) => point.x > 0) : data, tension: 0, clip: AIR, pointHoverRadius: 5, pointHitRadius: 12, ...more,
    };
  };
  const marked = (broken) => ({
    pointRadius: ({ dataIndex, dataset: { data } }) => (dataIndex === data.length - 1 ? (broken ? 6 : 3.5) : 0),
    pointStyle: broken ? "crossRot" : "circle",
    pointBorderWidth: broken ? 2.5 : 1,
  });

  const datasets = all.flatMap((one) => {
    const style = view.styles.of(one.label);
    const order = one.row.reference ? 1 : style.order;
    const rank = nameRank(one.row);
    if (isSilent(one.row, view.axis)) {
      // Its end is a level to compare with.
      const end = one.mean.at(-1);
      const level = dataset(one, [], false, { main: true, level: true, order, rank, borderWidth: 1.5, borderDash: [5, 5], pointRadius: 0 });
      if (end && spots.length) level.data = edges.map((x) => ({ ...end, value: end.y, x, link: linkSeconds(end, view.group.link) }));
      return [level];
    }
    const main = dataset(one, one.mean, one.broken, { main: true, order, rank, borderWidth: style.width, ...marked(one.broken) });
    if (one.seeds.length < 2) return [main];
    const seeds = one.seeds.map(({ run, points }) =>
      dataset(one, points, isBroken(run), {
        seed: run.seed, order: 3, borderWidth: 1, borderColor: style.faint, borderDash: [], ...marked(isBroken(run)),
        ...(isBroken(run) ? {} : { pointRadius: 0 }),
      }));
    return [main, ...seeds];
  });

  const options = baseOptions();
  const title = axis.clock ? `${axis.title}, ${unit.name}` : axis.title;
  const near = shown.filter((one) => one.mean.length && at(one.mean.at(-1)) > 0.85 * edges[1]); // names beside these need room
  const room = 28 + Math.max(0, ...near.map((one) => textWidth(shortened(one.label), nameFont())));
  options.layout = { padding: ({ chart }) => ({ top: 8, right: chart.width < NARROW ? 8 : Math.min(room, 0.3 * chart.width) }) };
  options.scales = {
    x: log
      ? logScale(title, axis.log ? humanBytes : (value) => digits(value))
      : scale(title, { type: "linear", min: 0, max: spots.length ? edges[1] / unit.size : 1, ticks: { color: colour("--muted"), maxRotation: 0, includeBounds: false, callback: (value) => whole(value) } }),
    y: scale(view.measure === "loss" ? "validation loss" : readable(view.measure), { ...range, ticks: { color: colour("--muted"), includeBounds: false } }),
  };
  // A little air after the ends: marks are not cut in half, and names fit beside them.
  if (log && spots.length) Object.assign(options.scales.x, { min: edges[0] / unit.size, max: (edges[1] / unit.size) * 1.3 });
  options.plugins.tooltip.callbacks = {
    title: ([item]) => item.dataset.label + (item.dataset.seed == null ? "" : `, seed ${item.dataset.seed}`),
    label: ({ raw }) => [
      `${readable(view.measure)}  ${fixed(raw.value, 4)}`,
      `step  ${whole(Math.round(raw.step))}`,
      `sent  ${humanBytes(raw.bytes)}`,
      `received  ${humanBytes(raw.received)}`,
      `wall-clock  ${humanSeconds(raw.seconds)}`,
      `on the link  ${humanSeconds(raw.link)}`,
    ],
  };
  return { type: "line", data: { datasets }, options, plugins: [endLabels] };
}

// What the large chart shows, in words, for those who cannot see it.
function curvesSummary(view) {
  const parts = seriesOf(view.group, view.measure).filter((one) => !view.off.has(one.label) && one.mean.length).map((one) => {
    const end = one.mean.at(-1);
    const where = {
      bytes: isSilent(one.row, "bytes") ? "sending nothing" : `after ${humanBytes(end.bytes)} sent`,
      received: isSilent(one.row, "received") ? "receiving nothing" : `after ${humanBytes(end.received)} received`, steps: `after ${whole(Math.round(end.step))} steps`,
      wall: `after ${humanSeconds(end.seconds)}`, link: `after ${humanSeconds(linkSeconds(end, view.group.link))}`,
    }[view.axis];
    return `${one.label}: ${fixed(end.y)} ${where}${one.broken ? " (did not finish)" : ""}`;
  });
  return `Lines from the first to the last evaluation. At their ends, ${parts.join("; ") || "no line is switched on"}. “Save as CSV” has all values.`;
}

const PICTURE = { width: 1200, height: 620, margin: 24 }; // without the legend, which is as high as it must be

// The same chart with title and legend at a fixed width, whatever the screen.
function picture(view, title) {
  const config = curves(view);
  const text = { display: true, color: colour("--ink"), align: "start" };
  const font = { size: 14 };
  const { width, margin } = PICTURE;
  const { right } = config.options.layout.padding({ chart: PICTURE });
  const legend = legendBelow(config.data.datasets, width - 2 * margin, margin);
  const layout = { padding: { top: margin, left: margin, bottom: 1.5 * margin + legend.height, right: margin + right } };
  Object.assign(config.options, { responsive: false, devicePixelRatio: 2, layout });
  Object.assign(config.options.plugins, {
    title: { ...text, text: title, font: { size: 18, weight: "600" }, padding: { bottom: 2 } },
    subtitle: { ...text, text: view.group.name, color: colour("--muted"), font, padding: { bottom: 16 } },
  });
  const canvas = el("canvas", { width, height: PICTURE.height + legend.height });
  const chart = new Chart(canvas, { ...config, plugins: [background, legend.plugin, ...config.plugins] });
  return new Promise((resolve) => canvas.toBlob((blob) => (chart.destroy(), resolve(blob)), "image/png"));
}

function csv(view) {
  const quote = (value) => `"${String(value).replaceAll('"', '""')}"`;
  const lines = [["line", "seed", "step", "bytes_sent", "bytes_received", "wall_seconds", "link_seconds", view.measure]];
  for (const one of seriesOf(view.group, view.measure)) {
    if (view.off.has(one.label)) continue;
    for (const { run, points } of one.seeds)
      for (const point of points)
        lines.push([one.label, run.seed, point.step, point.bytes, point.received, point.seconds, linkSeconds(point, view.group.link), point.y]);
  }
  return lines.map((line) => line.map((value) => (typeof value === "number" ? value : quote(value))).join(",")).join("\r\n");
}

// One small line over steps; sizes are measured from zero.
function small(steps, values, write, style, fromZero) {
  const options = baseOptions();
  options.scales = {
    x: scale("", { type: "linear", ticks: { color: colour("--muted"), maxRotation: 0, maxTicksLimit: 5, callback: (value) => whole(value) } }),
    y: scale("", { ticks: { color: colour("--muted"), maxTicksLimit: 5, callback: (value) => write(value) }, beginAtZero: fromZero }),
  };
  options.plugins.tooltip.callbacks = { title: ([item]) => `step ${whole(item.parsed.x)}`, label: (item) => write(item.parsed.y) };
  const data = steps.map((x, i) => ({ x, y: values[i] ?? null }));
  const dataset = { data, borderColor: style.color, backgroundColor: style.color, borderWidth: 1.6, pointRadius: data.length > 40 ? 0 : 1.5, pointHitRadius: 10 };
  return { type: "line", data: { datasets: [dataset] }, options, plugins: [] };
}

// Final loss against the number of replicas: a line per method through the means, marks from low to high.
function scaling(part, styles) {
  const places = sorted(new Set(part.series.flatMap((one) => one.x)));
  const datasets = part.series.flatMap((one, index) => {
    const { color, dash } = styles.of(one.label);
    const aside = Math.min(1.02, 1.15 ** (1 / part.series.length)) ** (index - (part.series.length - 1) / 2); // or marks would hide marks
    const point = (x, y, said) => ({ x: x * aside, y: y ?? null, replicas: x, said });
    const means = one.x.map((x, i) => point(x, one.loss[i], "loss"));
    const marks = one.x.flatMap((x, i) => [point(x, one.low?.[i], "lowest"), point(x, one.high?.[i], "highest"), { x: x * aside, y: null }]);
    const look = { label: one.label, borderColor: color, backgroundColor: color };
    return [
      { ...look, main: true, order: 0, data: means, borderDash: dash, borderWidth: 2.2, pointRadius: 4, pointHoverRadius: 6, spanGaps: true },
      { ...look, order: 1, data: marks, borderWidth: 1.5, pointStyle: "line", pointRadius: 5, pointBorderWidth: 1.5 },
    ];
  });
  const options = baseOptions();
  options.layout = { padding: { top: 8, right: 12 } };
  options.scales = {
    x: scale(part.x, {
      type: "logarithmic", min: places[0] / 1.2, max: places.at(-1) * 1.2,
      afterBuildTicks: (axis) => (axis.ticks = places.map((value) => ({ value }))),
      ticks: { color: colour("--muted"), autoSkip: false, callback: (value) => whole(value) },
    }),
    y: scale("final validation loss", { grace: "8%" }),
  };
  options.plugins.tooltip.callbacks = {
    title: ([item]) => `${item.dataset.label}, ${item.raw.replicas} ${part.x}`,
    label: ({ raw }) => `${raw.said}  ${fixed(raw.y, 4)}`,
  };
  return { type: "line", data: { datasets }, options, plugins: [] };
}
