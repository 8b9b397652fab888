// What the reader looks at: a run, a layer, a round, a vector, so many strongest values. Nothing here draws.

const BASES = { none: "no transform", dct: "DCT", hadamard: "Hadamard", random: "random rotation" };
const VECTORS = { owed: "Drift + residual", drift: "Drift" };
const GRIDS = { frequencies: "DCT frequencies", places: "Rows and columns" };
const WHOLE = "all layers";

const data = JSON.parse(byId("data").textContent);
const state = { run: 0, layer: WHOLE, at: 0, of: "owed", strongest: 128, grid: "frequencies" };

const run = () => data.runs[state.run];
const record = () => run().records[state.at];

// The numbers of a layer in one record; those of all layers together by the name WHOLE.
const seenIn = (one, layer) => (layer === WHOLE ? one.whole : one.layers.find(({ name }) => name === layer)) ?? {};

const namesOf = (one) => [WHOLE, ...one.layers.map(({ name }) => name)];

// Norms and biases are not cut into chunks: they have norms and nothing else.
const isChunked = (one, layer) => Boolean(seenIn(one, layer).energy);

// Points over the rounds that were looked at: { x: step, y: value, round }.
const over = (layer, value) => run().records.map((one) => ({ x: one.step, y: value(seenIn(one, layer)) ?? null, round: one.round }));

// The vector whose energy is shown. A method that sends everything has no residual, and so only a drift.
const vector = () => (record().whole.energy?.[state.of] ? state.of : "drift");

const energyOf = (basis) => (seen) => seen.energy?.[vector()]?.[basis]?.[run().strongest.indexOf(state.strongest)];
const gaussianOf = (seen) => seen.gaussian?.[run().strongest.indexOf(state.strongest)];
const basesOf = (one) => Object.keys(one.whole.energy?.drift ?? {});

const number = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : digits(value));
const share = (value) => `${digits(100 * value)}%`;

// `plain`: of layers that are not cut into chunks too.
const SERIES = {
  agreement: { title: "agreement of what was sent with the mean of all", value: (seen) => seen.agreement, write: number },
  cosine: { title: "cosine of the drift with that of the round before", value: (seen) => seen.cosine, write: number },
  repeated: { title: "share of the sent positions that were also sent in the round before", value: (seen) => seen.repeated, write: share },
  drift: { title: "drift of a round, norm", value: (seen) => seen.drift, write: number, log: true, plain: true },
  residual: { title: "residual after the round, norm", value: (seen) => seen.residual, write: number, log: true, plain: true },
  ratio: { title: "residual / drift", value: (seen) => (seen.residual == null || !seen.drift ? null : seen.residual / seen.drift), write: number, log: true, plain: true },
};

// True if any record has a value to draw.
const hasSeries = (name) => run().records.some((one) => namesOf(one).some((layer) => SERIES[name].value(seenIn(one, layer)) != null));
