// Set up once per load of a MiniWoB++ page; makes episodes repeatable and keeps the query bar out of view.
top => {
  if (window.holotron) return;
  const style = document.createElement('style');
  style.textContent = `
    #reward-display, #click-canvas, #sync-task-cover { display: none !important; }
    html { min-height: 210px; overflow-x: hidden; scrollbar-width: none; }
    *, *::before, *::after { transition: none !important; animation: none !important; }
  `;
  document.head.appendChild(style);
  if (window.jQuery) jQuery.fx.off = true;

  // Every episode begins at the same moment, so that what a page writes from the clock is the same, too.
  const RealDate = Date;
  let shift = 0;
  const now = () => RealDate.now() + shift;
  window.Date = new Proxy(RealDate, {
    construct: (target, given, self) => Reflect.construct(target, given.length ? given : [now()], self),
    apply: () => new RealDate(now()).toString(),
    get: (target, name) => name === 'now' ? now : Reflect.get(target, name),
  });

  const keepBelowQuery = () => { if (window.scrollY < top) window.scrollTo(window.scrollX, top); };
  window.addEventListener('scroll', keepBelowQuery);

  const frame = () => new Promise(done => requestAnimationFrame(done));
  window.holotron = {
    async reset(seed, start) {
      if (document.activeElement) document.activeElement.blur();
      window.scrollTo(0, top);
      shift = start - RealDate.now();
      Math.seedrandom(seed);
      core.EPISODE_MAX_TIME = 1e6;
      core.startEpisodeReal();
      const limit = RealDate.now() + 10000;
      while (!WOB_TASK_READY && RealDate.now() < limit) await frame();
      window.scrollTo(0, top);
      const said = core.getUtterance();
      return { ready: WOB_TASK_READY, goal: typeof said === 'string' ? said : said.utterance };
    },
    result() {
      keepBelowQuery();
      return { done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL };
    },
  };
}
