// Correlations of the networks that are shown: Pearson's r, Spearman's ρ and Kendall's τ_b, as flatness.study computes them.
function ranks(values) {  // mid-ranks
  const order = Uint32Array.from(values.keys()).sort((a, b) => values[a] - values[b]);
  const found = new Float64Array(values.length);
  for (let start = 0; start < order.length;) {
    let end = start + 1;
    while (end < order.length && values[order[end]] === values[order[start]]) end++;
    for (let i = start; i < end; i++) found[order[i]] = (start + end + 1) / 2;
    start = end;
  }
  return found;
}
function pearson(x, y) {
  const n = x.length, mean = (values) => values.reduce((sum, value) => sum + value, 0) / n;
  const a = mean(x), b = mean(y);
  let xx = 0, yy = 0, xy = 0;
  for (let i = 0; i < n; i++) {
    xx += (x[i] - a) ** 2; yy += (y[i] - b) ** 2; xy += (x[i] - a) * (y[i] - b);
  }
  // As in Python: a spread of rounding errors is no spread.
  return xx > 1e-24 * n * a * a && yy > 1e-24 * n * b * b && xx > 0 && yy > 0
    ? Math.max(-1, Math.min(1, xy / Math.sqrt(xx) / Math.sqrt(yy))) : NaN;
}
const pairsOf = (n) => n * (n - 1) / 2;
function ties(sorted) {  // pairs of equal neighbours, for values in order
  let pairs = 0;
  for (let start = 0, end = 0; start < sorted.length; start = end) {
    while (end < sorted.length && sorted[end] === sorted[start]) end++;
    pairs += pairsOf(end - start);
  }
  return pairs;
}
function inversions(values) {  // by merging; sorts the values on the way
  let swaps = 0, from = values, to = new Float64Array(values.length);
  for (let width = 1; width < values.length; width *= 2) {
    for (let low = 0; low < values.length; low += 2 * width) {
      const middle = Math.min(low + width, values.length), high = Math.min(low + 2 * width, values.length);
      for (let i = low, j = middle, k = low; k < high; k++) {
        if (i < middle && (j >= high || from[i] <= from[j])) to[k] = from[i++];
        else { swaps += middle - i; to[k] = from[j++]; }
      }
    }
    [from, to] = [to, from];
  }
  return [swaps, from];
}
function kendall(x, y) {  // τ_b by Knight's method, from ranks
  const n = x.length;
  // Ranks are whole or half: 2x is whole and y below n + 1, so that one number orders by x, then by y.
  const keys = Float64Array.from(x, (value, i) => 2 * value * (n + 1) + y[i]).sort();
  const level = Float64Array.from(keys, (value) => Math.floor(value / (n + 1)));
  const second = Float64Array.from(keys, (value, i) => value - level[i] * (n + 1));
  const [swaps, sorted] = inversions(second);
  const all = pairsOf(n), tiedX = ties(level), tiedY = ties(sorted), tiedBoth = ties(keys);
  const agreement = all - tiedX - tiedY + tiedBoth - 2 * swaps;
  return agreement / Math.sqrt((all - tiedX) * (all - tiedY));
}
function correlations(x, y) {  // of the pairs in which both are numbers
  const a = [], b = [];
  for (let i = 0; i < x.length; i++) if (isNumber(x[i]) && isNumber(y[i])) { a.push(x[i]); b.push(y[i]); }
  if (a.length < 3) return { n: a.length, kendall: NaN, spearman: NaN, pearson: NaN };
  const rankA = ranks(a), rankB = ranks(b);
  return { n: a.length, kendall: kendall(rankA, rankB), spearman: pearson(rankA, rankB), pearson: pearson(a, b) };
}
