// A study to explore: which networks are shown, what is drawn of them, and how each quantity goes with the target.
const study = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const count = study.keys.length;
const state = { part: 0, column: 0, copy: "values", target: 0, logX: true, logY: false, colour: study.colour, shape: study.shape,
  filters: new Map(), left: false, open: -1 };

// ---- which networks
const partOf = (i) => study.parts.length > 1 ? study.partOf[i] : 0;
function passes(i) {
  if (partOf(i) !== state.part || (study.out[i] >= 0 && !state.left)) return false;
  for (const [axis, kept] of state.filters) if (!kept(study.axes[axis].codes[i])) return false;
  return true;
}
const all = Array.from({ length: count }, (_, i) => i);
let shown = [];
const analysed = () => all.filter((i) => partOf(i) === state.part && study.out[i] < 0);
// A hyperparameter's value as people write it; names of ways to end have underscores.
const label = (axis, code) => axis.name === "status" ? words(axis.values[code]) : plain(axis.values[code]);

// ---- colours and shapes: a colour for each of few values, a scale from dark to light for numbers; hollow where not fitted
const SCALE = [[72, 30, 112], [62, 88, 142], [38, 130, 142], [53, 176, 121], [139, 213, 70], [253, 231, 37]];
function shade(share) {
  const at = share * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  return `rgb(${SCALE[low].map((c, k) => Math.round(c + (at - low) * (SCALE[low + 1][k] - c))).join(" ")})`;
}
const graded = (axis) => axis.values.length > 2 && axis.values.every(isNumber);
const colourOf = (axis, code) => graded(axis) ? shade(code / (axis.values.length - 1)) : lookOf(code)[0];
// What shapes the marks: an axis of its own, else the one that colours them, where its values are few.
function shaping() {
  const own = state.shape >= 0 && state.shape !== state.colour, axis = study.axes[own ? state.shape : state.colour];
  return axis && axis.values.length <= OUTLINES.length ? axis : null;
}
function looks() {
  const axis = study.axes[state.colour], other = shaping();
  return (i) => [axis ? colourOf(axis, axis.codes[i]) : COLOURS[0], other ? lookOf(other.codes[i])[1] : OUTLINES[0], !study.fitted[i]];
}
function legend() {
  const axis = study.axes[state.colour], other = shaping(), parts = [];
  const entry = (look, text) => element("li", {}, symbol(look), text);
  const named = (one) => element("li", { class: "quiet" }, words(one.name));
  if (axis) {
    const last = axis.values.length - 1;
    const codes = last < OUTLINES.length || !graded(axis) ? axis.values.map((_, code) => code) : [0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * last));
    parts.push(named(axis), ...codes.map((code) => entry([colourOf(axis, code), other === axis ? lookOf(code)[1] : OUTLINES[0]], label(axis, code))));
  }
  if (other && other !== axis) parts.push(named(other), ...other.values.map((_, code) => entry([COLOURS[6], lookOf(code)[1]], label(other, code))));
  if (shown.some((i) => !study.fitted[i])) parts.push(entry([COLOURS[6], OUTLINES[0], true], "not fitted"));
  byId("legend").replaceChildren(...parts);
}

// ---- the scatter
const plot = new Plot(byId("plot"), 440);
const nameOf = (column) => column.label;
const copied = () => state.copy === "rescaled" ? ", rescaled copies" : "";
const targetLabel = () => study.targets[state.target].label || study.parts[state.part].gap;
// Networks that differ in nothing but the seed are of one setting.
const settingAxes = study.axes.filter((axis) => axis.varies && axis.name !== "seed" && axis.name !== "status");
const settingOf = (i) => settingAxes.map((axis) => axis.codes[i]).join(" ");
function describe(i) {
  return study.axes.filter((axis) => axis.varies && axis.name !== "status").map((axis) => [words(axis.name), label(axis, axis.codes[i])]);
}
function drawScatter() {
  const column = study.columns[state.column], target = study.targets[state.target];
  const look = looks(), xs = column[state.copy] || [], ys = target.values;
  const fine = shown.filter((i) => isNumber(xs[i]) && isNumber(ys[i]));
  const drawn = fine.filter((i) => (!state.logX || xs[i] > 0) && (!state.logY || ys[i] > 0));
  const marks = drawn.map((i) => ({ i, x: xs[i], y: ys[i], look: look(i), chosen: i === state.open }));
  plot.show({
    x: scaleOf(marks.map((mark) => mark.x), state.logX), y: scaleOf(marks.map((mark) => mark.y), state.logY),
    xLabel: nameOf(column) + copied(), yLabel: targetLabel(), marks,
    summary: `${targetLabel()} against ${nameOf(column)}${copied()} of ${drawn.length} networks. The table of networks below has the values.`,
    open: (mark, keyboard) => openRecord(mark.i, keyboard),
    tell: (mark, others) => [`Network ${mark.i + 1}`, [...describe(mark.i), [nameOf(column), told(column, mark.i, state.copy)],
      [targetLabel(), short(mark.y)], ...(study.out[mark.i] >= 0 ? [["left out", study.reasons[study.out[mark.i]]]] : []),
      ...(others.length > 0 ? [["in the same place", `${others.length} more`]] : [])]],
  });
  const missing = shown.length - fine.length, flat = fine.length - drawn.length;
  const drawnAs = (values, logarithmic) => Float64Array.from(values, (value) => logarithmic ? Math.log(value) : value);
  const r = pearson(drawnAs(marks.map((mark) => mark.x), state.logX), drawnAs(marks.map((mark) => mark.y), state.logY));
  byId("missing").textContent = [
    (state.logX || state.logY) && marks.length > 2 ? `On the axes as drawn r is ${signed(r)}.` : "",
    missing > 0 ? `${missing} of the networks shown have no finite value here.` : "",
    flat > 0 ? `${flat} are zero or negative and not on a logarithmic axis.` : ""].join(" ");
}
function told(column, i, copy = "values") {
  const error = copy === "values" && column.stderr ? column.stderr[i] : 0;
  const star = column.unsettled && column.unsettled.includes(i) ? "*" : "";
  return short(column[copy][i]) + star + (error > 0 ? ` ± ${short(error)}` : "");
}

// ---- the correlation table: as the study computed it, or recomputed for what is shown
const tables = Array.from(document.querySelectorAll("table.correlations"));
const originals = new Map();
for (const table of tables) {
  for (const cell of rowsOf(table).flatMap((row) => Array.from(row.querySelectorAll("td")))) {
    originals.set(cell, [cell.textContent, cell.dataset.value, cell.getAttribute("style")]);
  }
}
const columnOf = new Map(study.columns.map((column, i) => [column.name, i]));
const untouched = () => state.target === 0 && state.copy === "values" && shown.length === analysed().length &&
  shown.every((i) => study.out[i] < 0);
const signed = (value) => Number.isNaN(value) ? "–" : (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);
function put(cell, text, value, style) {
  if (cell.textContent !== text) cell.textContent = text;
  if (value === undefined) delete cell.dataset.value; else cell.dataset.value = value;
  if (style === null) cell.removeAttribute("style"); else cell.setAttribute("style", style);
}
let asked = 0;  // an interval that is still being computed may be about something else by now
function fillTable() {
  const table = tables.find((one) => Number(one.dataset.part) === state.part);
  for (const one of tables) one.closest(".part").hidden = one !== table;
  const as = untouched(), ys = study.targets[state.target].values;
  let line = null;
  for (const row of table ? rowsOf(table) : []) {
    const column = study.columns[columnOf.get(row.dataset.quantity)], chosen = column === study.columns[state.column];
    row.setAttribute("aria-current", String(chosen));
    const xs = column[state.copy];
    const found = as ? null : correlations(xs || [], ys, xs ? shown : []);
    for (const cell of row.querySelectorAll("td")) {
      const value = found && found[cell.dataset.key];
      if (as) put(cell, ...originals.get(cell));
      else if (value === undefined) put(cell, "", "", null);
      else put(cell, cell.dataset.key === "n" ? String(value) : signed(value), value,
        cell.dataset.key === "kendall" ? `--at:${Number.isNaN(value) ? 0 : value}` : null);
    }
    if (chosen) line = row;
  }
  if (table) resort(table);
  const cellText = (name) => line ? line.querySelector(`td[data-key="${name}"]`).textContent : "–";
  byId("found").textContent = line ? `Kendall's τ ${cellText("kendall")}, Spearman's ρ ${cellText("spearman")}, Pearson's r ` +
    `${cellText("pearson")}, n = ${cellText("n")}, ${as ? "all in the analysis" : "of those shown"}.` : "Too few values for a correlation.";
  byId("basis").textContent = as
    ? `Of all ${shown.length} networks in the analysis, against ${targetLabel()}, with 95 % bootstrap intervals over settings.`
    : `Of the ${shown.length} networks shown, against ${targetLabel()}${copied()}: recomputed here, without intervals, p-values and Ψ, ` +
      "which belong to the whole analysis.";
  const mine = ++asked, xs = study.columns[state.column][state.copy];
  if (!as && line && xs) interval(xs, ys, shown, settingOf, () => mine !== asked, (low, high) => {
    byId("found").append(` Of τ a 95 % interval is [${signed(low)}, ${signed(high)}] (${RESAMPLES} resamples).`);
  });
}

// ---- all of it
function update() {
  shown = all.filter((i) => passes(i));
  const whole = all.filter((i) => partOf(i) === state.part && (state.left || study.out[i] < 0)).length;
  byId("count").textContent = `${shown.length} of ${whole} networks shown`;
  redraw(); legend();
}
function redraw() {
  drawScatter(); fillTable(); listNetworks();
}
