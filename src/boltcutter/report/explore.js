// Shared by the pages of many runs or trials: a filter, a table and parallel coordinates. Row i of a column has the value
// column.value(i), null if it is unknown, and the text column.text(i).

const make = (tag, text, attributes = {}) => Object.assign(document.createElement(tag), { textContent: text }, attributes);

// Whether a row passes. Each word is part of a text, or compares a column: lr<0.01, status=failed.
function matcher(words, columns) {
  const find = name => columns.find(c => c.name === name) ?? columns.find(c => c.name.endsWith('.' + name) || c.name.endsWith('/' + name));
  const tests = words.split(/\s+/).filter(Boolean).map(word => {
    const [, name, sign, wanted] = word.match(/^(.+?)(<=|>=|!=|<|>|=)(.+)$/) ?? [], column = name && find(name);
    if (!column) return i => columns.some(c => c.text(i).toLowerCase().includes(word.toLowerCase()));
    return i => {
      const value = column.value(i), other = typeof value === 'number' ? +wanted : wanted, same = value === other || column.text(i) === wanted;
      if (value === null || value === '') return sign === '!=';
      return { '<': value < other, '>': value > other, '<=': value <= other, '>=': value >= other, '=': same, '!=': !same }[sign];
    };
  });
  return i => tests.every(test => test(i));
}

// Fills a table, or changes what is new in it: rows keep their elements, their order and the focus. `key` is the name of
// the rows' data attribute and a function of i; `first` fills the first cell of a new row.
function fillTable(table, columns, order, [kind, key], first) {
  const head = table.tHead.rows[0] ?? table.tHead.insertRow(), body = table.tBodies[0], known = new Map([...body.rows].map(row => [row.dataset[kind], row]));
  const sorted = [...head.cells].find(header => header.ariaSort), by = sorted && columns.find(c => c.name === sorted.textContent), up = sorted?.ariaSort === 'ascending';
  if ([...head.cells].map(header => header.textContent).join('\n') !== columns.map(c => c.name).join('\n')) {
    head.replaceChildren(...columns.map(c => {
      const header = make('th', '', { scope: 'col', className: c.css ?? '' });
      header.append(make('button', c.name, { type: 'button' }));
      header.onclick = () => sortTable(table, c.name, header.ariaSort !== 'ascending');
      return header;
    }));
  }
  const shown = new Set(order.map(i => String(key(i))));
  for (const [name, row] of known) if (!shown.has(name)) row.remove();
  for (const i of order) {
    const old = known.get(String(key(i))), row = old ?? document.createElement('tr');
    row.item = i; row.dataset[kind] = key(i);
    columns.forEach((c, k) => {
      const cell = row.cells[k] ?? row.appendChild(make(k ? 'td' : 'th', '', k ? {} : { scope: 'row' })), text = c.text(i);
      if (!k && !old && first) first(cell, i, text); else if (cell.textContent.trim() !== text) cell.textContent = text;
      cell.className = c.css ?? '';
    });
    while (row.cells.length > columns.length) row.deleteCell(-1);
    if (!old) body.append(row);
  }
  table.columns = columns; table.order = order;
  sortTable(table, by?.name, up);
}

// Sorts by a column, or by the order that the rows have by default.
function sortTable(table, name, up) {
  const column = table.columns.find(c => c.name === name), place = new Map(table.order.map((i, k) => [i, k])), body = table.tBodies[0];
  for (const header of table.tHead.rows[0].cells) header.ariaSort = column && header.textContent === name ? up ? 'ascending' : 'descending' : null;
  const compare = (a, b) => {
    const [one, other] = [column.value(a.item), column.value(b.item)];
    if (one === null || other === null) return (one === null) - (other === null);  // unknown values stay last
    return (up ? 1 : -1) * (typeof one === 'number' && typeof other === 'number' ? one - other : String(one).localeCompare(String(other), 'en', { numeric: true }));
  };
  const now = [...body.rows], rows = [...now].sort((a, b) => (column ? compare(a, b) : 0) || place.get(a.item) - place.get(b.item)), focused = document.activeElement;
  if (rows.some((row, k) => row !== now[k])) { body.append(...rows); focused.focus({ preventScroll: true }); }
}

// Adds `at`, a value's fraction of the axis from its bottom, and `ticks` to an axis with `name`, `log`, and `options` of
// which the values in `column` are indices; null: they are numbers.
function scaled(axis, text) {
  const known = axis.column.filter(v => v !== null), scale = axis.log ? Math.log10 : v => v;
  const ends = axis.options ? [-.5, axis.options.length - .5] : known.length ? extent(known) : [0, 1], [low, high] = ends.map(scale);
  const ticks_ = axis.options ? axis.options.map((option, value) => ({ value, text: truncate(option, 16) })) : (axis.log ? logTicks : ticks)(...ends, 5).map(t => ({ value: t.value, text: text(+t.value.toPrecision(5)) }));
  return { ...axis, ends, ticks: ticks_, at: v => (scale(v) - low) / (high - low), value: share => (v => axis.log ? 10 ** v : v)(low + share * (high - low)) };
}

const isInside = (axes, brushes, i) => [...brushes].every(([name, [low, high]]) => {
  const axis = axes.find(a => a.name === name), share = axis && axis.column[i] !== null ? axis.at(axis.column[i]) : null;
  return !axis || (share !== null && share >= low && share <= high);
});

// Parallel coordinates. `brushes` has the selected range of each axis by name, as fractions of its height, and `changed` is
// called when one is dragged, or moved by the arrow keys. `lines(svg, path)` draws the paths; one of a row whose value is
// unknown passes below the axis.
function drawAxes(holder, axes, brushes, { label, lines, changed }) {
  const focused = holder.contains(document.activeElement) && document.activeElement.dataset.axis;
  const left = Math.max(50, 12 + 6.5 * Math.max(...axes[0].ticks.map(t => t.text.length)));  // room for the texts of the first axis
  const least = Math.max(320, axes.length * 96 + left - 10), width = Math.max(least, holder.parentElement.clientWidth), height = 330, top = 34, bottom = 34, none = height - 8;
  holder.replaceChildren();
  const svg = put(holder, 'svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': label, style: `--least: ${least}px` });
  const gap = (width - left - 60) / Math.max(1, axes.length - 1), x = k => left + k * gap, y = share => height - bottom - share * (height - top - bottom);
  const used = new Set();
  lines(svg, i => axes.some(a => !a.isMetric && a.column[i] !== null) ? 'M' + axes.map((a, k) => {
    if (a.column[i] === null) used.add(k);
    return `${x(k).toFixed(1)} ${(a.column[i] === null ? none : y(a.at(a.column[i]))).toFixed(1)}`;
  }).join('L') : '');
  axes.forEach((axis, k) => {
    put(svg, 'line', { class: 'spine', x1: x(k), x2: x(k), y1: top, y2: height - bottom });
    put(svg, 'text', { class: 'name', x: x(k), y: k % 2 ? 12 : 24, 'text-anchor': k ? k === axes.length - 1 ? 'end' : 'middle' : 'start', ...(k ? k === axes.length - 1 ? { dx: 40 } : {} : { dx: -40 }) }, truncate(axis.name, Math.max(14, Math.floor(gap / 4))));
    for (const t of axis.ticks) put(svg, 'text', { class: 'tick', x: x(k) - 6, y: y(axis.at(t.value)) + 4, 'text-anchor': 'end' }, t.text);
    if (used.has(k)) put(svg, 'text', { class: 'tick', x: x(k) - 6, y: none + 4, 'text-anchor': 'end' }, 'none');
    const range = brushes.get(axis.name), set = (low, high) => {
      if (high - low < .012) brushes.delete(axis.name); else brushes.set(axis.name, [Math.max(0, low), Math.min(1, high)]);
      changed();
    };
    if (range) put(svg, 'rect', { class: 'brush', x: x(k) - 8, width: 16, y: y(range[1]), height: y(range[0]) - y(range[1]) });
    const said = range ? range.map(share => axis.options ? axis.options[Math.round(Math.min(axis.options.length - 1, Math.max(0, axis.value(share))))] : show(axis.value(share))).join(' to ') : 'all values';
    const hit = put(svg, 'rect', { class: 'hit', 'data-axis': k, x: x(k) - 18, width: 36, y: top - 6, height: height - top - bottom + 12, tabindex: 0, role: 'button', 'aria-label': `${axis.name}: ${said}; arrow keys move the lower end, with shift the upper one, escape removes the range` });
    hit.onkeydown = event => {
      const step = { ArrowUp: .05, ArrowDown: -.05 }[event.key], [low, high] = range ?? [0, 1];
      if (event.key === 'Escape' || event.key === 'Delete') set(0, 0);
      else if (step && event.shiftKey) set(low, Math.max(low + .05, high + step));
      else if (step) set(Math.min(high - .05, low + step), high);
      else return;
      event.preventDefault();
    };
    hit.onpointerdown = event => {
      event.preventDefault();
      const at = e => { const box = holder.firstChild.getBoundingClientRect(); return Math.min(1, Math.max(0, (height - bottom - (e.clientY - box.top) * height / box.height) / (height - top - bottom))); };
      const start = at(event), move = e => { const now = at(e); set(Math.min(start, now), Math.max(start, now)); };  // a click removes the range
      const end = () => { for (const kind of ['pointerup', 'pointercancel']) removeEventListener(kind, end); removeEventListener('pointermove', move); };
      move(event);
      addEventListener('pointermove', move);
      for (const kind of ['pointerup', 'pointercancel']) addEventListener(kind, end);
    };
    if (focused === String(k)) hit.focus({ preventScroll: true });
  });
}

// Shows the point of the lines { i, xs, ys } that is nearest to the pointer, or the one that arrow keys lead to. `xs` are the
// ends of the axis, and rows(line, k) is what the tooltip says of a point.
function followLines(f, lines, [low, high], rows, { logX = false } = {}) {
  const ring = put(f.svg, 'circle', { class: 'chosen', r: 5, visibility: 'hidden' });
  let at = null;  // number of the line, and of the point
  const mark = (l, k, event) => {
    const line = lines[l], box = f.svg.getBoundingClientRect(), zoom = box.width / f.width, [px, py] = [f.x(line.xs[k]), f.y(line.ys[k])];
    at = [l, k];
    for (const [name, value] of [['cx', px], ['cy', py], ['visibility', 'visible']]) ring.setAttribute(name, value);
    showTooltip(event ?? { clientX: box.left + px * zoom, clientY: box.top + py * zoom }, rows(line, k));
  };
  f.svg.onpointermove = f.svg.onpointerdown = event => {
    const box = f.svg.getBoundingClientRect(), px = (event.clientX - box.left) * f.width / box.width, py = (event.clientY - box.top) * f.height / box.height;
    const share = (px - f.left) / (f.width - f.left - f.right), wanted = logX ? low * (high / low) ** share : low + share * (high - low);
    let best = null, least = 900;
    lines.forEach(({ xs, ys }, l) => {
      const k = nearest(xs, wanted), d = (f.x(xs[k]) - px) ** 2 / 4 + (f.y(ys[k]) - py) ** 2;
      if (d < least) { least = d; best = [l, k]; }
    });
    if (best) mark(...best, event); else f.svg.onpointerleave();
  };
  f.svg.onkeydown = event => {
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0, over = { ArrowUp: 1, ArrowDown: -1 }[event.key] ?? 0;
    if ((!along && !over) || !lines.length) return;
    const l = at ? (at[0] + over + lines.length) % lines.length : 0, k = at ? at[1] + along : 0;
    mark(l, Math.min(lines[l].xs.length - 1, Math.max(0, k)));
    event.preventDefault();
  };
  f.svg.onpointerleave = f.svg.onblur = () => { ring.setAttribute('visibility', 'hidden'); tip.hidden = true; };
}
