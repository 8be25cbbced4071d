// The page of one run, built from the data block.
"use strict";

const LOSSES = [["box", "Box loss"], ["cls", "Class loss"], ["dfl", "DFL loss (distances to the sides)"]];
const RATES = [["x/lr0", "biases"], ["x/lr1", "weights"], ["x/lr2", "norms"]];
const SHOWN_BARS = 12; // classes in the chart of the data
const NOTHING_RIGHT = "No detection is right at IoU 0.5 yet, so no confidence is better than another.";

function section(title, ...content) {
  const parts = content.flat(Infinity).filter(Boolean);
  if (!parts.length) return null;
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  return element("section", { id, "data-title": title }, element("h2", {}, title), parts);
}

function quiet(text) {
  return element("p", { class: "quiet" }, text);
}

// Return the sections that have something to show; data of an unexpected form cost one of them, not the page.
function drawn(builders, given) {
  return Object.entries(builders).map(([title, build]) => {
    try {
      return build(given);
    } catch (error) {
      return section(title, quiet(`This part could not be drawn, its data are of an unexpected form: ${error.message}.`));
    }
  }).filter(Boolean);
}

function card(...content) {
  const parts = content.flat().filter(Boolean);
  return parts.length ? element("div", { class: "card" }, parts) : null;
}

function duration(seconds) {
  if (!isKnown(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function size(bytes) {
  return bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function last(column) {
  const known = (column || []).filter(isKnown);
  return known.length ? known[known.length - 1] : null;
}

// A table that sorts by the column whose title is clicked. columns: [{title, key, number, cell}], rows: objects.
function sortedTable(columns, rows, caption) {
  const body = element("tbody", {});
  const heads = columns.map((column) => {
    const button = element("button", { type: "button" }, column.title);
    const head = element("th", { class: column.number ? "number" : "", scope: "col" }, button);
    button.addEventListener("click", () => {
      const isUp = head.getAttribute("aria-sort") === "ascending" || (!head.hasAttribute("aria-sort") && column.number);
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isUp ? "descending" : "ascending");
      fill([...rows].sort((a, b) => compare(a[column.key], b[column.key], isUp ? -1 : 1)));
    });
    return head;
  });
  const best = {};
  for (const column of columns.filter((one) => one.best)) {
    const known = rows.map((row) => row[column.key]).filter(isKnown);
    if (known.length > 1 && Math.max(...known) > Math.min(...known)) best[column.key] = Math.max(...known);
  }
  function fill(ordered) {
    body.replaceChildren(...ordered.map((row) => element("tr", {}, columns.map((column) => {
      const value = row[column.key];
      const isBest = isKnown(value) && value === best[column.key];
      const kind = `${column.number ? "number" : ""}${isBest ? " best" : ""}`;
      return element("td", { class: kind, dir: column.number ? null : "auto" }, column.cell ? column.cell(row) : format(value, 3));
    }))));
  }
  fill(rows);
  const head = element("thead", {}, element("tr", {}, heads));
  return element("div", { class: "scroll" }, element("table", { class: "wide", "aria-label": caption }, head, body));
}

// Unknown values come last whichever way is up.
function compare(a, b, direction) {
  const [isA, isB] = [a !== null && a !== undefined, b !== null && b !== undefined];
  if (!isA || !isB) return Number(isB) - Number(isA);
  return direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
}

function tile(name, value, hint, isMain) {
  const parts = [element("div", { class: "name" }, name), element("div", { class: "value" }, value)];
  return element("div", { class: `card tile${isMain ? " main" : ""}`, title: hint || "" }, parts);
}

// Return a command line that breaks between its options only.
function commandLine(text) {
  return element("pre", {}, text.split(/ (?=--)/).map((words, index, all) => element("span", {}, words, index < all.length - 1 ? " " : "")));
}

function summary(run) {
  const { results, evaluation, best } = run;
  const at = (name) => (best === null ? null : (results[name] || [])[best]);
  const coco = evaluation.coco || {};
  const done = (results.epoch || []).length;
  const tiles = [];
  const figure = (name, column, fallback, hint) => {
    const value = isKnown(at(column)) ? at(column) : fallback;
    const isMeasured = evaluation.instances !== 0; // without labels the figures are no zeros but unknown
    if (isKnown(value)) tiles.push(tile(name, isMeasured ? format(value, 3) : "–", hint, !tiles.length));
  };
  figure("mAP50-95 (YOLO)", "metrics/mAP_0.5:0.95", evaluation.map, "mean over the classes, area under the curve by trapezoids");
  figure("mAP50 (YOLO)", "metrics/mAP_0.5", evaluation.map50);
  figure("AP (COCO)", "coco/AP", coco.ap, "as pycocotools computes it");
  figure("AP small (COCO)", "coco/AP_small", coco.ap_small, "objects under 32x32 pixels");
  figure("precision", "metrics/precision", evaluation.precision, "at the confidence of the best mean F1");
  figure("recall", "metrics/recall", evaluation.recall, "at the confidence of the best mean F1");
  if (done) tiles.push(tile("epochs done", `${last(results.epoch) + 1} of ${run.epochs || "?"}`));
  if (best !== null) tiles.push(tile("best epoch", format(results.epoch[best]), "0.1 mAP50 + 0.9 mAP50-95 is highest"));
  const speed = last(results["train/img_per_s"]);
  if (isKnown(speed)) tiles.push(tile("pictures/s, training", format(speed, 3)));
  if (isKnown(run.train_s)) tiles.push(tile("time in training", duration(run.train_s), "validation not counted"));
  let heading = best === null ? null : quiet("Figures of the best epoch.");
  if (done && best === null) {
    heading = quiet(isKnown(evaluation.map) ? "Figures of the last validation: results.csv tells of no validated epoch."
      : "No epoch was validated yet, so there are no accuracy figures.");
  }
  const measured = Object.entries(evaluation.settings || {}).map(([name, value]) => `${name} ${format(value)}`).join(", ");
  return section(
    "Summary",
    element("div", { class: "tiles" }, tiles),
    heading,
    run.command ? card(element("h3", {}, "Command"), commandLine(run.command)) : null,
    measured ? quiet(`Last validation: ${measured}.`) : null,
  );
}

function notes(run) {
  const line = (kind, text, more) => element(
    "li", { class: kind.toLowerCase(), ...more }, element("span", { class: "kind" }, kind), element("span", { dir: "auto" }, text),
  );
  const warnings = [
    ...run.unread.map((text) => line("Warning", text)),
    ...run.warnings.map((entry) => line(
      "Warning", entry.count > 1 ? `${entry.text} (${entry.count} times)` : entry.text, { title: `first at ${entry.first}` },
    )),
  ];
  const advice = run.advice.map((text) => line("Advice", text));
  return section("Notes", warnings.length + advice.length ? element("ul", { class: "notes" }, warnings, advice) : null);
}

function dataReport(run) {
  const splits = Object.entries(run.data.splits || {});
  if (!splits.length) return null;
  const names = Object.keys(splits[0][1]).filter((name) => name !== "classes");
  const rows = names.filter((name) => splits.some(([, split]) => split[name])).map((name) => element(
    "tr", {}, element("th", { scope: "row" }, name),
    splits.map(([, split]) => element("td", { class: "number" }, format(split[name]))),
  ));
  const head = element("tr", {}, element("th", {}), splits.map(([name]) => element("th", { class: "number" }, name)));
  const counts = element("table", { class: "wide" }, element("thead", {}, head), element("tbody", {}, rows));
  return section(
    "Data",
    element("div", { class: "halves" }, card(element("div", { class: "scroll" }, counts)), classBars(splits)),
    quiet(`Sizes of objects as the network sees them, at ${run.data.imgsz} pixels: small under 32x32, large from 96x96.`),
  );
}

// Objects of each class and split as bars, the classes with most objects first.
function classBars(splits) {
  const classes = new Map();
  for (const [split, { classes: rows }] of splits) {
    for (const [number, name, objects] of rows) {
      if (objects) classes.set(number, { name, ...classes.get(number), [split]: objects });
    }
  }
  const total = (row) => splits.reduce((sum, [split]) => sum + (row[split] || 0), 0);
  const sorted = [...classes.values()].sort((a, b) => total(b) - total(a));
  if (!sorted.length) return null;
  const most = Math.max(...sorted.flatMap((row) => splits.map(([split]) => row[split] || 0)));
  const bars = (row) => splits.map(([split], index) => element(
    "div", { title: `${split}: ${format(row[split] || 0)}`, style: `width:${(100 * (row[split] || 0)) / most}%;background:${colour(index)}` },
  ));
  const rows = sorted.slice(0, SHOWN_BARS).map((row) => element("tr", {},
    element("th", { scope: "row", dir: "auto", title: row.name }, row.name), element("td", { class: "bar" }, bars(row)),
    element("td", { class: "number" }, splits.map(([split]) => format(row[split] || 0)).join(" / "))));
  const keys = splits.map(([split], index) => [element("span", { class: "swatch", style: `background:${colour(index)}` }), `${split} `]);
  const rest = sorted.length > SHOWN_BARS ? quiet(`and ${sorted.length - SHOWN_BARS} classes with fewer objects`) : null;
  return card(element("h3", {}, "Objects of each class ", element("span", { class: "quiet" }, keys)),
    element("table", { class: "wide bars" }, element("tbody", {}, rows)), rest);
}

function lines(table, axis, columns) {
  return columns.map(([key, name, more]) => ({ name, x: table[axis] || [], y: table[key], ...more }));
}

function epochCharts(run) {
  const { results, best } = run;
  if (!results.epoch) return null;
  const events = best === null ? [] : [{ x: results.epoch[best], name: "best" }];
  const draw = (title, columns, more) => chart({
    title, x: "epoch", whole: true, group: "epoch", events, series: lines(results, "epoch", columns), ...more,
  });
  const charts = [
    draw("Accuracy, YOLO's definition", [
      ["metrics/mAP_0.5:0.95", "mAP50-95"], ["metrics/mAP_0.5", "mAP50"],
      ["metrics/precision", "precision"], ["metrics/recall", "recall"],
    ]),
    draw("AP, COCO's definition", [["coco/AP", "AP"], ["coco/AP50", "AP50"], ["coco/AP75", "AP75"], ["coco/AR", "AR"]]),
    draw("AP by object size, COCO's definition", [
      ["coco/AP_small", "small"], ["coco/AP_medium", "medium"], ["coco/AP_large", "large"],
    ]),
    ...LOSSES.map(([key, title]) => draw(title, [
      [`train/${key}_loss`, "training"], [`val/${key}_loss`, "validation", { dashed: true }],
    ])),
    draw("Learning rate", RATES),
    draw("Gradient norm in an epoch", [["train/grad_norm", "mean"], ["train/grad_norm_max", "largest"]], { log: true }),
    draw("Pictures per second in an epoch", [["train/img_per_s", "pictures/s"]]),
  ].filter(Boolean);
  const hint = quiet("Drag to zoom, double click to see the whole range, click a name in a legend to hide its line.");
  return section("Curves", hint, element("div", { class: "charts" }, charts));
}

function sizes(run) {
  const { coco, sizes: counts } = run.evaluation;
  if (!coco) return null;
  const rows = ["all", "small", "medium", "large"].map((name, index) => {
    const suffix = index ? `_${name}` : "";
    const [ap, recall] = [coco[`ap${suffix}`], coco[index ? `ar_${name}` : "ar100"]];
    const bar = element("div", { style: `width:${Math.round((ap || 0) * 100)}%` });
    const cells = [counts.labels[index], ap, recall].map((value) => element("td", { class: "number" }, format(value, 3)));
    const scale = element("div", { class: "track", title: `AP ${format(ap, 3)} of 1` }, bar);
    return element("tr", {}, element("th", { scope: "row" }, name), cells, element("td", { class: "bar" }, isKnown(ap) ? scale : ""));
  });
  const head = ["size", "labels", "AP", "AR", ""].map((name, index) => {
    return element("th", { class: index && index < 4 ? "number" : "" }, name);
  });
  const table = element("table", { class: "wide" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
  const both = [
    ["IoU 0.50 … 0.95", run.evaluation.map, coco.ap], ["IoU 0.50", run.evaluation.map50, coco.ap50],
    ["IoU 0.75", null, coco.ap75],
  ].map(([name, yolo, theirs]) => element(
    "tr", {}, element("th", { scope: "row" }, name),
    [yolo, theirs].map((value) => element("td", { class: "number" }, format(value, 3))),
  ));
  const titles = ["", "mAP, YOLO", "AP, COCO"].map((name, i) => element("th", { class: i ? "number" : "" }, name));
  return section(
    "AP by object size",
    element("div", { class: "halves" },
      card(element("div", { class: "scroll" }, table), quiet("COCO's definition, sizes in pixels of the original pictures: small up to 32x32, large from 96x96.")),
      card(
        element("div", { class: "scroll" },
          element("table", { class: "wide" }, element("thead", {}, element("tr", {}, titles)), element("tbody", {}, both))),
        quiet("Same detections, two definitions, close to each other. YOLO's joins the end of the curve to zero, and gives "
          + "a detection whose best label is taken no second chance. The literature quotes COCO's."),
      )),
  );
}

// Return which pictures the last validation measured.
function splitName(run) {
  return (run.evaluation.settings || {}).split || "val";
}

function classTable(run) {
  const rows = (run.evaluation.classes || []).map((row) => {
    const [, small, medium, large] = row.coco || [];
    const train = ((run.data.splits || {}).train || { classes: [] }).classes.find(([number]) => number === row.class);
    return { ...row, trained: train ? train[2] : null, coco: (row.coco || [])[0], small, medium, large };
  });
  if (!rows.length) return null;
  const present = rows.filter((row) => row.labels || row.trained);
  const absent = rows.length - present.length;
  const columns = [
    { title: "class", key: "name" }, { title: "train objects", key: "trained", number: true },
    { title: `${splitName(run)} labels`, key: "labels", number: true }, { title: "P", key: "p", number: true },
    { title: "R", key: "r", number: true }, { title: "F1", key: "f1", number: true },
    { title: "mAP50", key: "ap50", number: true }, { title: "mAP50-95", key: "ap", number: true },
    { title: "COCO AP", key: "coco", number: true }, { title: "small", key: "small", number: true },
    { title: "medium", key: "medium", number: true }, { title: "large", key: "large", number: true },
  ].filter((column) => column.key === "name" || rows.some((row) => isKnown(row[column.key])));
  const point = run.evaluation.operating_confidence;
  const where = point ? `P, R and F1 at confidence ${format(point, 3)}, where the mean F1 is highest` : NOTHING_RIGHT.slice(0, -1);
  return section(
    "Classes", card(sortedTable(columns, present.length ? present : rows, "figures per class")),
    quiet(`Click a title to sort. ${where}; the last columns are COCO's AP.`
      + (absent && present.length ? ` ${absent} of ${rows.length} classes have no object here and are left out.` : "")),
  );
}

function confidenceCharts(run) {
  const { curves, classes, operating_confidence: at } = run.evaluation;
  if (!curves || !curves.axis) return null;
  if (!curves.f1.mean.some(Boolean)) return section("Curves over confidence", quiet(NOTHING_RIGHT));
  const names = new Map(classes.map((row) => [row.class, row.name]));
  const series = (key) => [
    { name: "mean", x: curves.axis, y: curves[key].mean },
    ...curves[key].classes.map((y, index) => ({
      name: names.get(curves.classes[index]), x: curves.axis, y, thin: true, colour: colour(index + 1),
    })),
  ];
  const events = [{ x: at, name: "best mean F1" }];
  const draw = (title, key, more) => chart({ title, x: "confidence", group: "confidence", range: [0, 1], events, series: series(key), ...more });
  const { precision, recall } = run.evaluation;
  const point = { x: recall, y: precision, name: `confidence ${format(at, 3)}` };
  return section("Curves over confidence", element("div", { class: "charts four" },
    draw("Precision over recall", "precision_at_recall", { x: "recall", group: "recall", events: [], points: [point] }),
    draw("F1", "f1"), draw("Precision", "precision"), draw("Recall", "recall")));
}

function examples(run) {
  const worst = run.evaluation.worst || {};
  const kinds = [["missed", "Most objects missed"], ["false", "Most false boxes"]];
  const parts = kinds.filter(([kind]) => (worst[kind] || []).length).map(([kind, title]) => [
    element("h3", {}, title),
    element("div", { class: "examples" }, worst[kind].map((example) => exampleCard(example))),
    element("p", {}),
  ]);
  if (!parts.length) return null;
  const { worst_confidence: limit, operating_confidence: point } = run.evaluation;
  const at = format(isKnown(limit) ? limit : point, 3);
  const legend = element("p", { class: "quiet" }, `At confidence ${at}, IoU 0.5. Left labels, right detections: `,
    element("b", { class: "good" }, "green"), " found and right, ", element("b", { class: "bad" }, "red"),
    " missed and false, with class and confidence; of false boxes the 30 surest. Click a picture to enlarge it.");
  return section("Worst pictures", legend, parts);
}

function exampleCard(example) {
  const node = element("div", { class: "card" });
  const figure = (data, text) => element("figure", {},
    data ? element("img", { src: `data:image/jpeg;base64,${data}`, alt: `${text} of ${example.file}` }) : quiet("not readable"),
    element("figcaption", {}, text));
  const name = example.file.split(/[\\/]/).pop();
  node.append(
    element("div", { class: "file", title: example.file }, element("b", {}, name),
      ` ${example.missed} of ${example.objects} missed, ${example.false} false`),
    element("div", { class: "pair" }, figure(example.labels, "labels"), figure(example.detections, "detections")),
  );
  node.addEventListener("click", (event) => {
    if (event.target.tagName === "IMG") node.classList.toggle("large");
  });
  return node;
}

function monitor(run) {
  const table = run.monitor;
  if (!table.step) return null;
  const draw = (title, columns, more) => chart({ title, x: "step", whole: true, group: "step", series: lines(table, "step", columns), ...more });
  const charts = [
    draw("Learning rate", RATES),
    draw("Training losses", LOSSES.map(([key]) => [`train/${key}_loss`, key])),
    draw("Gradient norm before clipping", [["train/grad_norm", "mean"], ["train/grad_norm_max", "largest"]], { log: true }),
    draw("Box loss / class loss", [["train/box_cls_ratio", "ratio"]]),
    draw("Pictures per second", [["train/img_per_s", "pictures/s"]]),
    draw("Waiting for pictures, share of the time", [["train/data_wait", "share"]]),
    draw("Use of the card's arithmetic, share of its peak", [["train/mfu", "share"]]),
    draw("Utilisation, percent", [
      ["gpu/utilisation", "mean"], ["gpu/utilisation_min", "lowest"], ["gpu/utilisation_max", "highest"],
    ]),
    draw("Graphics memory, GB", [
      ["gpu/allocated_gb", "allocated"], ["gpu_gb", "reserved"], ["gpu/device_gb", "all programs"],
    ].filter(([key]) => (table[key] || []).some((value) => value > 0))),
    draw("Skipped optimizer steps", [["train/skipped", "steps"]].filter(([key]) => (table[key] || []).some(Boolean))),
  ].filter(Boolean);
  return section("Monitor", element("div", { class: "charts" }, charts));
}

function files(run) {
  const rows = run.files.map((file) => element("tr", {},
    element("td", {}, element("a", { href: file.link }, file.name)),
    element("td", { class: "number" }, size(file.bytes)), element("td", {}, file.text)));
  const pairs = (table) => Object.entries(table).map(([name, value]) => element("tr", {},
    element("td", {}, name), element("td", {}, value === null ? "" : String(value))));
  const more = [["Options", run.options], ["Hyper-parameters", run.hyp]].filter(([, table]) => Object.keys(table).length);
  return section("Files",
    rows.length ? card(element("div", { class: "scroll" }, element("table", { class: "files" }, element("tbody", {}, rows)))) : null,
    more.map(([title, table]) => card(element("details", {}, element("summary", {}, title),
      element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, pairs(table))))))));
}

const RUN_SECTIONS = {
  Summary: summary, Notes: notes, Data: dataReport, Curves: epochCharts, "AP by object size": sizes, Classes: classTable,
  "Confusion matrix": confusion, "Curves over confidence": confidenceCharts, "Worst pictures": examples, Monitor: monitor,
  Files: files,
};
