'use strict';
let data = JSON.parse(document.getElementById('data').textContent);
const tip = document.getElementById('tip');
const space = document.querySelector('svg').namespaceURI;  // so that the page contains no URL

function put(parent, tag, attributes = {}, text) {
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function show(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential(2);
  return value.toLocaleString('en', size >= 1e4 ? { maximumFractionDigits: 0 } : { minimumSignificantDigits: Number.isInteger(value) ? 1 : 4, maximumSignificantDigits: 4 });
}

// Round numbers between low and high, with the fewest digits that distinguish them.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (Math.abs(step / power - 2.5) < 0.01 ? 1 : 0));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  const tiny = digits > 5, text = value => tiny ? (+value.toPrecision(6)).toExponential() :
    value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return found.map(value => ({ value, text: Math.abs(value) < step / 1e6 ? '0' : text(value) }));
}

function logTicks(low, high) {
  const found = [], every = Math.max(1, Math.round((Math.log10(high) - Math.log10(low)) / 5));
  const parts = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of parts)
      if ((p % every === 0 || m > 1) && m * 10 ** p >= low * 0.999 && m * 10 ** p <= high * 1.001) found.push({ value: m * 10 ** p, text: show(m * 10 ** p) });
  return found.length > 1 ? found : [low, high].map(value => ({ value, text: show(value) }));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
  if (high - low <= Math.abs(high) * 1e-9) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
  return [low, high];
}

// Draws empty axes; returns the svg and functions from values to pixels. `marks` replaces the ticks of x.
function frame(holder, xs, ys, labels, { log = false, logX = false, marks, ratio = 0.52 } = {}) {
  const width = Math.max(260, holder.clientWidth), height = Math.round(Math.min(Math.max(width * ratio, 210), 460));
  holder.replaceChildren();
  const svg = put(holder, 'svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', tabindex: 0, 'aria-label': labels.title });
  const [x0, x1] = xs, pad = log ? 0 : (ys[1] - ys[0]) * 0.06;
  const y0 = log ? ys[0] * 0.9 : ys[0] - (ys[0] >= 0 && ys[0] < pad ? ys[0] : pad), y1 = log ? ys[1] * 1.1 : ys[1] + pad;
  const yTicks = log ? logTicks(y0, y1) : ticks(y0, y1, Math.max(3, height / 44));
  const left = Math.max(...yTicks.map(t => t.text.length)) * 6.4 + 12 + (labels.y ? 18 : 0), right = 14, top = 10, bottom = 40;
  const scale = log ? Math.log10 : v => v, across = logX ? Math.log10 : v => v;
  const x = v => left + (across(v) - across(x0)) / (across(x1) - across(x0)) * (width - left - right);
  const y = v => height - bottom - (scale(v) - scale(y0)) / (scale(y1) - scale(y0)) * (height - top - bottom);
  for (const t of yTicks) {
    put(svg, 'line', { class: 'grid-line', x1: left, x2: width - right, y1: y(t.value), y2: y(t.value) });
    put(svg, 'text', { x: left - 8, y: y(t.value) + 4, 'text-anchor': 'end' }, t.text);
  }
  for (const t of marks ?? (logX ? logTicks(x0, x1) : ticks(x0, x1, Math.max(3, width / 90)))) {
    put(svg, 'line', { class: 'axis', x1: x(t.value), x2: x(t.value), y1: height - bottom, y2: height - bottom + 4 });
    put(svg, 'text', { x: x(t.value), y: height - bottom + 17, 'text-anchor': 'middle' }, t.text);
  }
  put(svg, 'line', { class: 'axis', x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
  put(svg, 'text', { x: (left + width - right) / 2, y: height - 5, 'text-anchor': 'middle' }, labels.x);
  if (labels.y) put(svg, 'text', { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, 'text-anchor': 'middle' }, labels.y);
  return { svg, x, y, width, height, left, right, top, bottom };
}

function showTooltip(event, rows) {
  tip.replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement('div'), left = document.createElement('span'), right = document.createElement('b');
    left.textContent = name; right.textContent = value ?? '';
    row.append(left, right);
    return row;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), over = event.clientX + 16 + box.width > innerWidth - 8;
  tip.style.left = Math.max(8, over ? event.clientX - 16 - box.width : event.clientX + 16) + 'px';
  tip.style.top = Math.max(8, Math.min(event.clientY - box.height - 10, innerHeight - box.height - 8)) + 'px';
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle; else high = middle; }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

function truncate(text, length) { return text.length > length ? text.slice(0, length - 1) + '…' : text; }

// A confusion matrix: names of classes, cells that are not zero as [target, prediction, count], and sums of rows.
function drawMatrix(holder, { names, cells, sums }, title = '') {
  const n = names.length, long = Math.max(...names.map(name => Math.min(14, name.length)));
  const sheet = holder.closest('.sheet'), available = sheet.clientWidth - 2 * parseFloat(getComputedStyle(sheet).paddingLeft), left = long * (n > 40 ? 5.2 : 6.6) + 12, right = n > 40 ? 46 : 52;
  const size = Math.min(46, Math.max(n > 40 ? 9 : 24, Math.floor((available - left - right) / n * 4) / 4));
  const font = Math.min(12, Math.max(8, size * 0.86)), slanted = long * font * 0.6 > size - 4, top = slanted ? long * 5.2 + 14 : 24;
  const width = left + size * n + right, height = top + size * n + 6;
  holder.replaceChildren();
  const svg = put(holder, 'svg', { viewBox: `0 0 ${width} ${height}`, width, height, style: `width: ${width}px; min-width: ${width}px`, role: 'img', 'aria-label': `Confusion matrix${title && ` of ${title}`}, ${n} classes, ${sums.reduce((a, b) => a + b, 0) && (100 * cells.reduce((all, [t, p, count]) => all + (t === p) * count, 0) / sums.reduce((a, b) => a + b, 0)).toFixed(1)} % right` });
  const right_ = Array(n).fill(0);
  for (const [t, p, count] of cells) {
    const share = count / sums[t], same = t === p, strength = same ? share : Math.max(0.18, Math.sqrt(share));
    if (same) right_[t] = share;
    put(svg, 'rect', { class: same ? 'cell-right' : 'cell-wrong', x: left + p * size, y: top + t * size, width: size, height: size, 'fill-opacity': strength.toFixed(3) });
    if (size >= 20) put(svg, 'text', { class: 'count' + (strength > 0.55 ? ' strong' : ''), x: left + (p + 0.5) * size, y: top + (t + 0.5) * size + 4, style: `font-size: ${Math.min(12, size / (String(count).length * 0.62 + 0.4))}px` }, count);
  }
  put(svg, 'rect', { class: 'frame', x: left, y: top, width: size * n, height: size * n });
  names.forEach((name, i) => {
    const style = `font-size: ${font}px`, middle = left + (i + 0.5) * size;
    put(svg, 'text', { class: 'name', style, x: left - 7, y: top + (i + 0.5) * size + font * 0.35, 'text-anchor': 'end' }, truncate(name, 14));
    put(svg, 'text', slanted ? { class: 'name', style, transform: `translate(${middle + font * 0.3} ${top - 6}) rotate(-60)` } : { class: 'name', style, x: middle, y: top - 7, 'text-anchor': 'middle' }, truncate(name, 14));
    put(svg, 'text', { style: `font-size: ${Math.min(11, font)}px`, x: width - 2, y: top + (i + 0.5) * size + font * 0.35, 'text-anchor': 'end' }, sums[i] ? `${(100 * right_[i]).toFixed(right_[i] === 1 ? 0 : 1)} %` : '–');
  });
  put(svg, 'text', { x: width - 2, y: top - 7, 'text-anchor': 'end' }, 'recall');
  const cross = [0, 1].map(() => put(svg, 'rect', { class: 'cross', visibility: 'hidden' })), counts = new Map(cells.map(([t, p, count]) => [t * n + p, count]));
  svg.onpointermove = svg.onpointerdown = event => {
    const box = svg.getBoundingClientRect(), p = Math.floor((event.clientX - box.left - left) / size), t = Math.floor((event.clientY - box.top - top) / size);
    if (t < 0 || p < 0 || t >= n || p >= n) return svg.onpointerleave();
    for (const [i, [x, y, w, h]] of [[left, top + t * size, n * size, size], [left + p * size, top, size, n * size]].entries())
      for (const [name, value] of Object.entries({ x, y, width: w, height: h, visibility: 'visible' })) cross[i].setAttribute(name, value);
    const count = counts.get(t * n + p) ?? 0;
    showTooltip(event, [['target', names[t]], ['prediction', names[p]], ['samples', `${show(count)} of ${show(sums[t])}`], ['fraction of the row', sums[t] ? `${(100 * count / sums[t]).toFixed(1)} %` : '–']]);
  };
  svg.onpointerleave = () => { cross.forEach(c => c.setAttribute('visibility', 'hidden')); tip.hidden = true; };
}

function sortBy(table, column, header) {
  const up = header.ariaSort !== 'ascending', body = table.tBodies[0];
  const key = row => { const cell = row.cells[column]; return cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value; };
  const compare = (a, b) => typeof a === 'number' ? a - b : a.localeCompare(b, 'en', { numeric: true });
  for (const other of header.parentElement.cells) other.ariaSort = null;
  header.ariaSort = up ? 'ascending' : 'descending';
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b))));
}

// Draws now, and whenever the width of the page changes.
function keepDrawn(draw) {
  let width = document.body.clientWidth;
  draw();
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); }
  }).observe(document.body);
  addEventListener('scroll', () => { tip.hidden = true; }, { passive: true });
  document.documentElement.dataset.drawn = Math.round(performance.now());
}
