// The confusion matrix of a run: as a table or, for many classes, as a picture; its largest entries in words.
"use strict";

const MANY_CLASSES = 25; // from here on the confusion matrix is a picture
const SHOWN_MIX_UPS = 8; // lines beside the confusion matrix
const KEPT = 1; // smallest share of a column, in percent, that is written into its cell

function confusion(run) {
  const { confusion: matrix, classes } = run.evaluation;
  if (!matrix || !matrix.cells.length) return null;
  const names = classes.map((row) => row.name);
  while (names.length < matrix.size - 1) names.push(String(names.length));
  names.push("background");
  const totals = new Array(matrix.size).fill(0);
  for (const [, column, count] of matrix.cells) totals[column] += count;
  const isPicture = matrix.size > MANY_CLASSES;
  const host = element("div", { class: "scroll" });
  const show = (isShare) => host.replaceChildren(
    isPicture ? picture(matrix, names, totals) : cells(matrix, names, totals, isShare),
  );
  const choice = element("button", { class: "choice", type: "button" }, "show counts");
  choice.addEventListener("click", () => {
    const isShare = choice.textContent !== "show counts";
    choice.textContent = isShare ? "show counts" : "show shares";
    show(isShare);
  });
  show(true);
  return section(
    "Confusion matrix",
    element("div", { class: "halves" }, card(isPicture ? null : choice, host), mixUps(matrix, names, totals)),
    quiet(`Rows: predicted. Columns: true. Confidence above ${matrix.confidence}, IoU above ${matrix.iou}, classes ignored `
      + "when boxes are paired. Shares are of a column. Row background: missed objects; column background: false boxes."),
  );
}

// What goes wrong most often, in words: of each fault the number, and its share of the true objects.
function mixUps(matrix, names, totals) {
  const background = matrix.size - 1;
  const faults = matrix.cells.filter(([row, column]) => row !== column).sort((a, b) => b[2] - a[2]).slice(0, SHOWN_MIX_UPS);
  if (!faults.length) return null;
  const name = (number) => element("bdi", {}, names[number]);
  const rows = faults.map(([row, column, count]) => {
    const what = column === background ? ["false boxes of ", name(row)]
      : row === background ? ["missed: ", name(column)] : [name(column), " taken for ", name(row)];
    const share = column === background ? "" : `${(100 * strength(count, totals[column])).toFixed(0)} %`;
    return element("tr", {}, element("td", { class: "number" }, format(count)), element("td", { class: "number quiet" }, share), element("td", { class: "words" }, what));
  });
  return card(element("h3", {}, "Most frequent faults"), element("table", { class: "wide faults" }, element("tbody", {}, rows)));
}

function strength(count, total) {
  return total ? count / total : 0;
}

function cells(matrix, names, totals, isShare) {
  const table = names.map(() => names.map(() => 0));
  for (const [row, column, count] of matrix.cells) table[row][column] = count;
  const body = table.map((counts, row) => element("tr", {}, element("th", { scope: "row", title: names[row], dir: "auto" }, names[row]),
    counts.map((count, column) => {
      const share = strength(count, totals[column]);
      const isDark = share > 0.7;
      const style = `background:rgba(var(--heat),${share.toFixed(3)})${isDark ? ";color:var(--card)" : ""}`;
      const percent = (100 * share).toFixed(0);
      const text = !count ? "" : isShare ? (100 * share < KEPT ? "<1" : percent) : count;
      const title = `${count} of ${totals[column]} true ${names[column]} predicted as ${names[row]} (${percent} %)`;
      return element("td", { style, title }, text);
    })));
  const corner = element("th", {}, "predicted ↓ true →", element("br"), isShare ? "percent of a column" : "counts");
  const head = element("tr", {}, corner, names.map((name) => element("th", { scope: "col", title: name }, element("bdi", {}, name))));
  return element("table", { class: "matrix" }, element("thead", {}, head), element("tbody", {}, body));
}

function picture(matrix, names, totals) {
  const side = Math.max(3, Math.floor(640 / matrix.size));
  const canvas = element("canvas", { width: matrix.size * side, height: matrix.size * side });
  const context = canvas.getContext("2d");
  const heat = getComputedStyle(document.documentElement).getPropertyValue("--heat");
  const known = new Map();
  for (const [row, column, count] of matrix.cells) {
    context.fillStyle = `rgba(${heat},${Math.max(0.08, strength(count, totals[column]))})`;
    context.fillRect(column * side, row * side, side, side);
    known.set(row * matrix.size + column, count);
  }
  const label = quiet("Predicted classes from top to bottom, true ones from left to right, background last. Point at a cell.");
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * matrix.size);
    const row = Math.floor(((event.clientY - box.top) / box.height) * matrix.size);
    const count = known.get(row * matrix.size + column) || 0;
    const share = (100 * strength(count, totals[column])).toFixed(0);
    label.textContent = `${count} of ${totals[column]} true ${names[column]} predicted as ${names[row]} (${share} %)`;
  });
  return element("div", {}, canvas, label);
}
