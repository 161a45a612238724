"use strict";
// The page of ronde top. All texts are set as text, never as HTML.

const PARTS = ["other", "input", "waiting", "communication", "compute"]; // from the top
const LABELS = { waiting: "waiting for a rank" };
const MANY = 32; // rows; more are collapsed to hosts
const MOST_OUTLIERS = 16;
const SECONDS_KEPT = 3600;
const $ = (id) => document.getElementById(id);
const known = (values) => values.filter((value) => typeof value === "number");
const most = (values) => known(values).length ? Math.max(...known(values)) : null;
const least = (values) => known(values).length ? Math.min(...known(values)) : null;
const sum = (values) => known(values).length ? known(values).reduce((a, b) => a + b) : null;
const same = (values) => new Set(values).size === 1 ? values[0] : "";

const number = (digits) => (x) => x === null ? ""
  : typeof x === "string" ? "not finite" : x.toLocaleString("en", { maximumSignificantDigits: digits });
const count = (x) => x === null ? "" : x.toLocaleString("en");
const percent = (x) => x === null ? "" : `${Math.round(100 * x)} %`;
const unit = (name, factor = 1, digits = 3) => (x) => x === null ? "" : `${number(digits)(x / factor)} ${name}`;
const seconds = (x) => x === null ? ""
  : x < 1 ? unit("ms", 1e-3)(x) : x < 120 ? unit("s")(x) : x < 7200 ? unit("min", 60)(x) : unit("h", 3600)(x);
const gib = (x) => x ? unit("GiB", 2 ** 30, 4)(x) : "";
const clock = (x) => x === null ? "" : new Date(1000 * x).toLocaleTimeString("en-GB");
const rate = (x) => x === null ? "" : x < 1e9 ? unit("MB/s", 1e6)(x) : unit("GB/s", 1e9)(x);
const text = (x) => `${x ?? ""}`;

let fields = {}, points = [], hostPoints = [], view = null;
let isPaused = false, isOver = false, announced = "", lastNews = performance.now();

function element(name, parent, content = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = content;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function setText(node, content) {
  if (node.textContent !== content) node.textContent = content;
}

function named(kind, values) {
  return values && Object.fromEntries(fields[kind].map((name, i) => [name, values[i]]));
}

function decode(plain) {
  const found = named("WatchedJob", plain);
  found.job = named("JobInfo", found.job);
  found.ranks = found.ranks.map((each, i) => {
    const rank = { ...named("WatchedRank", each), order: i };
    rank.shares = named("Shares", rank.shares) ?? {};
    rank.marks = [
      rank.is_awaited && "others wait for it",
      rank.state !== "running" && rank.state,
      rank.blame >= 0.05 && "holds others up",
      rank.slowness >= 1.2 && "slow",
      rank.status_age_s > 10 && "silent",
    ].filter(Boolean);
    return { ...rank, key: `${rank.worker}` };
  });
  found.hosts = found.hosts.map((each, i) => {
    const host = named("WatchedHost", each);
    const usage = named("HostUsage", host.usage) ?? { gpus: [] };
    usage.gpus = usage.gpus.map((gpu) => named("GpuUsage", gpu));
    const marks = [
      host.num_oom_kills && "out of memory", host.num_errors && "network errors",
      host.usage && host.age_s > 10 && "silent",
      usage.gpu_problem && `no GPU figures: ${usage.gpu_problem}`,
    ].filter(Boolean);
    return { ...host, usage, marks, order: i, key: host.host };
  });
  const worker = new Map(found.ranks.map((rank) => [`${rank.host} ${rank.pid}`, rank.rank]));
  found.gpus = found.hosts.flatMap((host) => host.usage.gpus.map((gpu) => ({
    ...gpu, host: host.host, marks: gpu.throttled_by, key: `${host.host} ${gpu.number}`,
    ranks: gpu.pids.map((pid) => worker.get(`${host.host} ${pid}`)).filter((rank) => rank != null).join(", "),
  }))).map((gpu, i) => ({ ...gpu, order: i }));
  return found;
}

// A column: its title, a row's value, a value's text, the value of many; is it text?
const notes = ["note", (row) => row.marks.join(", "), text, () => "", true];
const host = ["host", (row) => row.host, text, same, true];
const RANKS = [
  ["rank", (r) => r.rank, text, (ranks) => `${least(ranks)}-${most(ranks)}`], host,
  ["blame", (r) => r.shares.compute == null ? null : r.blame, percent, most], notes,
  ["step", (r) => r.step, count, least],
  ["step time", (r) => r.step_s, seconds, most],
  ["without collectives", (r) => r.own_s, seconds, most],
  ["to median", (r) => r.slowness, (x) => x === null ? "" : `${x.toFixed(2)} ×`, most],
  ...["compute", "communication", "waiting", "input", "other"].map((part) =>
    [LABELS[part] ?? part, (r) => r.shares[part] ?? null, percent, most]),
  ["in", (r) => r.collective, text, same, true],
  ["for", (r) => r.collective ? r.collective_age_s : null, seconds, most],
  ["CPU", (r) => r.cpu, unit("cores"), sum],
  ["memory", (r) => r.rss_bytes, gib, sum],
  ["GPU memory", (r) => r.device_bytes, gib, sum],
  ["pid", (r) => r.pid || null, text, () => null],
];
const HOSTS = [
  host, ["ranks", (h) => h.num_ranks, count, sum], ["CPU", (h) => h.cpu, percent, most],
  ["memory", (h) => h.usage.memory_bytes ?? null, gib, sum], ["of", (h) => h.usage.total_memory_bytes ?? null, gib, sum],
  ["/dev/shm", (h) => h.usage.shm_bytes ?? null, gib, sum],
  ["received", (h) => h.received_per_s, rate, sum], ["sent", (h) => h.sent_per_s, rate, sum],
  ["errors", (h) => h.usage.at_s ? h.num_errors : null, count, sum],
  ["OOM kills", (h) => h.usage.at_s ? h.num_oom_kills : null, count, sum], notes,
];
const GPUS = [
  ["GPU", (g) => g.number, text, (gpus) => `${least(gpus)}-${most(gpus)}`], host,
  ["ranks", (g) => g.ranks, text, () => "", true], ["name", (g) => g.name, text, same, true],
  ["busy", (g) => g.utilization, percent, least],
  ["memory", (g) => g.memory_bytes, gib, most], ["of", (g) => g.total_memory_bytes, gib, most],
  ["power", (g) => g.power_w, unit("W"), most], ["temperature", (g) => g.temperature_c, unit("°C"), most],
  ["clock", (g) => g.clock_mhz, unit("MHz", 1, 4), least], ["of", (g) => g.max_clock_mhz, unit("MHz", 1, 4), most],
  ["throttled by", (g) => g.throttled_by.join(", "), text, same, true],
];

class Table {
  constructor(id, noun, columns) {
    Object.assign(this, { noun, columns, column: null, sign: 1, open: new Set(), lines: new Map() });
    this.caption = element("caption", $(id));
    const titles = element("tr", element("thead", $(id)));
    this.titles = columns.map((column, i) => {
      const cell = element("th", titles, "", { scope: "col", class: column[4] ? "text" : "" });
      element("button", cell, column[0]).onclick = () => this.sortBy(i);
      return cell;
    });
    this.body = element("tbody", $(id));
  }

  sortBy(i) {
    const first = this.columns[i][4] || i === 0 ? 1 : -1;
    [this.column, this.sign] = this.column !== i ? [i, first] : this.sign === first ? [i, -first] : [null, 1];
    this.titles.forEach((cell, j) => {
      if (j === this.column) cell.setAttribute("aria-sort", this.sign > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
      setText(cell.firstChild, this.columns[j][0] + (j !== this.column ? "" : this.sign > 0 ? " ▲" : " ▼"));
    });
    this.show(this.rows);
  }

  value(row, [, get, , total]) {
    return row.own ? total(row.own.map(get)) : get(row);
  }

  sorted(rows) {
    if (this.column === null) return [...rows].sort((a, b) => a.order - b.order);
    const value = (row) => this.value(row, this.columns[this.column]);
    const rank = (x) => x === null || x === "" ? 1 : 0;
    return [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (rank(x) || rank(y)) return rank(x) - rank(y);
      return this.sign * (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true }));
    });
  }

  show(rows) {
    this.rows = rows;
    const outliers = rows.filter((row) => row.marks.length);
    let shown = this.sorted(rows), caption = `${count(rows.length)} ${this.noun}${rows.length === 1 ? "" : "s"}`;
    if (rows.length > MANY && this.noun !== "host") {
      const hosts = new Map();
      for (const row of rows) hosts.set(row.host, [...(hosts.get(row.host) ?? []), row]);
      const heads = [...hosts].map(([name, own], i) => ({ own, host: name, key: `host ${name}`, order: i, marks: [] }));
      const first = this.sorted(outliers).slice(0, MOST_OUTLIERS).map((row) => ({ ...row, key: `first ${row.key}` }));
      shown = [...first, ...this.sorted(heads).flatMap(
        (head) => [head, ...(this.open.has(head.key) ? this.sorted(head.own) : [])])];
      caption += ` on ${count(hosts.size)} hosts, ${count(outliers.length)} to look at` +
        (outliers.length > first.length ? `, of which ${first.length} are shown` : "") +
        "; a host's line has its worst figures, and sums of CPU and memory";
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
      this.columns.forEach((column, j) => {
        const content = column[2](this.value(row, column));
        const button = line.children[j].querySelector("button");
        if (button) button.setAttribute("aria-expanded", this.open.has(row.key));
        setText(button ?? line.children[j], button ? `${this.open.has(row.key) ? "▾" : "▸"} ${content}` : content);
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

// A line: its label, its colour, its dashes. Values stand in the caption.
class Chart {
  constructor(id, write, lines, { top, describe } = {}) {
    Object.assign(this, { box: $(id), write, lines, top, describe, isStacked: lines.length > 2 });
    this.caption = this.box.querySelector("figcaption");
    this.values = element("b", this.caption);
    this.frame = element("div", this.box, "", { role: "img", "aria-label": this.caption.textContent });
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

  showValues() {
    const at = Math.min(this.plot?.cursor.idx ?? Infinity, this.data[0].length - 1);
    if (this.describe) return this.describe(at);
    const values = this.lines.map(([label], i) => `${label} ${this.write(this.data[i + 1][at]) || "unknown"}`);
    setText(this.values, ` ${values.join(", ").trim()} at ${clock(this.data[0][at])}`);
  }

  make() {
    const style = getComputedStyle(document.body);
    const color = (name) => style.getPropertyValue(`--${name}`);
    const axis = { stroke: color("text"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
    const series = this.lines.map(([, name, dash], i) => ({
      stroke: color(name), width: 1.5, dash, points: { show: false },
      fill: this.isStacked ? hatch(color(name), color("box"), i) : undefined,
    }));
    return new uPlot({
      ...this.size(), series: [{}, ...series],
      axes: [{ ...axis, size: 30, space: 62,
        values: (plot, ticks, i, space, step) => ticks.map((x) => clock(x).slice(0, step < 60 ? 8 : 5)) },
        { ...axis, size: 76, values: (plot, ticks) => ticks.map(this.write) }],
      scales: { y: { range: (plot, low, high) => [0, this.top ?? (Math.max(high, 0) * 1.1 || 1)] } },
      cursor: { y: false }, legend: { show: false },
      hooks: { setCursor: [() => this.showValues()] },
    }, [[], ...series.map(() => [])], this.frame);
  }
}

// A pattern, so that colour is not the only sign.
function hatch(color, paper, i) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 12;
  const pen = tile.getContext("2d");
  pen.fillStyle = color;
  pen.fillRect(0, 0, 12, 12);
  pen.fillStyle = paper;
  if (i === 0) pen.fillRect(4, 4, 3, 3);
  if (i === 1) pen.fillRect(0, 0, 2, 12);
  if (i === 2) pen.fillRect(0, 0, 12, 2);
  if (i === 3) for (let x = 0; x < 12; x++) pen.fillRect(x, x, 2, 1);
  return pen.createPattern(tile, "repeat");
}

const tables = {
  ranks: new Table("rank-table", "rank", RANKS), hosts: new Table("host-table", "host", HOSTS),
  gpus: new Table("gpu-table", "GPU", GPUS),
};
const swatches = PARTS.map((part) => {
  const item = element("li", $("parts"));
  const swatch = element("canvas", item, "", { width: 28, height: 16, "aria-hidden": "true" });
  element("b", item, LABELS[part] ?? part);
  return { swatch, value: element("span", item) };
});
const showParts = (at) => swatches.forEach(({ value }, i) => setText(value, percent(recent(points)[at]?.[8 - i] ?? null)));
const charts = {
  shares: new Chart("shares", percent, PARTS.map((part) => [part, part]), { top: 1, describe: showParts }),
  step: new Chart("step", seconds, [["", "communication"]]),
  tokens: new Chart("tokens", (x) => x === null ? "" : count(Math.round(x)), [["", "compute"]]),
  loss: new Chart("loss", number(4), [["", "waiting"]]),
  cpu: new Chart("cpu", percent, [["", "compute"]], { top: 1 }),
  network: new Chart("network", rate, [["received (line)", "communication"], ["sent (dashes)", "waiting", [6, 4]]]),
};

const recent = (rows) => rows.filter((row) => row[0] >= rows.at(-1)[0] - $("span").value);

function showCharts() {
  const rows = recent(points);
  const column = (i) => rows.map((row) => typeof row[i] === "number" ? row[i] : null);
  // Each area covers those of the parts above it down to the axis.
  const upTo = (part) => rows.map((row) => row[4] === null ? null : sum(row.slice(4, 9 - part)));
  charts.shares.show([column(0), ...PARTS.map((part, j) => upTo(j))]);
  ["step", "tokens", "loss"].forEach((name, i) => charts[name].show([column(0), column(i + 1)]));
  const own = recent(hostPoints);
  const rates = (i) => own.map((row) => row[1][$("host").value]?.[i] ?? null);
  charts.cpu.show([own.map((row) => row[0]), rates(0)]);
  charts.network.show([own.map((row) => row[0]), rates(1), rates(2)]);
}

function restyle() {
  const style = getComputedStyle(document.body);
  swatches.forEach(({ swatch }, i) => {
    const pen = swatch.getContext("2d");
    pen.fillStyle = hatch(style.getPropertyValue(`--${PARTS[i]}`), style.getPropertyValue("--box"), i);
    pen.fillRect(0, 0, 28, 16);
  });
  Object.values(charts).forEach((chart) => chart.forget());
  showCharts();
}

function show() {
  const { job, ranks, hosts } = view;
  setText($("title"), `job ${job.job_id}: ${job.command.join(" ")}`);
  document.title = `${view.hang ? "hangs, " : ""}step ${view.step ?? "unknown"}, ${job.job_id}`;
  setText($("hang"), view.hang);
  // Read aloud once, not each second with another duration.
  const news = view.hang.replace(/[0-9.]+(ms|[smh])([0-9]+[smh])?/g, "");
  if (announced !== news) setText($("alert"), view.hang);
  announced = news;
  const figures = {
    "step": count(view.step), "step time": seconds(view.step_s), "99 % of steps below": seconds(view.step_p99_s),
    "tokens/s": charts.tokens.write(view.tokens_per_s), "loss": number(4)(view.loss),
    "ranks": count(ranks.length), "hosts": count(hosts.length), "running for": seconds(view.at - job.started_at),
    "restarts": count(job.restarts),
  };
  if (!$("figures").children.length) for (const name of Object.keys(figures)) {
    const box = element("div", $("figures"));
    element("dt", box, name);
    element("dd", box);
  }
  Object.values(figures).forEach((content, i) => setText($("figures").children[i].lastChild, content || "unknown"));
  const names = hosts.map((each) => each.host);
  if ([...$("host").options].map((option) => option.value).join() !== names.join()) {
    const chosen = $("host").value;
    $("host").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  }
  Object.entries(tables).forEach(([name, table]) => table.show(view[name]));
  $("gpus").parentElement.hidden = !view.gpus.length;
  showCharts();
}

function setState() {
  const silent_s = Math.floor((performance.now() - lastNews) / 5000) * 5;
  const lost = source.readyState === EventSource.CLOSED
    ? "The server refuses this page. Open the URL that ronde top printed."
    : "The connection to ronde top is lost. Trying again.";
  setText($("state"), isOver ? "The job has ended. The figures are its last ones."
    : source.readyState !== EventSource.OPEN ? (view ? lost : "Connecting.")
    : isPaused ? "Paused." : silent_s >= 5 ? `No news for ${silent_s} s.` : "Live.");
}

const source = new EventSource("events");
source.addEventListener("history", (event) => {
  ({ fields, points, hosts: hostPoints } = JSON.parse(event.data));
});
source.addEventListener("view", (event) => {
  const news = JSON.parse(event.data);
  if (news.point[0] > (points.at(-1)?.[0] ?? 0)) {
    points.push(news.point);
    if (news.hosts) hostPoints.push(news.hosts);
  }
  points = points.slice(-SECONDS_KEPT);
  hostPoints = hostPoints.slice(-SECONDS_KEPT / 10);
  view = decode(news.view);
  lastNews = performance.now();
  if (!isPaused) show();
  setState();
});
source.addEventListener("end", () => {
  isOver = true;
  source.close();
  if (view) show();
  setState();
});
source.onopen = source.onerror = setState;
setInterval(setState, 1000);
$("pause").onclick = () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", isPaused);
  if (view && !isPaused) show();
  setState();
};
$("span").onchange = $("host").onchange = showCharts;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
restyle();
// The cookie has the token; nobody needs to see it.
window.history.replaceState(null, "", "/");
