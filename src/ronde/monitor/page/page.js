"use strict";
// The page of ronde top. All texts are set as text, never as HTML.

const PARTS = ["other", "input", "waiting", "communication", "compute"]; // from the top
const LABELS = { waiting: "waiting for a rank", input: "waiting for input" };
const MANY = 32; // rows; of more only those to look at are shown
const SECONDS_KEPT = 3600;
const $ = (id) => document.getElementById(id);
const sum = (values) => values.reduce((a, b) => a + b);

const number = (digits) => (x) => x == null ? ""
  : typeof x === "string" ? "not finite" : x.toLocaleString("en", { maximumSignificantDigits: digits });
const compact = (x) => x == null ? "" : x.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
const count = (x) => x == null ? "" : Math.round(x).toLocaleString("en");
const percent = (x) => x == null ? "" : `${Math.round(100 * x)} %`;
const unit = (name, factor = 1, digits = 3) => (x) => x == null ? "" : `${number(digits)(x / factor)} ${name}`;
const seconds = (x) => x == null ? ""
  : x < 1 ? unit("ms", 1e-3)(x) : x < 120 ? unit("s")(x) : x < 7200 ? unit("min", 60)(x) : unit("h", 3600)(x);
const gib = (x) => x ? unit("GiB", 2 ** 30, 4)(x) : "";
const clock = (x) => new Date(1000 * x).toLocaleTimeString("en-GB");
const rate = (x) => x == null ? "" : x < 1e9 ? unit("MB/s", 1e6)(x) : unit("GB/s", 1e9)(x);
const text = (x) => `${x ?? ""}`;

let points = [], view = null, isOver = false, lastNews = performance.now();

function element(name, parent, content = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = content;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function setText(node, content) {
  if (node.textContent !== content) node.textContent = content;
}

// Add each host's worst blame, and one list of all GPUs.
function prepare(found) {
  const ranks = new Map(found.ranks.map((rank) => [`${rank.host} ${rank.pid}`, rank.rank]));
  for (const host of found.hosts) {
    host.blame = Math.max(...found.ranks.filter((rank) => rank.host === host.host).map((rank) => rank.blame));
    host.usage ??= { gpus: [] };
  }
  found.gpus = found.hosts.flatMap(({ host, usage }) => usage.gpus.map((gpu) => ({
    ...gpu, host, marks: gpu.throttled_by,
    ranks: gpu.pids.map((pid) => ranks.get(`${host} ${pid}`)).filter((rank) => rank != null).join(", "),
  })));
  return found;
}

// A column: its title, a row's value, a value's text; is it text?
const notes = ["note", (row) => row.marks.join(", "), text, true];
const host = ["host", (row) => row.host, text, true];
const RANKS = [
  ["rank", (r) => r.rank, text], host, ["others wait", (r) => r.shares && r.blame, percent], notes,
  ["step", (r) => r.step, count], ["step time", (r) => r.step_s, seconds], ["own work", (r) => r.own_s, seconds],
  ["to median", (r) => r.slowness, (x) => x === null ? "" : `${x.toFixed(2)} ×`],
  ...PARTS.toReversed().map((part) => [LABELS[part] ?? part, (r) => r.shares?.[part], percent]),
  ["in", (r) => r.collective, text, true], ["for", (r) => r.collective ? r.collective_age_s : null, seconds],
  ["CPU", (r) => r.cpu, unit("cores")], ["memory", (r) => r.rss_bytes, gib],
  ["GPU memory", (r) => r.device_bytes, gib], ["pid", (r) => r.pid || null, text],
];
const HOSTS = [
  host, ["ranks", (h) => h.num_ranks, count], ["others wait", (h) => h.blame, percent], notes,
  ["CPU", (h) => h.cpu, percent],
  ["memory", (h) => h.usage.memory_bytes, gib], ["of", (h) => h.usage.total_memory_bytes, gib],
  ["/dev/shm", (h) => h.usage.shm_bytes, gib],
  ["received", (h) => h.received_per_s, rate], ["sent", (h) => h.sent_per_s, rate],
  ["errors", (h) => h.num_errors, count], ["OOM kills", (h) => h.num_oom_kills, count],
];
const GPUS = [
  ["GPU", (g) => g.number, text], host, ["ranks", (g) => g.ranks, text, true], ["name", (g) => g.name, text, true],
  ["busy", (g) => g.utilization, percent], ["memory", (g) => g.memory_bytes, gib], ["of", (g) => g.total_memory_bytes, gib],
  ["power", (g) => g.power_w, unit("W")], ["temperature", (g) => g.temperature_c, unit("°C")],
  ["clock", (g) => g.clock_mhz, unit("MHz", 1, 4)], ["of", (g) => g.max_clock_mhz, unit("MHz", 1, 4)],
  ["slowed by", (g) => g.throttled_by.join(", "), text, true],
];

class Table {
  constructor(name, columns) {
    Object.assign(this, { columns, isOpen: false });
    const table = $(`${name}-table`), caption = element("caption", table);
    this.caption = element("span", caption);
    this.button = element("button", caption);
    this.button.onclick = () => {
      this.isOpen = !this.isOpen;
      this.show(this.rows);
    };
    const titles = element("tr", element("thead", table));
    for (const [title, , , isText] of columns) {
      element("th", titles, title, { scope: "col", class: isText ? "text" : "" });
    }
    this.body = element("tbody", table);
  }

  show(rows) {
    this.rows = rows;
    const marked = rows.filter((row) => row.marks.length), isLong = rows.length > MANY;
    const shown = isLong && !this.isOpen ? marked.slice(0, MANY) : rows;
    setText(this.caption, `${count(shown.length)} of ${count(rows.length)} shown, ${count(marked.length)} to look at`);
    setText(this.button, this.isOpen ? "Show those to look at" : "Show all");
    this.button.hidden = !isLong;
    while (this.body.children.length > shown.length) this.body.lastChild.remove();
    shown.forEach((row, i) => {
      const line = this.body.children[i] ?? this.line();
      line.className = row.marks.length ? "outlier" : "";
      this.columns.forEach(([, get, write], j) => setText(line.children[j], write(get(row))));
    });
  }

  line() {
    const line = element("tr", this.body);
    this.columns.forEach(([, , , isText], i) => {
      element(i ? "td" : "th", line, "", { class: isText ? "text" : "", ...(i ? {} : { scope: "row" }) });
    });
    return line;
  }
}

// One or more lines by the names of their colours; several are stacked areas.
class Chart {
  constructor(id, write, lines) {
    Object.assign(this, { box: $(id), write, lines });
    const caption = this.box.querySelector("figcaption");
    this.value = element("b", caption);
    this.frame = element("div", this.box, "", { role: "img", "aria-label": caption.textContent });
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.frame);
  }

  size() {
    return { width: Math.max(200, this.frame.clientWidth), height: 170 };
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  show(data) {
    this.data = data;
    this.box.hidden = data.slice(1).flat().every((value) => value === null);
    if (this.box.hidden || data[0].length < 2) this.forget();
    else (this.plot ??= this.make()).setData(data);
    if (!this.box.hidden) this.showValues();
  }

  // Values are those under the mouse, or else the newest.
  showValues() {
    const at = Math.min(this.plot?.cursor.idx ?? Infinity, this.data[0].length - 1);
    const written = this.lines.length > 1 ? "" : this.write(this.data[1][at]) || "unknown";
    setText(this.value, ` ${written} at ${clock(this.data[0][at])}`);
    if (!written) PARTS.forEach((part, i) => setText(values[i], percent(points[at][8 - i])));
  }

  make() {
    const style = getComputedStyle(document.body);
    const color = (name) => style.getPropertyValue(`--${name}`);
    const axis = { stroke: color("text"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
    const isStacked = this.lines.length > 1;
    const series = this.lines.map((name) => ({
      stroke: color(name), width: 1.5, points: { show: false }, fill: isStacked ? color(name) : undefined,
    }));
    return new uPlot({
      ...this.size(), series: [{}, ...series],
      axes: [{ ...axis, size: 30, space: 62,
        values: (plot, ticks, i, space, step) => ticks.map((x) => clock(x).slice(0, step < 60 ? 8 : 5)) },
        { ...axis, size: 76, values: (plot, ticks) => ticks.map(this.write) }],
      scales: { y: { range: (plot, low, high) => [0, isStacked ? 1 : Math.max(high, 0) * 1.1 || 1] } },
      cursor: { y: false }, legend: { show: false },
      hooks: { setCursor: [() => this.showValues()] },
    }, [[], ...series.map(() => [])], this.frame);
  }
}

const tables = {
  ranks: new Table("rank", RANKS), hosts: new Table("host", HOSTS), gpus: new Table("gpu", GPUS),
};
const values = PARTS.map((part) => {
  const item = element("li", $("parts"));
  element("i", item).style.background = `var(--${part})`;
  element("b", item, LABELS[part] ?? part);
  return element("span", item);
});
const charts = {
  step: new Chart("step", seconds, ["communication"]), tokens: new Chart("tokens", compact, ["compute"]),
  loss: new Chart("loss", number(4), ["waiting"]), shares: new Chart("shares", percent, PARTS),
};

// A point has the time, the figures of the first three charts, and the shares.
function showCharts() {
  const column = (i) => points.map((row) => typeof row[i] === "number" ? row[i] : null);
  ["step", "tokens", "loss"].forEach((name, i) => charts[name].show([column(0), column(i + 1)]));
  // Each area covers those of the parts below it down to the axis.
  const upTo = (part) => points.map((row) => row[4] === null ? null : sum(row.slice(4, 9 - part)));
  charts.shares.show([column(0), ...PARTS.map((part, i) => upTo(i))]);
}

function show() {
  const { job, ranks, hosts, gpus } = view;
  setText($("title"), `job ${job.job_id}: ${job.command.join(" ")}`);
  document.title = `${view.hang ? "hangs, " : ""}step ${view.step ?? "unknown"}, ${job.job_id}`;
  setText($("hang"), view.hang);
  const figures = {
    "step": count(view.step), "step time": seconds(view.step_s), "99 % of steps below": seconds(view.step_p99_s),
    "tokens/s": count(view.tokens_per_s), "loss": number(4)(view.loss),
    "ranks": count(ranks.length), "hosts": count(hosts.length), "running for": seconds(view.at - job.started_at),
    "restarts": count(job.restarts),
  };
  if (!$("figures").children.length) for (const name of Object.keys(figures)) {
    const box = element("div", $("figures"));
    element("dt", box, name);
    element("dd", box);
  }
  Object.values(figures).forEach((content, i) => setText($("figures").children[i].lastChild, content || "unknown"));
  Object.entries(tables).forEach(([name, table]) => table.show(view[name]));
  $("gpus").parentElement.hidden = !gpus.length;
  showCharts();
}

function setState() {
  const silent_s = Math.floor((performance.now() - lastNews) / 5000) * 5;
  const lost = source.readyState === EventSource.CLOSED
    ? "The server refuses this page. Open the URL that ronde top printed."
    : "The connection to ronde top is lost. Trying again.";
  setText($("state"), isOver ? "The job has ended. The figures are its last ones."
    : source.readyState !== EventSource.OPEN ? (view ? lost : "Connecting.")
    : silent_s >= 5 ? `No news for ${silent_s} s.` : "Live.");
}

const source = new EventSource("events");
source.addEventListener("history", (event) => {
  points = JSON.parse(event.data);
});
source.addEventListener("view", (event) => {
  const news = JSON.parse(event.data);
  if (news.point[0] > (points.at(-1)?.[0] ?? 0)) points.push(news.point);
  points = points.slice(-SECONDS_KEPT);
  view = prepare(news.view);
  lastNews = performance.now();
  show();
  setState();
});
source.addEventListener("end", () => {
  isOver = true;
  source.close();
  setState();
});
source.onopen = source.onerror = setState;
setInterval(setState, 1000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  Object.values(charts).forEach((chart) => chart.forget());
  if (view) showCharts();
});
// The cookie has the token; nobody needs to see it.
window.history.replaceState(null, "", "/");
