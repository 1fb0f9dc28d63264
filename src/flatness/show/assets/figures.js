// The charts of a page: groups of marks, some joined by lines, with a legend.
const charts = document.getElementById("data") ? JSON.parse(document.getElementById("data").textContent).charts : [];
charts.forEach((chart, number) => {
  const holder = document.querySelector(`.plot[data-chart="${number}"]`), names = Object.keys(chart.series);
  const marks = names.flatMap((name, group) => chart.series[name].map(([x, y, label]) => ({ x, y, label, name, look: lookOf(group) })))
    .filter((mark) => isNumber(mark.x) && isNumber(mark.y));
  const xs = marks.map((mark) => mark.x), ys = marks.map((mark) => mark.y), places = chart.places;
  const logarithmic = (values, scale) => scale === "log" || (scale === "auto" && values.every((value) => value > 0));
  new Plot(holder, 400).show({
    x: places ? scaleOf([-0.25, places.length - 0.75], false) : scaleOf(xs, logarithmic(xs, chart.scales[0])),
    y: scaleOf(ys, logarithmic(ys, chart.scales[1])),
    xTicks: places && places.map((place, i) => [i, place]), xLabel: chart.xLabel, yLabel: chart.yLabel, marks,
    lines: chart.joined ? names.map((name, group) => ({ colour: lookOf(group)[0],
      points: marks.filter((mark) => mark.name === name).map(({ x, y }) => [x, y]) })) : [],
    summary: `${chart.yLabel} against ${chart.xLabel}: ${names.join(", ")}. ${chart.caption}`,
    tell: (mark, others) => others.length > 0
      ? [`${others.length + 1} marks, ${mark.label}`, [mark, ...others].map(({ name, y }) => [name, short(y)])]
      : [`${mark.name}, ${mark.label}`, [...(places ? [] : [[chart.xLabel, short(mark.x)]]), [chart.yLabel, short(mark.y)]]],
  });
  holder.after(element("ul", { class: "legend" }, ...names.map((name, group) => element("li", {}, symbol(lookOf(group)), name))));
});
