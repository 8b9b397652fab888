// The time that the same run would take on another link.

const PRESETS = [
  { text: "1 Gbit/s, 1 ms", up: 1000, down: 1000, latency: 1 },
  { text: "50 Mbit/s, 20 ms", up: 50, down: 50, latency: 20 },
  { text: "5 Mbit/s, 80 ms", up: 5, down: 5, latency: 80 },
  { text: "20 up, 200 down, 20 ms", up: 20, down: 200, latency: 20 },
];

const USUAL = { up: 50, down: 50, latency: 20, step_seconds: 0.1 }; // as overtone.config.Network

const linkOf = (given) => Object.fromEntries(Object.entries(USUAL).map(([name, usual]) => [name, given?.[name] ?? usual]));

// As Link.seconds and Link.seconds_in_store in overtone/sim/network.py; a link here is in Mbit/s and ms.
function exchangeSeconds({ bytes, received, hops }, link, inStore) {
  const [up, down] = [(8 * bytes) / (link.up * 1e6), (8 * received) / (link.down * 1e6)];
  return (hops * link.latency) / 1e3 + (inStore ? up + down : Math.max(up, down));
}

// As overtone/report/link_time.py: exchanges that go on beside the training cost what local steps do not hide.
function linkSeconds(point, link) {
  if (point.seeds) return mean(point.seeds.map((seed) => linkSeconds(seed, link)));
  const rest = { bytes: point.bytes, received: point.received, hops: point.hops };
  let waited = 0;
  for (const [steps, bytes, received, hops] of point.overlapped ?? []) {
    waited += Math.max(0, exchangeSeconds({ bytes, received, hops }, link, point.in_store) - steps * link.step_seconds);
    rest.bytes -= bytes;
    rest.received -= received;
    rest.hops -= hops;
  }
  return point.step * link.step_seconds + waited + exchangeSeconds(rest, link, point.in_store);
}

const rateWords = (rate) => (rate < 1000 ? `${digits(rate)} Mbit/s` : `${digits(rate / 1000)} Gbit/s`);

const linkWords = ({ up, down, latency }) =>
  `${up === down ? rateWords(up) : `${rateWords(up)} up and ${rateWords(down)} down`}, ${digits(latency)} ms`;

// Shows `link` in the form and writes what the reader types back into it.
class LinkControl {
  constructor(form, changed) {
    this.fields = { up: byId("up"), down: byId("down"), latency: byId("latency"), step_seconds: byId("step-seconds") };
    this.changed = changed;
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const [name, field] of Object.entries(this.fields)) {
      field.addEventListener("input", () => {
        const valid = field.value !== "" && field.checkValidity();
        field.setAttribute("aria-invalid", String(!valid));
        if (valid) this.take({ [name]: field.valueAsNumber });
      });
    }
    this.buttons = PRESETS.map((preset) => {
      const { text, ...values } = preset;
      const choose = () => (this.take(values), this.show(this.link));
      return el("button", { type: "button", class: "quiet", onclick: choose }, text);
    });
    byId("presets").append(...this.buttons);
  }

  show(link) {
    this.link = link;
    for (const [name, field] of Object.entries(this.fields)) {
      field.value = link[name];
      field.setAttribute("aria-invalid", "false");
    }
    this.mark();
  }

  take(values) {
    Object.assign(this.link, values);
    this.mark();
    this.changed();
  }

  mark() {
    PRESETS.forEach((preset, i) => {
      const same = ["up", "down", "latency"].every((name) => preset[name] === this.link[name]);
      this.buttons[i].setAttribute("aria-pressed", String(same));
    });
  }
}
