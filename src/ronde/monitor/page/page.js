"use strict";
// The page of ronde top. All texts are set as text, never as HTML.

const PARTS = ["other", "input", "waiting", "communication", "compute"]; // from the top
const LABELS = { waiting: "waiting for a rank", input: "waiting for input" };
const MANY = 32; // rows; more are collapsed to hosts
const MOST_OUTLIERS = 16;
const SECONDS_KEPT = 3600;
const SILENT_S = 3;
const $ = (id) => document.getElementById(id);
const known = (values) => values.filter((value) => typeof value === "number");
const over = (join) => (values) => known(values).length ? join(known(values)) : null;
const most = over((values) => Math.max(...values));
const least = over((values) => Math.min(...values));
const sum = over((values) => values.reduce((a, b) => a + b));
const same = (values) => new Set(values).size === 1 ? values[0] : "";

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

// Each row gets a key, and marks: words on what is wrong with it.
function prepare(found) {
  for (const rank of found.ranks) {
    rank.key = `${rank.worker}`;
    rank.marks = [
      rank.is_awaited && "others wait for it",
      rank.state !== "running" && rank.state,
      rank.blame >= 0.05 && "holds others up",
      rank.slowness >= 1.2 && "slow",
      rank.state === "running" && rank.status_age_s > SILENT_S && "silent",
    ].filter(Boolean);
  }
  const ranks = new Map(found.ranks.map((rank) => [`${rank.host} ${rank.pid}`, rank.rank]));
  for (const host of found.hosts) {
    host.key = host.host;
    host.usage ??= { gpus: [] };
    host.marks = [
      host.num_oom_kills && "out of memory", host.num_errors && "network errors",
      host.age_s > SILENT_S && "silent",
      host.usage.gpu_problem && `no GPU figures: ${host.usage.gpu_problem}`,
    ].filter(Boolean);
  }
  found.gpus = found.hosts.flatMap(({ host, usage }) => usage.gpus.map((gpu) => ({
    ...gpu, host, marks: gpu.throttled_by, key: `${host} ${gpu.number}`,
    ranks: gpu.pids.map((pid) => ranks.get(`${host} ${pid}`)).filter((rank) => rank != null).join(", "),
  })));
  return found;
}

// A column: its title, a row's value, a value's text, the value of many; is it text?
const notes = ["note", (row) => row.marks.join(", "), text, () => "", true];
const host = ["host", (row) => row.host, text, same, true];
const RANKS = [
  ["rank", (r) => r.rank, text, (ranks) => `${least(ranks)}-${most(ranks)}`], host,
  ["others wait", (r) => r.shares && r.blame, percent, most], notes,
  ["step", (r) => r.step, count, least],
  ["step time", (r) => r.step_s, seconds, most],
  ["own work", (r) => r.own_s, seconds, most],
  ["to median", (r) => r.slowness, (x) => x === null ? "" : `${x.toFixed(2)} ×`, most],
  ...PARTS.toReversed().map((part) => [LABELS[part] ?? part, (r) => r.shares?.[part], percent, most]),
  ["in", (r) => r.collective, text, same, true],
  ["for", (r) => r.collective ? r.collective_age_s : null, seconds, most],
  ["CPU", (r) => r.cpu, unit("cores"), sum],
  ["memory", (r) => r.rss_bytes, gib, sum],
  ["GPU memory", (r) => r.device_bytes, gib, sum],
  ["pid", (r) => r.pid || null, text, () => null],
];
const HOSTS = [
  host, ["ranks", (h) => h.num_ranks, count], ["CPU", (h) => h.cpu, percent],
  ["memory", (h) => h.usage.memory_bytes, gib], ["of", (h) => h.usage.total_memory_bytes, gib],
  ["/dev/shm", (h) => h.usage.shm_bytes, gib],
  ["received", (h) => h.received_per_s, rate],
  ["sent", (h) => h.sent_per_s, rate],
  ["errors", (h) => h.num_errors, count], ["OOM kills", (h) => h.num_oom_kills, count], notes,
];
const GPUS = [
  ["GPU", (g) => g.number, text, (gpus) => `${least(gpus)}-${most(gpus)}`], host,
  ["ranks", (g) => g.ranks, text, () => "", true], ["name", (g) => g.name, text, same, true],
  ["busy", (g) => g.utilization, percent, least],
  ["memory", (g) => g.memory_bytes, gib, most], ["of", (g) => g.total_memory_bytes, gib, most],
  ["power", (g) => g.power_w, unit("W"), most], ["temperature", (g) => g.temperature_c, unit("°C"), most],
  ["clock", (g) => g.clock_mhz, unit("MHz", 1, 4), least], ["of", (g) => g.max_clock_mhz, unit("MHz", 1, 4), most],
  ["slowed by", (g) => g.throttled_by.join(", "), text, same, true],
];

class Table {
  constructor(id, noun, columns) {
    Object.assign(this, { noun, columns, open: new Set(), lines: new Map() });
    this.caption = element("caption", $(id));
    const titles = element("tr", element("thead", $(id)));
    for (const [title, , , , isText] of columns) {
      element("th", titles, title, { scope: "col", class: isText ? "text" : "" });
    }
    this.body = element("tbody", $(id));
  }

  show(rows) {
    this.rows = rows;
    let shown = rows, caption = `${count(rows.length)} ${this.noun}${rows.length === 1 ? "" : "s"}`;
    if (rows.length > MANY && this.noun !== "host") {
      const hosts = new Map();
      for (const row of rows) hosts.set(row.host, [...(hosts.get(row.host) ?? []), row]);
      const outliers = rows.filter((row) => row.marks.length);
      shown = outliers.slice(0, MOST_OUTLIERS).map((row) => ({ ...row, key: `first ${row.key}` }));
      caption += ` on ${count(hosts.size)} hosts, ${count(outliers.length)} to look at` +
        (outliers.length > shown.length ? `, of which ${shown.length} are shown` : "") +
        "; a host's line has its worst figures, and sums of CPU and memory";
      for (const [name, own] of hosts) {
        const head = { own, host: name, key: `host ${name}`, marks: [] };
        shown.push(head, ...(this.open.has(head.key) ? own : []));
      }
    }
    setText(this.caption, caption);
    this.place(shown);
  }

  place(shown) {
    const focused = document.activeElement;
    const lines = new Map(shown.map((row) => [row.key, this.lines.get(row.key) ?? this.line(row)]));
    for (const [key, line] of this.lines) if (!lines.has(key)) line.remove();
    shown.forEach((row, i) => {
      const line = lines.get(row.key);
      if (this.body.children[i] !== line) this.body.insertBefore(line, this.body.children[i]);
      line.className = row.own ? "head" : row.marks.length ? "outlier" : "";
      this.columns.forEach(([, get, write, total], j) => {
        const content = write(row.own ? total(row.own.map(get)) : get(row));
        const button = line.children[j].querySelector("button"), isOpen = this.open.has(row.key);
        if (button) button.setAttribute("aria-expanded", isOpen);
        setText(button ?? line.children[j], button ? `${isOpen ? "▾" : "▸"} ${content}` : content);
      });
    });
    this.lines = lines;
    if (document.activeElement !== focused) focused.focus({ preventScroll: true });
  }

  line(row) {
    const line = document.createElement("tr");
    this.columns.forEach((column, i) => {
      element(i ? "td" : "th", line, "", { class: column[4] ? "text" : "", ...(i ? {} : { scope: "row" }) });
    });
    if (row.own) element("button", line.children[0], "", { title: row.host }).onclick = () => {
      if (!this.open.delete(row.key)) this.open.add(row.key);
      this.show(this.rows);
    };
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
    this.box.hidden = !known(data.slice(1).flat()).length;
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
  ranks: new Table("rank-table", "rank", RANKS), hosts: new Table("host-table", "host", HOSTS),
  gpus: new Table("gpu-table", "GPU", GPUS),
};
const values = PARTS.map((part) => {
  const item = element("li", $("parts"));
  element("i", item, "", { class: part });
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
