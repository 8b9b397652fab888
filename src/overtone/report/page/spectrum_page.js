// The page of the signal: it keeps what the reader has chosen, and updates charts, grids and table when it changes.

function choose(change) {
  Object.assign(state, change);
  show();
}

function showControls() {
  const here = record();
  const layers = namesOf(here).filter((layer) => isChunked(here, layer));
  if (!layers.includes(state.layer)) state.layer = WHOLE;
  byId("layer").replaceChildren(...layers.map((layer) => el("option", { value: layer }, layer)));
  byId("layer").value = state.layer;
  byId("at").max = run().records.length - 1;
  byId("at").value = state.at;
  byId("at-label").hidden = run().records.length < 2;
  byId("at-words").textContent = `step ${whole(here.step)} (round ${whole(here.round)})`;
  const vectors = Object.entries(VECTORS).filter(([of]) => here.whole.energy?.[of]);
  segments(byId("of"), vectors, vector(), (of) => choose({ of }));
  segments(byId("strongest"), run().strongest.map((count) => [count, String(count)]), state.strongest, (strongest) => choose({ strongest }));
  segments(byId("grid"), Object.entries(GRIDS), state.grid, (grid) => choose({ grid }));
}

function showEnergy() {
  const title = `Energy in the strongest ${state.strongest} of 4096`;
  byId("energy-title").textContent = `${title}: ${VECTORS[vector()].toLowerCase()}, ${state.layer}`;
  byId("energy-hint").textContent =
    "Share of the energy that the strongest values of each chunk have, in each basis. At the dashed level, the values are like noise: the basis does not help. " +
    (vector() === "owed" ? "Below it, the strongest were sent before, and weaker ones have gathered. " : "Below it, they are more alike than noise. ") +
    (run().basis ? `The method selects in the basis ${BASES[run().basis] ?? run().basis}.` : "The method selects nothing: it sends every value.");
  byId("energy").setAttribute("aria-label", byId("energy-title").textContent);
  draw(byId("energy"), energyChart);
  const ends = basesOf(record()).map((basis) => [BASES[basis] ?? basis, `--basis-${basis}`, [], energyOf(basis)(seenIn(record(), state.layer))]);
  ends.push(["Gaussian", "--gaussian", [4, 3], gaussianOf(seenIn(record(), state.layer))]);
  const line = ([label, variable, dash, value]) =>
    el("li", {}, swatch({ dash, css: `var(${variable})` }), label, el("span", { class: "dim" }, maybe(value, (share) => percent(share, 1))));
  byId("energy-lines").replaceChildren(...ends.map(line));
  byId("energy-summary").textContent = basesOf(record()).map((basis) => inWords(BASES[basis] ?? basis, over(state.layer, energyOf(basis)), (value) => percent(value, 1))).join("; ");
}

const MOST = 0.25; // a band with this share has the full colour
const strength = (share) => Math.min(1, Math.sqrt((share ?? 0) / MOST)).toFixed(3); // the root: weak bands are seen beside strong ones

function map(layer) {
  const shares = seenIn(record(), layer)[state.grid];
  const what = state.grid === "frequencies" ? ["frequencies down", "frequencies across"] : ["rows", "columns"];
  const place = (band) => `${band + 1} of 8`;
  const said = (i) => `${what[0]} ${place(Math.floor(i / 8))}, ${what[1]} ${place(i % 8)}: ${maybe(shares[i], (share) => percent(share, 1))}`;
  const most = shares.reduce((best, share, i) => (share > shares[best] ? i : best), 0);
  const cells = shares.map((share, i) => el("i", { style: `--share: ${strength(share)}`, title: said(i) }));
  const chosen = layer === state.layer;
  return el("figure", { class: chosen ? "chosen" : null, onclick: () => choose({ layer }) },
    el("figcaption", { title: layer }, el("bdi", {}, layer)),
    el("div", { class: "map", role: "img", "aria-label": `${layer}: most energy in ${said(most)}` }, ...cells));
}

function showMaps() {
  const here = record();
  byId("grid-hint").textContent =
    (state.grid === "frequencies"
      ? `Share of the energy of the strongest ${run().keep} of 4096 DCT coefficients over bands of frequencies: low ones are at the top and on the left. `
      : `Share of the energy of the strongest ${run().keep} of 4096 values over the rows and columns of each layer: the first ones are at the top and on the left. `) +
    "Click a grid to choose its layer.";
  byId("maps").replaceChildren(...namesOf(here).filter((layer) => isChunked(here, layer)).map(map));
  const marks = [[1 / 64, "1.6%: spread evenly"], [0.05, "5%"], [0.1, "10%"], [MOST, `${percent(MOST)} or more`]];
  byId("scale").replaceChildren(...marks.map(([share, text]) => el("span", {}, el("i", { style: `--share: ${strength(share)}` }), text)));
}

function showFigures(place, names, level) {
  const container = byId(place);
  container.querySelectorAll("canvas").forEach(forget);
  const made = names.filter(hasSeries).map((name) => {
    const said = inWords(`${SERIES[name].title}, ${state.layer}`, over(state.layer, SERIES[name].value), SERIES[name].write);
    const canvas = el("canvas", { role: "img", "aria-label": said, id: `chart-${name}` });
    return { name, canvas, element: el("figure", {}, el("figcaption", {}, SERIES[name].title), el("div", { class: "canvas" }, canvas)) };
  });
  container.replaceChildren(...made.map(({ element }) => element));
  for (const { name, canvas } of made) draw(canvas, () => layersChart(name, level, (layer) => choose({ layer })));
  return made.length > 0;
}

function showLines() {
  const lines = ` Strong: ${state.layer}; faint: every other layer. Click a line to choose its layer.`;
  const first = "The first round has none before it.";
  const agreed = showFigures("agreement", ["agreement"], (one) => 1 / one.replicas);
  byId("agreement-hint").textContent = agreed
    ? `1: all replicas sent the same. 1/${record().replicas}, the dashed level: nobody else sent what this replica sent.${lines}`
    : "The method averages each value over the replicas that sent it. No agreement can be seen in such a mean.";
  const repeated = showFigures("repeats", ["cosine", "repeated"]);
  byId("repeats-hint").textContent = repeated ? `1: the same again. 0: nothing in common.${lines}` : first;
  showFigures("growth", ["drift", "residual", "ratio"]);
  byId("growth-hint").textContent = `Norms of what a round adds, and of what stays behind after sending.${lines}`;
}

function columns() {
  const bases = basesOf(record()).map((basis) => [BASES[basis] ?? basis, energyOf(basis), (value) => percent(value, 1)]);
  const own = run().basis ?? "dct";
  const excess = (seen) => (gaussianOf(seen) ? energyOf(own)(seen) / gaussianOf(seen) : null);
  return [
    ...["drift", "residual", "ratio"].map((name) => [{ ratio: "residual / drift" }[name] ?? name, SERIES[name].value, SERIES[name].write]),
    ...bases, ["Gaussian", gaussianOf, (value) => percent(value, 1)], [`${BASES[own] ?? own} / Gaussian`, excess, (value) => `${digits(value)}x`],
    ["agreement", SERIES.agreement.value, SERIES.agreement.write], ["cosine", SERIES.cosine.value, SERIES.cosine.write], ["sent again", SERIES.repeated.value, SERIES.repeated.write],
  ].filter(([, value]) => namesOf(record()).some((layer) => value(seenIn(record(), layer)) != null));
}

function showTable() {
  const here = record();
  byId("table-title").textContent = `Every layer at step ${whole(here.step)}, the strongest ${state.strongest} of 4096`;
  const shown = columns();
  byId("table").tHead.replaceChildren(
    el("tr", {}, el("th", { scope: "col" }, "layer"), el("th", { scope: "col" }, "shape"), ...shown.map(([name]) => el("th", { scope: "col", class: "number" }, name))));
  const rows = namesOf(here).map((layer) => {
    const seen = seenIn(here, layer);
    const name = isChunked(here, layer) ? el("button", { type: "button", class: "quiet", onclick: () => choose({ layer }) }, layer) : layer;
    const cells = shown.map(([, value, write]) => el("td", { class: "number" }, maybe(value(seen), (number) => write(number))));
    return el("tr", { class: layer === state.layer ? "chosen" : null }, el("th", { scope: "row" }, name), el("td", {}, seen.shape?.join(" × ") ?? ""), ...cells);
  });
  byId("table").tBodies[0].replaceChildren(...rows);
}

function show() {
  state.at = Math.min(state.at, run().records.length - 1);
  const { facts } = run();
  byId("facts").textContent = [
    run().label, facts.data, facts.model, `${whole(facts.parameters)} parameters`, `${whole(facts.replicas)} replicas`, `${whole(facts.steps)} steps`,
    `${run().records.length} rounds looked at, on replica 0`,
  ].join(" · ");
  showControls();
  // A model without a single matrix that is cut into chunks has only norms.
  for (const part of ["controls", "energy-section", "grid-section"]) byId(part).hidden = !isChunked(record(), WHOLE);
  if (isChunked(record(), WHOLE)) {
    showEnergy();
    showMaps();
  }
  showLines();
  showTable();
}

segments(byId("groups"), data.runs.map((one, i) => [i, one.label]), 0, (index) => choose({ run: index, at: data.runs[index].records.length - 1 }));
byId("layer").addEventListener("change", (event) => choose({ layer: event.target.value }));
byId("at").addEventListener("input", (event) => choose({ at: Number(event.target.value) }));
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("footer").append(el("p", {}, `overtone ${data.version}, made ${data.made}. This file is complete: no network needed.`));
themeButton(byId("theme"), redraw);
choose({ at: run().records.length - 1 });

// For tests, and for a reader at the console: the reader's choice, and every chart by its canvas.
window.overtone = { data, state, chart: (canvas) => drawn.get(canvas)?.chart };
