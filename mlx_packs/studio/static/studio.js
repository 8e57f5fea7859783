// Follows the runs of a page by asking every 2 s; texts of runs are only ever set as text.
const LEAST_WAIT = 2000;
const MOST_WAIT = 60000;
const MOST_POINTS = 4000; // of a series, before it is read anew with fewer
const STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((n) => [n, 2 * n, 5 * n]); // of batches
const COLORS = ["--train", "--valid"];
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

function setText(node, text) {
  if (node && node.textContent !== text) node.textContent = text;
}

async function get(address) {
  const answer = await fetch(address);
  if (answer.ok) return answer.json();
  const again = "packs studio was started again: open the link that it printed.";
  throw new Error(answer.status === 401 ? again : "This page cannot be updated. Reload it.");
}

// One request at a time, none while the page is hidden, fewer while the answers are slow or none.
async function follow(ask) {
  let wait = LEAST_WAIT;
  for (;;) {
    const start = performance.now();
    try {
      if (!document.hidden) await ask();
      wait = Math.max(LEAST_WAIT, 4 * (performance.now() - start));
    } catch (error) {
      wait = Math.min(MOST_WAIT, 2 * wait);
      const gone = "packs studio does not answer. Runs go on without it.";
      setText(byId("status"), error instanceof TypeError ? gone : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function followRuns() {
  const rows = [...document.querySelectorAll("tr[data-name]")];
  follow(async () => {
    const states = await get("/states");
    if (Object.keys(states).length !== rows.length) location.reload();
    for (const row of rows) {
      const [state, progress] = states[row.dataset.name] ?? [];
      if (state !== row.dataset.state) location.reload();
      setText(row.querySelector(".progress"), progress || "–");
    }
    setText(byId("status"), "");
  });
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.box = figure.querySelector(".box");
    this.keys = figure.dataset.keys.split(" ");
    this.names = figure.dataset.names.split("|");
    this.box.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
  }

  size() {
    return { width: Math.max(this.box.clientWidth, 100), height: this.keys[1] ? 300 : 150 };
  }

  draw(points) {
    this.figure.hidden = !this.keys.some((key) => points[key]);
    if (this.figure.hidden) return;
    const data = uPlot.join(this.keys.map((key) => points[key] ?? [[], []]));
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(), data, this.box);
  }

  options() {
    const axis = {
      stroke: () => color("--muted"),
      grid: { stroke: () => color("--grid"), width: 1 },
      ticks: { stroke: () => color("--grid"), width: 1 },
    };
    const short = (value) => (value == null ? "–" : String(Number(value.toPrecision(4))));
    const wide = (_, values) => 20 + 7 * Math.max(0, ...(values ?? []).map((v) => v.length));
    const series = this.names.map((label, i) => ({
      label,
      value: (_, value) => short(value),
      stroke: () => color(COLORS[i]),
      width: 2,
      spanGaps: true,
      points: { show: i > 0 },
    }));
    return {
      ...this.size(),
      cursor: { drag: { x: false, y: false } },
      scales: { x: { time: false } },
      axes: [
        { ...axis, incrs: STEPS },
        { ...axis, size: wide, values: (_, values) => values.map(short) },
      ],
      series: [{ label: "Batch", value: (_, batch) => batch ?? "–" }, ...series],
    };
  }

  step(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !this.plot) return;
    event.preventDefault();
    const batches = this.plot.data[0];
    const from = this.plot.cursor.idx ?? (way > 0 ? -1 : batches.length);
    const at = Math.min(Math.max(from + way, 0), batches.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(batches[at], "x"), top: 10 });
  }
}

function followRun({ name, state }) {
  const charts = [...document.querySelectorAll(".plot")].map((figure) => new Chart(figure));
  const reload = () => location.reload(); // charts have their colors
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", reload);
  const answers = [...document.querySelectorAll(".now")];
  let points = {};
  let from = { file: "", from: 0 };

  follow(async () => {
    const news = await get(`/runs/${name}/lines?${new URLSearchParams(from)}`);
    const isFirstAnswer = byId("answered") === null && news.answered !== null;
    if (news.state !== state || isFirstAnswer) location.reload();

    if (news.whole) points = {};
    for (const [key, [batches, values]] of Object.entries(news.series)) {
      const [x, y] = points[key] ?? [[], []];
      points[key] = [x.concat(batches), y.concat(values)];
    }
    const isLong = Object.values(points).some(([batches]) => batches.length > MOST_POINTS);
    from = isLong ? { file: "", from: 0 } : { file: news.file, from: news.next };
    byId("no-points").hidden = Object.keys(points).length > 0;
    if (news.whole || Object.keys(news.series).length) charts.forEach((chart) => chart.draw(points));

    setText(byId("progress"), news.progress);
    setText(byId("answered"), String(news.answered));
    if (news.answered) answers.forEach((node, i) => setText(node, news.answers[i] || "(nothing)"));
    if (byId("done")) byId("done").value = news.batch ?? 0;
    // in steps, since a screen reader speaks each change
    const tenths = Math.floor((10 * news.batch) / news.batches);
    const share = news.batches ? `, ${10 * tenths} %` : "";
    setText(byId("status"), news.state === "training" ? `Run ${name}: training${share}` : "");
  });
}

function followWork(section) {
  follow(async () => {
    const [state, text] = await get(`/${section.dataset.screen}/state`);
    if (state !== section.dataset.state) location.reload();
    else setText(section.querySelector("p"), text);
  });
}

function offerUpload(box) {
  const [input, bar, cancel] = box.querySelectorAll("input, progress, button");
  box.hidden = false;
  box.addEventListener("dragover", (event) => event.preventDefault());
  box.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
  });
  input.addEventListener("change", () => send(input.files[0]));
  function send(file) {
    const fault = `${file.name} has more than ${box.dataset.most / 1e9} GB.`;
    // a browser shows no answer before it has sent all
    if (file.size > box.dataset.most) return setText(byId("status"), fault);
    const request = new XMLHttpRequest();
    const show = (isSending) => [bar, cancel].forEach((node) => (node.hidden = !isSending));
    request.upload.onprogress = ({ loaded, total }) => {
      bar.value = loaded / total;
      setText(byId("status"), `${(loaded / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`);
    };
    request.onabort = () => setText(byId("status"), "The upload was cancelled.");
    request.onerror = () => setText(byId("status"), "The upload failed. Try it again.");
    request.onload = () => {
      const { data, error } = JSON.parse(request.responseText);
      setText(byId("status"), error?.message ?? "");
      if (!data) return;
      const select = document.querySelector("select[name=data]");
      select.add(new Option(data, data, true, true));
      byId("new").requestSubmit();
    };
    request.onloadend = () => show(false);
    cancel.onclick = () => request.abort();
    request.open("POST", `/upload?${new URLSearchParams({ name: file.name })}`);
    request.send(file);
    show(true);
  }
}

const copy = byId("copy");
if (copy) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId("command").textContent);
    setText(copy, "Copied");
  });
}
if (byId("runs")) followRuns();
if (byId("work")?.dataset.state === "working") followWork(byId("work"));
if (byId("run")) followRun(byId("run").dataset);
for (const card of document.querySelectorAll("[name=preset]")) {
  card.addEventListener("change", () => byId("new").requestSubmit(byId("update")));
}
if (byId("upload")) offerUpload(byId("upload"));
