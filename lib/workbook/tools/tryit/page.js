// The exercise on a page: an editor, a check in the reader's own browser, and what it says.
(() => {
  const root = new URL("./", document.currentScript.src);
  const MB = (bytes) => (bytes / 1e6).toFixed(1);
  const TOTAL = Number(document.currentScript.dataset.bytes);
  const FILES = ["pyodide.asm.wasm.gz", "pyodide.asm.mjs.gz", "python_stdlib.zip", "pyodide-lock.json"];
  const START_MS = 120000; // a slow telephone takes half a minute from the files to a running Python
  const MARGIN_MS = 4000; // beyond a check's limit, which Python keeps itself at the answer's next line

  function element(tag, text = "", className = "") {
    const made = document.createElement(tag);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  class Exercise {
    constructor(section) {
      this.section = section;
      this.name = section.dataset.exercise;
      for (const part of ["textarea", "progress", "template"]) this[part] = section.querySelector(part);
      for (const part of ["check", "mend", "reset", "said"]) this[part] = section.querySelector(`.try-${part}`);
      this.stub = this.textarea.value;
      this.key = `workbook-try-${this.name}`;
      this.textarea.value = this.stored() ?? this.stub;
      this.textarea.addEventListener("input", () => this.store(this.textarea.value));
      this.textarea.addEventListener("keydown", (event) => this.pressed(event));
      this.check.addEventListener("click", () => this.grade());
      this.mend.addEventListener("click", () => this.fill(section.querySelector(".try-start").textContent));
      this.reset.addEventListener("click", () => this.startOver());
      this.check.textContent = `Check (loads Python, ${MB(TOTAL)} MB)`;
      section.querySelector(".try-recorded").hidden = true;
      section.querySelector(".try-live").hidden = false;
      section.dataset.live = "true";
    }

    stored() { try { return localStorage.getItem(this.key); } catch { return null; } }
    store(text) { try { localStorage.setItem(this.key, text); } catch { /* a private window keeps nothing */ } }

    startOver() {
      this.fill(this.stub);
      try { localStorage.removeItem(this.key); } catch { /* as above */ }
    }

    fill(text) { // as if it were typed, so that the box's undo brings back what stood there
      this.textarea.focus();
      this.textarea.select();
      this.insert(text);
      this.said.replaceChildren();
    }

    // ---- the keyboard: Tab leaves the box; Enter and Backspace keep Python's indentation

    pressed(event) {
      const { selectionStart: from, selectionEnd: to, value } = this.textarea;
      const line = value.slice(value.lastIndexOf("\n", from - 1) + 1, from);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.grade();
      } else if (event.key === "Enter" && !event.isComposing && !event.shiftKey && !event.altKey) {
        event.preventDefault();
        this.insert(`\n${line.match(/^ */)[0]}${/:\s*(#.*)?$/.test(line) ? "    " : ""}`);
      } else if (event.key === "Backspace" && from === to && /^ +$/.test(line) && !event.ctrlKey && !event.altKey) {
        event.preventDefault();
        this.textarea.setSelectionRange(from - ((line.length - 1) % 4 + 1), from);
        this.insert("");
      }
      event.stopPropagation(); // JupyterLab and the theme have shortcuts
    }

    insert(text) { // execCommand keeps the box's own undo
      if (document.execCommand(text ? "insertText" : "delete", false, text)) return;
      this.textarea.setRangeText(text, this.textarea.selectionStart, this.textarea.selectionEnd, "end");
      this.textarea.dispatchEvent(new Event("input"));
    }

    // ---- Python, loaded at the first check

    async load() {
      let loaded = 0;
      this.progress.hidden = false;
      const read = async (address) => {
        const response = await fetch(address);
        if (!response.ok) throw new Error(`${response.status} for ${address.pathname}`);
        const reader = response.body.getReader(), parts = [];
        for (let part; !(part = await reader.read()).done;) {
          parts.push(part.value);
          loaded += part.value.length;
          this.progress.value = Math.min(loaded / TOTAL, 1);
          this.check.textContent = `Loading Python: ${MB(Math.min(loaded, TOTAL))} of ${MB(TOTAL)} MB`;
        }
        return new Blob(parts).arrayBuffer();
      };
      try {
        const kit = read(new URL(`${this.name}.json`, root));
        const files = await Promise.all(FILES.map(async (file) => [file, await read(new URL(`python/${file}`, root))]));
        this.kit = new TextDecoder().decode(await kit);
        this.files = Object.fromEntries(files);
        this.limit = 1000 * JSON.parse(this.kit).limit_s + MARGIN_MS;
      } finally {
        this.progress.hidden = true;
      }
    }

    // Sends something to Python and waits for its answer; a worker that is silent for too long is ended.
    ask(message, silentFor) {
      return new Promise((resolve, reject) => {
        let timer;
        const end = (error) => { this.worker?.terminate(); this.worker = null; reject(error); };
        const wait = () => { clearTimeout(timer); timer = setTimeout(() => end(new Error("silent")), silentFor); };
        this.worker.onerror = ({ message }) => { clearTimeout(timer); end(new Error(message || "no worker started")); };
        this.worker.onmessage = ({ data }) => {
          if ("check" in data) return wait();
          clearTimeout(timer);
          if ("fault" in data) end(new Error(data.fault)); else resolve(data.result);
        };
        wait();
        this.worker.postMessage(message);
      });
    }

    async python() {
      if (!this.files) await this.load();
      if (this.worker) return;
      this.check.textContent = "Starting Python";
      this.worker = new Worker(new URL("worker.mjs", root), { type: "module" });
      await this.ask({ kit: this.kit, files: this.files }, START_MS);
    }

    async grade() {
      if (this.busy) return;
      this.busy = true;
      this.check.setAttribute("aria-disabled", "true");
      this.said.replaceChildren(element("p", this.worker ? "Checking" : "Python is loading; this happens once."));
      try {
        await this.python();
        this.check.textContent = "Checking";
        this.show(await this.ask({ text: this.textarea.value }, this.limit));
      } catch (error) {
        if (error.message !== "silent") this.tell(`Python did not run: ${error.message}`, "wrong");
        else this.tell(`${this.name}: did not end within ${this.limit / 1000} s, so it was ended`, "wrong");
      }
      this.busy = false;
      this.check.removeAttribute("aria-disabled");
      this.check.textContent = "Check";
    }

    // ---- what is said

    tell(head, kind) {
      const report = element("div", "", `try-report try-${kind}`);
      const first = element("p");
      first.append(element("strong", head));
      report.append(first);
      this.said.replaceChildren(report);
      return report;
    }

    show({ state, problem, rows, read, passed, total, printed }) {
      if (state === "passed") {
        this.tell(`${this.name}: all ${total} checks pass`, "passed").append(this.template.content.cloneNode(true));
        return;
      }
      if (state === "not started") {
        this.tell("Not started: write your own lines in place of the one that raises NotImplementedError", "open");
        return;
      }
      const report = this.tell(`${this.name}: ${problem}`, "wrong"), list = element("dl");
      report.firstChild.append(` (${passed} of ${total} checks pass)`);
      for (const [label, said] of rows) list.append(element("dt", label), element("dd", said, label.replace(" ", "-")));
      const link = element("a", read.text), where = element("dd", "", "read");
      link.href = new URL(`../../${read.page}`, root);
      where.append(link);
      list.append(element("dt", "read"), where);
      report.append(list);
      if (printed) report.append(element("p", "printed by your code:"), element("pre", printed));
    }
  }

  if (location.protocol === "file:") return; // a browser starts no worker from a file: the page keeps its recorded run
  document.querySelectorAll(".workbook-try:not([data-live])").forEach((section) => new Exercise(section));
})();
