// Shows the state of a figure that its reader asks for. Python has drawn every state; here nothing is computed.
(() => {
  const STEP_MS = 1000;
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // A layer has one frame for each state that matters to it; each control moves on by its own stride.
  const frame = (layer, state) =>
    layer.frames[Object.entries(layer.strides).reduce((n, [name, stride]) => n + stride * state[name], 0)];

  function start(figure) {
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const state = { ...data.start };
    let timer = null;

    // The still remains for paper; a copy of it comes to life on the screen.
    const live = figure.querySelector(".play-still").cloneNode(true);
    live.className = "play-live";
    const groups = live.querySelectorAll("svg > g");
    const said = live.querySelector(".play-said");
    said.setAttribute("role", "status");
    said.setAttribute("aria-live", "polite");
    const inputs = Object.fromEntries(
      [...figure.querySelectorAll("[data-control]")].map((input) => [input.dataset.control, input]));
    const button = (what, name) => figure.querySelector(`button[data-${what}="${name}"]`);

    // How many values a control has now: for some it depends on another one.
    const last = ({ shown, limit }) => (limit ? limit.counts[state[limit.by]] : shown.length) - 1;

    function show() {
      for (const control of data.controls) {
        const { name, shown } = control;
        state[name] = Math.max(0, Math.min(state[name], last(control)));
        const input = inputs[name];
        if (input.type === "range") {
          input.max = last(control);
          input.setAttribute("aria-valuetext", shown[state[name]]);
          input.parentElement.querySelector("b").textContent = shown[state[name]];
        }
        input.value = state[name];
        // aria-disabled and not disabled, so that a button at its end keeps the keyboard's focus
        button("back", name)?.setAttribute("aria-disabled", state[name] === 0);
        button("next", name)?.setAttribute("aria-disabled", state[name] === last(control));
      }
      data.layers.forEach((layer, i) => (groups[i].innerHTML = frame(layer, state)));
      const sentence = data.sentences.map((layer) => frame(layer, state)).filter(Boolean).join(" ");
      if (said.textContent !== sentence) said.textContent = sentence;
      figure.dataset.state = JSON.stringify(state);
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      figure.querySelectorAll("button[data-play]").forEach((b) => (b.textContent = "Play"));
      said.setAttribute("aria-live", "polite");
    }

    function play(control) {
      if (timer) return stop();
      if (state[control.name] === last(control)) state[control.name] = 0;
      show();
      button("play", control.name).textContent = "Pause";
      said.setAttribute("aria-live", "off"); // a sentence a second is more than a reader aloud can follow
      timer = setInterval(() => {
        state[control.name] += 1;
        show();
        if (state[control.name] === last(control) || !figure.isConnected) stop();
      }, STEP_MS);
    }

    for (const control of data.controls) {
      const { name } = control;
      const move = (to) => { stop(); state[name] = to; show(); };
      inputs[name].addEventListener("input", () => move(Number(inputs[name].value)));
      button("back", name)?.addEventListener("click", () => move(state[name] - 1));
      button("next", name)?.addEventListener("click", () => move(state[name] + 1));
      button("play", name)?.addEventListener("click", () => play(control));
      if (button("play", name)) button("play", name).hidden = still.matches;
    }
    // JupyterLab has shortcuts of one letter for a selected cell: keys meant for a control go no further.
    figure.querySelector(".play-controls").addEventListener("keydown", (event) => {
      if (event.key !== "Tab" && event.key !== "Escape") event.stopPropagation();
    });

    show();
    figure.querySelector(".play-still").before(live);
    figure.querySelector(".play-controls").hidden = false;
    figure.dataset.live = "true";
  }

  document.querySelectorAll("figure.workbook-play:not([data-live])").forEach(start);
})();
