// What can be clicked or typed into now, in page order, with boxes in CSS pixels of the viewport.
() => {
  const wanted = '#area button, #area input, #area textarea, #area label, #area .alink, #area h3, ' +
    '#area a.ui-tabs-anchor, #area [data-color], .ui-dialog button';
  const width = innerWidth, height = innerHeight;
  const belongs = (hit, e) => hit && (e.contains(hit) || (hit.closest('label') === e) || e.closest('label') === hit);
  const place = e => {
    const r = e.getBoundingClientRect();
    const full = [r.left, r.top, r.right, r.bottom];
    const [x0, y0, x1, y1] = [Math.max(r.left, 0), Math.max(r.top, 0), Math.min(r.right, width), Math.min(r.bottom, height)];
    if (x1 - x0 < 2 || y1 - y0 < 2) return { full, box: null, point: null };
    const middle = [(x0 + x1) / 2, (y0 + y1) / 2];
    const n = 12, hits = [];
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const x = x0 + (x1 - x0) * (i + 0.5) / n, y = y0 + (y1 - y0) * (j + 0.5) / n;
      if (belongs(document.elementFromPoint(x, y), e)) hits.push([x, y]);
    }
    if (!hits.length) return { full, box: null, point: null };
    if (hits.length > 0.9 * n * n && belongs(document.elementFromPoint(...middle), e))
      return { full, box: [x0, y0, x1, y1], point: middle };
    // Partly covered: aim at the free point nearest to the middle of what is free.
    const xs = hits.map(h => h[0]), ys = hits.map(h => h[1]);
    const [dx, dy] = [(x1 - x0) / n / 2, (y1 - y0) / n / 2];
    const [mx, my] = [xs, ys].map(v => v.reduce((a, b) => a + b) / v.length);
    const point = hits.reduce((a, b) => Math.hypot(a[0] - mx, a[1] - my) <= Math.hypot(b[0] - mx, b[1] - my) ? a : b);
    return { full, box: [Math.min(...xs) - dx, Math.min(...ys) - dy, Math.max(...xs) + dx, Math.max(...ys) + dy], point };
  };
  return [...document.querySelectorAll(wanted)].filter(e => e.getClientRects().length).map(e => ({
    tag: e.tagName.toLowerCase(),
    type: e.dataset.type || (e.tagName === 'INPUT' ? e.type : ''),
    id: e.id,
    text: e.textContent.trim(),
    closes: e.classList.contains('ui-dialog-titlebar-close'),
    link: e.classList.contains('alink'),
    color: e.dataset.color || '',
    selected: e.classList.contains('selected') || !!(e.control ? e.control.checked : e.checked) ||
      e.getAttribute('aria-expanded') === 'true',
    kind: e.control ? e.control.type : '',
    value: e.value || '',
    focused: e === document.activeElement,
    ...place(e),
  }));
}
