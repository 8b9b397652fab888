// The charts of the signal: lines over the rounds that were looked at.

const stepAxis = () => scale("local steps", { type: "linear", ticks: { color: colour("--muted"), maxRotation: 0, includeBounds: false, callback: (value) => whole(value) } });

const look = (label, variable, more = {}) => ({
  label, borderColor: colour(variable), backgroundColor: colour(variable), borderWidth: 2.2, pointRadius: 2, pointHitRadius: 10, ...more,
});

const isMethods = (basis) => basis === run().basis;

// Share of the energy in the strongest values: a line for each basis, and the level of a Gaussian.
function energyChart() {
  const lines = basesOf(record()).map((basis) => ({
    ...look(BASES[basis] ?? basis, `--basis-${basis}`, { borderWidth: isMethods(basis) ? 3 : 2 }), data: over(state.layer, energyOf(basis)),
  }));
  const gaussian = { ...look("Gaussian", "--gaussian", { borderDash: [5, 5], borderWidth: 1.5, pointRadius: 0 }), data: over(state.layer, gaussianOf) };
  const options = baseOptions();
  options.scales = { x: stepAxis(), y: scale("share of the energy", { beginAtZero: true, ticks: { color: colour("--muted"), callback: (value) => percent(value) } }) };
  options.plugins.tooltip.callbacks = {
    title: ([item]) => item.dataset.label,
    label: ({ raw }) => [`${percent(raw.y, 1)} of the energy`, `step ${whole(raw.x)}, round ${whole(raw.round)}`],
  };
  return { type: "line", data: { datasets: [...lines, gaussian] }, options, plugins: [] };
}

// One number of every layer: the chosen one strong, all others faint. `level`: a reference to compare with.
function layersChart(name, level, choose) {
  const { value, write, log, plain } = SERIES[name];
  const last = run().records.at(-1);
  const layers = namesOf(last).filter((layer) => plain || isChunked(last, layer));
  const datasets = layers.map((layer) => {
    const chosen = layer === state.layer;
    const more = chosen ? { order: 0, borderWidth: 2.8 } : { order: 1, borderWidth: 1, pointRadius: 0 };
    const color = colour(chosen ? "--accent" : "--muted", chosen ? 1 : 0.45);
    return { ...look(layer, "--accent", more), borderColor: color, backgroundColor: color, data: over(layer, value), spanGaps: true };
  });
  if (level != null) {
    const points = run().records.map((one) => ({ x: one.step, y: level(one), round: one.round }));
    datasets.push({ ...look("1 / replicas", "--gaussian", { borderDash: [5, 5], borderWidth: 1.5, pointRadius: 0 }), data: points });
  }
  const options = baseOptions();
  const numbers = { ticks: { color: colour("--muted"), maxTicksLimit: 6, callback: (number) => write(number) }, beginAtZero: true };
  options.scales = { x: stepAxis(), y: log ? logScale("", write) : scale("", numbers) };
  options.onClick = (event, elements, chart) => {
    const [found] = chart.getElementsAtEventForMode(event, "nearest", { intersect: false }, true);
    const layer = found && datasets[found.datasetIndex].label;
    if (layers.includes(layer) && isChunked(last, layer)) choose(layer);
  };
  options.plugins.tooltip.callbacks = {
    title: ([item]) => item.dataset.label,
    label: ({ raw }) => [write(raw.y), `step ${whole(raw.x)}, round ${whole(raw.round)}`],
  };
  return { type: "line", data: { datasets }, options, plugins: [] };
}

// In words, for those who cannot see the chart.
function inWords(title, points, write) {
  const known = points.filter(({ y }) => y != null);
  return known.length ? `${title}: from ${write(known[0].y)} to ${write(known.at(-1).y)} over ${known.length} rounds` : `${title}: not measured`;
}
