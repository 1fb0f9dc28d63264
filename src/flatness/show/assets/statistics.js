// Correlations of the networks that are shown: Pearson's r, Spearman's ρ and Kendall's τ_b, as flatness.study computes them.
// Plain loops over typed arrays: sixty quantities of a thousand networks take a few milliseconds.
const orders = new WeakMap();
function orderOf(values) {  // indices of the numbers among them, smallest first; sorted once, for every filter
  if (!orders.has(values)) {
    const found = [];
    for (let i = 0; i < values.length; i++) if (isNumber(values[i])) found.push(i);
    orders.set(values, Uint32Array.from(found.sort((a, b) => values[a] - values[b])));
  }
  return orders.get(values);
}
function ranks(values, places, n) {  // mid-ranks of the members of a set; places[i] is a member's place among them, or −1
  const order = orderOf(values), members = new Uint32Array(n), found = new Float64Array(n);
  let size = 0;
  for (let k = 0; k < order.length; k++) if (places[order[k]] >= 0) members[size++] = order[k];
  for (let start = 0, end = 0; start < n; start = end) {
    while (end < n && values[members[end]] === values[members[start]]) end++;
    for (let i = start; i < end; i++) found[places[members[i]]] = (start + end + 1) / 2;
  }
  return found;
}
function mean(values) {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i];
  return sum / values.length;
}
function pearson(x, y) {
  const n = x.length, a = mean(x), b = mean(y);
  let xx = 0, yy = 0, xy = 0;
  for (let i = 0; i < n; i++) {
    const dx = x[i] - a, dy = y[i] - b;
    xx += dx * dx; yy += dy * dy; xy += dx * dy;
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
function inversions(values) {  // by merging; also returns the values in order
  const n = values.length;
  let swaps = 0, from = values, to = new Float64Array(n);
  for (let width = 1; width < n; width *= 2) {
    for (let low = 0; low < n; low += 2 * width) {
      const middle = Math.min(low + width, n), high = Math.min(low + 2 * width, n);
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
  const n = x.length, keys = new Float64Array(n), level = new Float64Array(n), second = new Float64Array(n);
  // Ranks are whole or half: 2x is whole and y below n + 1, so that one number orders by x, then by y.
  for (let i = 0; i < n; i++) keys[i] = 2 * x[i] * (n + 1) + y[i];
  keys.sort();
  for (let i = 0; i < n; i++) {
    level[i] = Math.floor(keys[i] / (n + 1));
    second[i] = keys[i] - level[i] * (n + 1);
  }
  const [swaps, sorted] = inversions(second);
  const all = pairsOf(n), tiedX = ties(level), tiedY = ties(sorted), tiedBoth = ties(keys);
  return (all - tiedX - tiedY + tiedBoth - 2 * swaps) / Math.sqrt((all - tiedX) * (all - tiedY));
}
// The 95 % percentile bootstrap interval of Kendall's τ over settings, in slices that leave the page free; done(low, high).
// Sums over pairs of networks, added up by pairs of settings; the copies of a setting are not compared with one another.
const RESAMPLES = 400;
function interval(x, y, members, settingOf, stale, done) {
  const known = members.filter((i) => isNumber(x[i]) && isNumber(y[i])), numbers = new Map(), found = [];
  let codes = known.map((i) => { const name = settingOf(i); return numbers.get(name) ?? numbers.set(name, numbers.size).get(name); });
  if (numbers.size === 1) codes = known.map((_, place) => place);
  const count = Math.max(0, ...codes) + 1, sums = [0, 1, 2].map(() => new Float64Array(count * count)), drawn = new Float64Array(count);
  const add = (k) => {
    for (let l = 0; l < k; l++) {
      const i = known[k], j = known[l], at = Math.max(codes[k], codes[l]) * count + Math.min(codes[k], codes[l]);
      const one = Math.sign(x[i] - x[j]), other = Math.sign(y[i] - y[j]);
      sums[0][at] += one * other; sums[1][at] += one * one; sums[2][at] += other * other;
    }
  };
  let seed = 1;  // mulberry32: the same numbers at every visit
  const random = () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const resampled = () => {
    drawn.fill(0);
    for (let k = 0; k < count; k++) drawn[Math.floor(random() * count)]++;
    const total = [0, 0, 0];
    for (let c = 0; c < count; c++) {
      for (let d = 0; drawn[c] > 0 && d <= c; d++) {
        const weight = c === d ? drawn[c] : drawn[c] * drawn[d];
        for (let kind = 0; kind < 3; kind++) total[kind] += weight * sums[kind][c * count + d];
      }
    }
    return total[0] / Math.sqrt(total[1] * total[2]);
  };
  let added = 0;
  const slice = () => {
    if (stale()) return;
    for (const end = performance.now() + 8; found.length < RESAMPLES && performance.now() < end;) {
      if (added < known.length) add(added++); else found.push(resampled());
    }
    if (found.length < RESAMPLES) return void setTimeout(slice);
    const sorted = found.filter(isNumber).sort((one, other) => one - other);
    if (sorted.length > 0) done(...[0.025, 0.975].map((share) => sorted[Math.round(share * (sorted.length - 1))]));
  };
  if (known.length >= 3) setTimeout(slice);
}
function correlations(x, y, members) {  // of the members for which both are numbers
  const places = new Int32Array(y.length).fill(-1), a = new Float64Array(members.length), b = new Float64Array(members.length);
  let n = 0;
  for (const i of members) {
    if (!isNumber(x[i]) || !isNumber(y[i])) continue;
    a[n] = x[i]; b[n] = y[i]; places[i] = n++;
  }
  if (n < 3) return { n, kendall: NaN, spearman: NaN, pearson: NaN };
  const rankX = ranks(x, places, n), rankY = ranks(y, places, n);
  return { n, kendall: kendall(rankX, rankY), spearman: pearson(rankX, rankY), pearson: pearson(a.subarray(0, n), b.subarray(0, n)) };
}
