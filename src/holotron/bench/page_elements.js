// What of the page can be clicked where it is now: [{kind, text, x, y}], in page order, centres in CSS pixels.
() => {
  const found = [];
  for (const element of document.querySelectorAll("a[href], button, input, textarea, select, [role=button]")) {
    const box = element.getBoundingClientRect();
    const x = box.x + box.width / 2, y = box.y + box.height / 2;
    if (box.width < 4 || box.height < 4 || x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) continue;
    const hit = document.elementFromPoint(x, y);
    if (!hit || !(element === hit || element.contains(hit))) continue;
    const type = (element.getAttribute("type") || "text").toLowerCase();
    let kind = "button";
    if (element.tagName === "A") {
      const target = new URL(element.href, location.href);
      const page = target.origin === location.origin && target.pathname.endsWith(".html");
      kind = page && target.pathname !== location.pathname ? "link" : "";
    } else if (element.tagName === "TEXTAREA") kind = "field";
    else if (element.tagName === "INPUT") {
      kind = ["text", "search", "email", "tel", "password"].includes(type) ? "field"
        : ["checkbox", "radio"].includes(type) ? "button" : "";
    } else if (element.tagName === "SELECT" || type === "submit") kind = "";
    if (!kind) continue;
    const text = (element.innerText || element.placeholder || element.name || kind).trim().slice(0, 40);
    found.push({ kind, text, x, y });
  }
  const active = document.activeElement;
  const typing = !!active && (active.tagName === "TEXTAREA" || active.tagName === "INPUT") && !active.value;
  return { elements: found, typing };
}
