const parts = root => new Map([...root.querySelectorAll('header, nav, main > section, footer')].map(part => [part.id || part.tagName, part]));
const texts = root => new Map([...parts(root)].map(([name, part]) => [name, part.outerHTML]));
let before = texts(document);

// Replaces what differs in a newer version of this page; the rest stays as the reader has left it.
function update(text) {
  const page = new DOMParser().parseFromString(text, 'text/html'), now = texts(page), isSame = [...now.keys()].join() === [...before.keys()].join();
  const logs = new Map(data.charts.map(chart => [chart.title, chart.log])), fragment = node => document.createRange().createContextualFragment(node.outerHTML);
  data = JSON.parse(page.getElementById('data').textContent);
  for (const chart of data.charts) chart.log = logs.get(chart.title);
  if (!isSame) for (const name of ['header', 'nav', 'main', 'footer']) document.querySelector(name).replaceWith(fragment(page.querySelector(name)));
  else for (const [name, part] of parts(document)) if (now.get(name) !== before.get(name)) part.replaceWith(fragment(parts(page).get(name)));
  before = now;
  prepare(document);
  draw();
}

poll('', update);
