// A bar per row of a table, for the column that one chooses; the table stays beside it with everything.
for (const table of document.querySelectorAll("table.bars")) {
  const headings = Array.from(table.tHead.rows[0].children, (th) => th.textContent);
  const rows = rowsOf(table);
  const columns = headings.map((text, i) => [i, text]).filter(([i]) => i > 0 &&
    rows.some((row) => row.children[i] && row.children[i].dataset.share !== undefined));
  if (columns.length === 0 || rows.length < 2) continue;
  const list = element("ul", { class: "bars", "aria-label": "Bars" });
  let logarithmic = false, column = columns[0][0];
  const draw = () => {
    const values = rows.map((row) => Number(row.children[column] && row.children[column].dataset.value || NaN));
    const shown = values.filter((value) => Number.isFinite(value) && (!logarithmic || value > 0));
    const most = Math.max(...shown, 0), scale = scaleOf(shown, true);
    list.replaceChildren(...rows.map((row, i) => {
      const cell = row.children[column], drawn = Number.isFinite(values[i]) && (!logarithmic || values[i] > 0);
      const share = !drawn ? 0 : logarithmic ? scale.share(values[i]) : most > 0 ? Math.max(values[i] / most, 0) : 0;
      const error = Number(cell && cell.dataset.error || 0) / (most || 1);
      const bar = element("span", { class: "track", "aria-hidden": "true" }, element("span", { class: logarithmic ? "fill dot" : "fill",
        style: `width:${(100 * share).toFixed(2)}%` }));
      if (error > 0 && !logarithmic) bar.append(element("span", { class: "error",
        style: `left:${(100 * Math.max(share - error, 0)).toFixed(2)}%;right:${(100 * Math.max(1 - share - error, 0)).toFixed(2)}%` }));
      return element("li", {}, element("span", { class: "who" }, row.children[0].textContent), bar,
        element("span", { class: "much" }, cell ? cell.textContent : ""), element("span", { class: "quiet" }, cell ? cell.title : ""));
    }));
  };
  const controls = element("div", { class: "controls" },
    chooser("Measure", columns, column, (value) => { column = Number(value); draw(); }),
    ticker("logarithmic", false, (on) => { logarithmic = on; draw(); }));
  table.closest(".scroll").before(element("div", { class: "chart" }, controls, list));
  draw();
}
