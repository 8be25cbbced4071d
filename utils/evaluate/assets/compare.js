// The page of several runs side by side, and the start of either page.
"use strict";

const COMPARED = [
  ["metrics/mAP_0.5:0.95", "mAP50-95, YOLO's definition"], ["metrics/mAP_0.5", "mAP50, YOLO's definition"],
  ["coco/AP", "AP, COCO's definition"], ["coco/AP_small", "AP of small objects"],
  ["coco/AP_medium", "AP of medium objects"], ["coco/AP_large", "AP of large objects"],
  ["metrics/precision", "Precision"], ["metrics/recall", "Recall"],
  ["train/box_loss", "Box loss, training"], ["val/box_loss", "Box loss, validation"],
  ["train/cls_loss", "Class loss, training"], ["val/cls_loss", "Class loss, validation"],
  ["train/dfl_loss", "DFL loss, training"], ["val/dfl_loss", "DFL loss, validation"],
  ["x/lr1", "Learning rate of the weights"], ["train/img_per_s", "Pictures per second"],
];
const PLACES = new Set(["name", "project", "save_dir", "exist_ok", "device", "workers"]); // where, not what

function figures(run) {
  const { results, evaluation, options, best } = run;
  const settings = evaluation.settings || {}; // of a validation, which has no options
  const at = (name, fallback) => {
    const value = best === null ? null : (results[name] || [])[best];
    return isKnown(value) ? value : fallback;
  };
  const coco = evaluation.coco || {};
  return {
    run, name: run.title, cfg: options.cfg || options.weights || settings.weights || "",
    imgsz: options.imgsz || settings["image size"], batch: options.batch_size || settings.batch,
    done: results.epoch ? last(results.epoch) + 1 : null,
    p: at("metrics/precision", evaluation.precision), r: at("metrics/recall", evaluation.recall),
    map50: at("metrics/mAP_0.5", evaluation.map50), map: at("metrics/mAP_0.5:0.95", evaluation.map),
    ap: at("coco/AP", coco.ap), small: at("coco/AP_small", coco.ap_small), medium: at("coco/AP_medium", coco.ap_medium),
    large: at("coco/AP_large", coco.ap_large), speed: last(results["train/img_per_s"]), time: run.train_s,
  };
}

// Return data file and split behind the figures of a run, null where nothing tells.
function measuredOn(run) {
  const data = run.options.data || (run.evaluation.settings || {}).data;
  return data ? `${data} (${splitName(run)})` : null;
}

function comparedSummary(runs) {
  const number = (title, key, more) => ({ title, key, number: true, ...more });
  const best = (title, key) => number(title, key, { best: true });
  const swatch = (row) => [
    element("span", { class: "swatch", style: `background:${colour(runs.indexOf(row.run))}` }),
    row.run.report ? element("a", { href: row.run.report }, row.name) : row.name,
  ];
  const columns = [
    { title: "run", key: "name", cell: swatch }, { title: "model", key: "cfg" }, number("image", "imgsz"), number("batch", "batch"),
    number("epochs", "done"), best("P", "p"), best("R", "r"), best("mAP50", "map50"), best("mAP50-95", "map"),
    best("COCO AP", "ap"), best("small", "small"), best("medium", "medium"), best("large", "large"),
    best("pictures/s", "speed"), number("training", "time", { cell: (row) => duration(row.time) }),
  ];
  const text = quiet("Figures of each run's best epoch, the best of a column in green; click a title to sort. AP and sizes: "
    + "COCO's definition, in pixels of the original pictures.");
  const sets = new Set(runs.map((run) => measuredOn(run)).filter(Boolean));
  const caution = sets.size < 2 ? null : quiet(`These runs were measured on different data: ${[...sets].join("; ")}. Their figures can `
    + "be compared only where the pictures are the same.");
  return section("Summary", card(sortedTable(columns, runs.map(figures), "runs")), text, caution);
}

function differences(runs) {
  const tables = runs.map((run) => ({ ...run.options, ...run.hyp }));
  const names = [...new Set(tables.flatMap((table) => Object.keys(table)))].filter((name) => {
    const known = tables.filter((table) => table[name] !== undefined); // runs of other versions have other options
    return !PLACES.has(name) && new Set(known.map((table) => JSON.stringify(table[name]))).size > 1;
  });
  if (!names.length) return section("Differences", quiet("The options of these runs are the same."));
  const head = element("tr", {}, element("th", {}, "option"), runs.map((run) => element("th", {}, run.title)));
  const rows = names.map((name) => element("tr", {}, element("th", { scope: "row" }, name),
    tables.map((table) => element("td", { class: "words" }, table[name] === undefined || table[name] === null ? "–" : String(table[name])))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, rows));
  return section("Differences", card(element("div", { class: "scroll" }, table)));
}

function comparedCharts(runs) {
  const host = element("div", { class: "charts" });
  const show = (isShare) => {
    groups.clear();
    const along = (run) => (run.results.epoch || []).map((epoch) => (isShare ? (epoch + 1) / Math.max(run.epochs, epoch + 1) : epoch));
    host.replaceChildren(...COMPARED.map(([key, title]) => chart({
      title, x: isShare ? "share of the run" : "epoch", whole: !isShare, group: "epoch", legend: true,
      series: runs.map((run, index) => ({
        name: run.title, x: along(run), y: run.results[key], colour: colour(index), dashed: index >= COLOURS,
      })),
    })).filter(Boolean));
  };
  show(false);
  if (!host.children.length) return null;
  const choice = element("button", { class: "choice", type: "button", "aria-pressed": "false" }, "over the share of each run");
  choice.addEventListener("click", () => {
    const isShare = choice.getAttribute("aria-pressed") === "false";
    choice.setAttribute("aria-pressed", String(isShare));
    choice.textContent = isShare ? "over epochs" : "over the share of each run";
    show(isShare);
  });
  const isOneLength = new Set(runs.map((run) => run.epochs)).size === 1;
  return section("Curves", isOneLength ? null : element("p", {}, choice), host);
}

function comparedClasses(runs) {
  const rows = new Map();
  runs.forEach((run, index) => {
    for (const row of run.evaluation.classes || []) {
      const entry = rows.get(row.name) || { name: row.name };
      entry[`labels${index}`] = row.labels;
      entry[`ap${index}`] = row.ap;
      rows.set(row.name, entry);
    }
  });
  for (const [name, row] of rows) if (!runs.some((_, index) => row[`labels${index}`])) rows.delete(name);
  if (!rows.size) return null;
  const counted = runs.map((_, index) => index).filter((index) => (runs[index].evaluation.classes || []).length);
  const areSame = [...rows.values()].every((row) => new Set(counted.map((index) => row[`labels${index}`])).size === 1);
  const labels = areSame ? [{ title: "labels", key: `labels${counted[0]}`, number: true }]
    : counted.map((index) => ({ title: `labels, ${runs[index].title}`, key: `labels${index}`, number: true }));
  const columns = [
    { title: "class", key: "name" }, ...labels,
    ...runs.map((run, index) => ({ title: run.title, key: `ap${index}`, number: true })),
  ];
  return section("Classes", card(sortedTable(columns, [...rows.values()], "mAP50-95 per class")),
    quiet("mAP50-95 of each class in the last validation, YOLO's definition."));
}

function comparedNotes(runs) {
  const said = (run) => [...run.unread, ...run.warnings.map((entry) => entry.text), ...run.advice];
  return section("Notes", runs.filter((run) => said(run).length).map((run) => {
    const texts = said(run);
    return element("details", { class: "card" }, element("summary", {}, `${run.title}: ${texts.length}`),
      element("ul", { class: "notes" }, texts.map((text) => element("li", {}, text))));
  }));
}

const COMPARISON_SECTIONS = {
  Summary: comparedSummary, Differences: differences, Curves: comparedCharts, Classes: comparedClasses, Notes: comparedNotes,
};

// Names of runs are told apart by as much of their folders as that takes.
function nameRuns(runs) {
  const parts = runs.map((run) => run.folder.replace(/[\\/]+$/, "").split(/[\\/]/));
  runs.forEach((run, index) => {
    let length = 1;
    const tail = (path) => path.slice(-length).join("/");
    while (length < parts[index].length && parts.filter((path) => tail(path) === tail(parts[index])).length > 1) length += 1;
    run.title = runs.length === 1 ? run.name : tail(parts[index]);
  });
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { runs } = data;
  nameRuns(runs);
  const isOne = runs.length === 1;
  const sections = isOne ? drawn(RUN_SECTIONS, runs[0]) : drawn(COMPARISON_SECTIONS, runs);
  const links = sections.map((part) => element("a", { href: `#${part.id}` }, part.dataset.title));
  const where = isOne ? runs[0].folder : `${runs.length} runs`;
  document.querySelector("main").replaceChildren(
    element("header", {}, element("h1", {}, isOne ? `${runs[0].kind} report: ${runs[0].title}` : "Comparison of runs"),
      quiet(`${where}, written ${data.written}`)),
    element("nav", { "aria-label": "sections" }, links),
    ...sections,
  );
}

start();
