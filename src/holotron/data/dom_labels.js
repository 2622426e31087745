// Free, exact labels of what a page shows: every visible character with its box, every element a person could
// aim at with its role and text, and regions whose text has no DOM range (input values), to be ignored.
() => {
  const W = innerWidth, H = innerHeight, chars = [], elements = [], ignore = [];
  const round = v => Math.round(v * 10) / 10;
  const clip = r => {
    const b = [Math.max(0, r.left), Math.max(0, r.top), Math.min(W, r.right), Math.min(H, r.bottom)];
    return b[2] - b[0] > 1 && b[3] - b[1] > 1 ? b.map(round) : null;
  };
  const reaches = (el, x, y) => {
    const top = document.elementFromPoint(x, y);
    return top && (top === el || el.contains(top) || top.contains(el) && !top.matches('input,textarea,select'));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest('script,style,option,noscript')) continue;
    const style = getComputedStyle(parent);
    if (style.visibility !== 'visible' || style.opacity === '0') continue;
    for (let i = 0; i < node.data.length; i++) {
      const c = node.data[i];
      if (/\s/.test(c)) continue;
      range.setStart(node, i); range.setEnd(node, i + 1);
      const r = range.getClientRects()[0];
      if (!r || r.width < 0.5 || r.left < 0 || r.top < 0 || r.right > W || r.bottom > H) continue;
      const x = (r.left + r.right) / 2, y = (r.top + r.bottom) / 2;
      if (!reaches(parent, x, y)) continue;
      chars.push([c, round(x), round(y), round(r.width), round(r.height)]);
    }
  }
  const name = el => (el.innerText || el.value || '').replace(/\s+/g, ' ').trim();
  const add = (el, role, text, box) => {
    if (!box) return;
    if (!reaches(el, (box[0] + box[2]) / 2, (box[1] + box[3]) / 2)) return;
    elements.push({role, text: text.slice(0, 80), box, checked: !!el.checked, focused: el === document.activeElement});
  };
  const seen = new Set();
  for (const el of document.querySelectorAll(
      'button,a,input,textarea,select,label,.alink,[role=button],[role=tab],[onclick],h3,.ui-accordion-header,th,li')) {
    if (seen.has(el)) continue;
    seen.add(el);
    const box = clip(el.getBoundingClientRect());
    const tag = el.tagName.toLowerCase(), type = (el.getAttribute('type') || 'text').toLowerCase();
    if (tag === 'input' && (type === 'checkbox' || type === 'radio')) {
      const label = el.closest('label') || (el.id && document.querySelector(`label[for="${el.id}"]`));
      add(el, type, label ? name(label) : '', box);
    } else if (tag === 'input' && ['button', 'submit', 'reset'].includes(type)) {
      add(el, 'button', el.value, box);
      if (box) ignore.push(box);
    } else if (tag === 'input' || tag === 'textarea' || tag === 'select') {
      add(el, tag === 'input' ? (type === 'password' ? 'password' : 'text') : tag, el.value || '', box);
      if (box) ignore.push(box);
    } else if (tag === 'button' || tag === 'th' || el.getAttribute('role') === 'button') {
      add(el, 'button', name(el), box);
    } else if (tag === 'label') {
      const input = el.querySelector('input[type=checkbox],input[type=radio]');
      if (input) add(el, 'label', name(el), box);
    } else if (tag === 'h3' || el.classList.contains('ui-accordion-header')) {
      add(el, 'header', name(el), box);
    } else if (tag === 'li') {
      if (el.getAttribute('role') === 'tab') add(el, 'tab', name(el), box);
    } else {
      const tab = el.closest('[role=tab]');
      add(el, tab ? 'tab' : 'link', name(el), clip(el.getClientRects()[0] || el.getBoundingClientRect()));
    }
  }
  return {width: W, height: H, chars, elements, ignore};
}
