"use strict";
const byId = (id) => document.getElementById(id);
const episodes = [...document.querySelectorAll("details.episode")];
const task = byId("task"), outcome = byId("outcome");

function filter() {
  let shown = 0;
  for (const episode of episodes) {
    const fits = (!task.value || episode.dataset.task === task.value)
      && (!outcome.value || episode.dataset.outcome === outcome.value);
    episode.hidden = !fits;
    shown += fits;
  }
  byId("shown").textContent = shown === episodes.length ? `${shown} episodes` : `${shown} of ${episodes.length} episodes`;
  byId("none").hidden = shown > 0;
}

if (episodes.length) {
  task.addEventListener("change", filter);
  outcome.addEventListener("change", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  const setOpen = (open) => { for (const episode of episodes) if (!episode.hidden) episode.open = open; };
  byId("open-all").addEventListener("click", () => setOpen(true));
  byId("close-all").addEventListener("click", () => setOpen(false));
  for (const link of document.querySelectorAll("a[data-task]")) {
    link.addEventListener("click", () => { task.value = link.dataset.task; outcome.value = ""; filter(); });
  }
  filter(); // a reloaded page may keep the choices of before
}

const enlarged = byId("enlarged"), stage = byId("stage");
let frames = [], at = 0;

function show(index) {
  at = index;
  const frame = frames[at];
  const image = frame.querySelector("img").cloneNode();
  // Small screenshots are blown up by a whole factor, so that their pixels stay square.
  const natural = image.width, factor = Math.max(1, Math.floor(640 / natural));
  const room = Math.min(innerWidth * 0.9, (innerHeight * 0.8) * natural / image.height);
  stage.style.width = `${Math.min(natural * factor, room)}px`;
  const mark = frame.querySelector("svg");
  stage.replaceChildren(image, ...(mark ? [mark.cloneNode(true)] : []));
  byId("enlarged-caption").textContent = frame.getAttribute("aria-label").replace(/^Enlarge step/, "Step");
  byId("back").disabled = at === 0;
  byId("forth").disabled = at === frames.length - 1;
}

const turn = (by) => { if (at + by >= 0 && at + by < frames.length) show(at + by); };
document.addEventListener("click", (event) => {
  const frame = event.target.closest("button.frame");
  if (!frame) return;
  frames = [...frame.closest(".strip").querySelectorAll("button.frame")];
  show(frames.indexOf(frame));
  enlarged.showModal();
});
byId("back").addEventListener("click", () => turn(-1));
byId("forth").addEventListener("click", () => turn(1));
byId("close").addEventListener("click", () => enlarged.close());
enlarged.addEventListener("click", (event) => { if (event.target === enlarged) enlarged.close(); });
enlarged.addEventListener("keydown", (event) => {
  if (event.key === "ArrowLeft") turn(-1);
  if (event.key === "ArrowRight") turn(1);
});
