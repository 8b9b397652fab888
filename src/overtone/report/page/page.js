// The page: it keeps what the reader has chosen, and updates charts and tables when the choice changes.

const data = JSON.parse(byId("data").textContent);
for (const one of data.groups) one.link = linkOf(one.link);
const styles = new Styles(data.groups);
const state = { group: 0, axis: "bytes", measure: "loss", whole: false, log: false, off: new Set() };
const table = new FinalTable(byId("table"), styles);
const runs = new Runs(byId("runs"), styles);
const link = new LinkControl(byId("link"), () => (showCurves(), table.refresh()));

const group = () => data.groups[state.group];
const view = () => ({ ...state, group: group(), styles });

function curvesTitle() {
  const what = state.measure === "loss" ? "Validation loss" : readable(state.measure);
  return `${what} against ${state.axis === "link" ? `time on a link of ${linkWords(group().link)}` : AXES[state.axis].title}`;
}

function hint() {
  const silent = group().rows.filter((row) => isSilent(row, state.axis)).map((row) => row.label);
  const level = silent.length ? ` Dashed level: ${silent.join(", ")}, which ${state.axis === "received" ? "receives" : "sends"} nothing.` : "";
  const simulated = group().runs.some((run) => run.simulated);
  const seeds = group().rows.some((row) => row.seeds.length > 1) ? " Thin lines: single seeds; strong: their mean." : "";
  const few = (state.measure === "loss" ? "Left and low is better." : "Further left: fewer bytes.") + level;
  const what = {
    bytes: few,
    received: few,
    steps: "Local steps of one replica.",
    wall: simulated ? "Time the simulation took, all replicas in one process; for time between machines see “On a link”." : "As measured by replica 0.",
    link: "Local steps, latency of each message and bytes over the bandwidth, one after another; with a delay, exchanges go on beside local steps.",
  }[state.axis];
  const crossed = group().runs.some(isBroken) ? " A cross: diverged, stopped or not finished there." : "";
  return what + seeds + crossed;
}

function showCurves() {
  byId("curves-title").textContent = curvesTitle();
  byId("curves-hint").textContent = hint();
  byId("curves-summary").textContent = curvesSummary(view());
  byId("curves").setAttribute("aria-label", curvesTitle());
  byId("log-label").hidden = Boolean(AXES[state.axis].log);
  draw(byId("curves"), () => curves(view()));
}

function showLines() {
  const entries = group().rows.map((row) => {
    const input = el("input", { type: "checkbox" });
    input.checked = !state.off.has(row.label);
    input.addEventListener("change", () => {
      state.off[input.checked ? "delete" : "add"](row.label);
      showCurves();
    });
    const name = el("span", { class: "label" }, row.label);
    const end = maybe(state.measure === "loss" ? row.loss : row.metrics?.[state.measure], (value) => fixed(value));
    return el("li", {}, el("label", {}, input, swatch(styles.of(row.label)), name, el("span", { class: "dim end" }, end)));
  });
  byId("lines").replaceChildren(...entries);
}

function showScaling() {
  byId("scaling-section").hidden = !data.scaling;
  if (!data.scaling) return;
  const { title, note, series } = data.scaling;
  byId("scaling-title").textContent = title;
  byId("scaling").setAttribute("aria-label", title);
  const seeds = series.some((one) => one.low?.some((low, i) => low !== one.high?.[i])) ? " Marks: the best and the worst seed." : "";
  byId("scaling-note").textContent = (note ?? "") + seeds;
  const said = series.map((one) => `${one.label}: ${one.x.map((x, i) => `${maybe(one.loss[i], (value) => fixed(value))} at ${x}`).join(", ")}`);
  byId("scaling-summary").textContent = said.join("; ");
  const own = new Styles([{ rows: series.map(({ label }) => ({ label, method: label.split(",")[0] })) }]);
  byId("scaling-lines").replaceChildren(...series.map(({ label }) => el("li", {}, swatch(own.of(label)), label)));
  draw(byId("scaling"), () => scaling(data.scaling, own));
}

function showGroup() {
  const { facts, note } = group();
  const parts = [
    facts.data, facts.model, `${whole(facts.parameters)} parameters`, `${whole(facts.replicas)} replicas`, `${whole(facts.steps)} steps`,
    `${whole(facts.units)} ${facts.unit} in all`,
  ];
  byId("facts").textContent = parts.join(" · ");
  byId("note").textContent = note ?? "";
  byId("note").hidden = !note;
  const measures = measuresOf(group());
  if (!measures.includes(state.measure)) state.measure = "loss";
  segments(byId("measures"), measures.map((name) => [name, readable(name)]), state.measure, (name) => ((state.measure = name), showLines(), showCurves()));
  link.show(group().link);
  showLines();
  showCurves();
  table.show(group());
  runs.show(group());
}

function showFooter() {
  byId("footer").append(
    el("p", {}, `overtone ${data.version}, made ${data.made}. This file is complete: no network needed.`),
    ...(data.command ? [command(data.command)] : []),
  );
}

function setAll(on) {
  for (const row of group().rows) state.off[on ? "delete" : "add"](row.label);
  showLines();
  showCurves();
}

const fileName = (ending) => `overtone-${state.measure}-${state.axis}.${ending}`.replace(/[^\w.-]/g, "_");

segments(byId("groups"), data.groups.map((one, i) => [i, one.name]), 0, (index) => ((state.group = index), showGroup()));
segments(byId("axes"), Object.entries(AXES).map(([name, axis]) => [name, axis.text]), state.axis, (name) => ((state.axis = name), showCurves()));
byId("whole").addEventListener("change", (event) => ((state.whole = event.target.checked), showCurves()));
byId("log").addEventListener("change", (event) => ((state.log = event.target.checked), showCurves()));
byId("all-on").addEventListener("click", () => setAll(true));
byId("all-off").addEventListener("click", () => setAll(false));
byId("picture").addEventListener("click", async () => download(fileName("png"), await picture(view(), curvesTitle())));
byId("csv").addEventListener("click", () => download(fileName("csv"), new Blob([csv(view())], { type: "text/csv" })));
byId("legend").append(...data.legend.map((sentence) => el("li", {}, ...sentence.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part)))));
themeButton(byId("theme"), redraw);
showFooter();
showGroup();
showScaling();

// For tests, and for a reader at the console: the reader's choice, every chart by its canvas, the functions behind numbers.
window.overtone = { data, state, chart: (canvas) => drawn.get(canvas)?.chart, linkSeconds, rowSeconds, fewer };
