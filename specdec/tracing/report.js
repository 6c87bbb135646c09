'use strict';
(() => {
  const blocks = [...document.querySelectorAll('section.block')];
  const tokens = [...document.querySelectorAll('[data-block]')];
  const controls = document.querySelector('nav');
  const goals = {
    Home: () => 0, ArrowLeft: () => current - 1,
    ArrowRight: () => current + 1, End: () => blocks.length - 1,
  };
  let current = 0;

  const show = (wanted) => {
    current = Math.max(0, Math.min(wanted, blocks.length - 1));
    blocks.forEach((block, number) => { block.hidden = number !== current; });
    for (const token of tokens) {
      token.hidden = Number(token.dataset.block) > current;
      token.classList.toggle('now', Number(token.dataset.block) === current);
    }
    const status = document.getElementById('status');
    status.textContent = blocks[current].dataset.summary;
    for (const button of controls.querySelectorAll('button')) {
      const goal = goals[button.value]();
      const useless = goal === current || goal < 0 || goal >= blocks.length;
      button.setAttribute('aria-disabled', String(useless));
    }
  };

  if (blocks.length === 0) return;
  controls.hidden = false;
  controls.addEventListener('click', (event) => {
    if (goals[event.target.value]) show(goals[event.target.value]());
  });
  document.addEventListener('keydown', (event) => {
    const own = event.target.closest('.scroll, input, textarea, select');
    const modified = event.altKey || event.ctrlKey || event.metaKey;
    if (own || modified || event.shiftKey || !goals[event.key]) return;
    event.preventDefault();
    show(goals[event.key]());
  });
  show(0);
})();
