// Asks a server again and again whether something has changed, and calls `apply` with the new text. A slow server is asked
// less often; a page that nobody sees does not ask.
async function poll(url, apply) {
  for (let tag = '';;) {
    const start = performance.now();
    let said = '';
    try {
      const answer = document.hidden ? null : await fetch(url, { cache: 'no-store', headers: { 'If-None-Match': tag } });
      if (answer?.ok) { tag = answer.headers.get('ETag'); apply(await answer.text()); }
      if (answer) said = answer.ok || answer.status === 304 ? 'live' : `not updated: status ${answer.status}`;
    } catch { said = 'not updated: no connection to boltcutter runs --live'; }
    const note = document.querySelector('.live');
    if (said && note.textContent !== said) note.textContent = said;  // a screen reader announces each change
    await new Promise(done => setTimeout(done, Math.max(1000, 20 * (performance.now() - start))));
  }
}
