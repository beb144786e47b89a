// Python in a worker: it gets the kit and Pyodide's files once, and then one answer after the other.
import { loadPyodide } from "./python/pyodide.mjs";

const START = `
import json, sys
sys.path.insert(0, "/book")
from lib.workbook.tools.tryit.judge import Judge
judge = Judge(json.loads(kit), lambda check: tell(check))
`;

// The files come compressed, unless the server has already unpacked them on their way.
async function plain(buffer) {
  const isPacked = new DataView(buffer).getUint16(0) === 0x1f8b;
  const unpacked = () => new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  return isPacked ? new Response(unpacked()).arrayBuffer() : buffer;
}

const asAddress = (buffer, type) => URL.createObjectURL(new Blob([buffer], { type }));

async function start({ kit, files }) {
  const wasm = await plain(files["pyodide.asm.wasm.gz"]);
  const script = asAddress(await plain(files["pyodide.asm.mjs.gz"]), "text/javascript");
  const ask = self.fetch; // Pyodide asks for the program by its address; it is here already
  self.fetch = (what, ...more) => String(what).endsWith("/pyodide.asm.wasm")
    ? Promise.resolve(new Response(wasm, { headers: { "Content-Type": "application/wasm" } })) : ask(what, ...more);
  const python = await loadPyodide({
    indexURL: new URL("python/", import.meta.url).href,
    stdLibURL: asAddress(files["python_stdlib.zip"], "application/zip"),
    lockFileContents: new TextDecoder().decode(files["pyodide-lock.json"]),
    createPyodideModule: (await import(script)).default,
  });
  for (const [path, text] of Object.entries(JSON.parse(kit).files)) {
    python.FS.mkdirTree(`/book/${path.slice(0, path.lastIndexOf("/"))}`);
    python.FS.writeFile(`/book/${path}`, text);
  }
  python.globals.set("kit", kit);
  python.globals.set("tell", (check) => postMessage({ check }));
  python.runPython(START);
  return python;
}

let ready = null;
addEventListener("message", async ({ data }) => {
  try {
    ready ??= start(data);
    const python = await ready;
    if (data.text === undefined) return postMessage({ ready: true });
    python.globals.set("text", data.text);
    postMessage({ result: JSON.parse(python.runPython("json.dumps(judge(text))")) });
  } catch (error) {
    postMessage({ fault: String(error).trim().split("\n").pop() });
  }
});
