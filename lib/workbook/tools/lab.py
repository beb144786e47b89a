"""JupyterLab, with a chapter as a notebook on the left and the file that you write on the right."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from typing import Any

from lib.workbook.book.catalog import CHAPTER_FILE, ROOT, BookError, find, pages
from lib.workbook.book.sources import read_bytes

CONFIG = ROOT / ".jupyter"
WORKSPACE = "default"
FIRST_PORT = 8888


def start(chapter: str | None = None, browser: bool = True, port: int | None = None) -> int:
    """Start JupyterLab, print its address as soon as it accepts connections, and wait until it ends.

    Args:
        chapter: What to open, as ``2`` or ``rope``; by default what was open last, or chapter 1 the first time.
        browser: Whether to open it in the browser.
        port: The port; by default the first free one from 8888 on.

    Returns:
        JupyterLab's exit status.
    """
    open_in_workspace(chapter)
    port = port or free_port()
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(16)
    address = f"http://127.0.0.1:{port}/lab?token={token}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen(command(port), cwd=ROOT, env=environment(token))
    try:
        if _answers(process, port):
            print(f"JupyterLab is at {address}\nPress Ctrl-C here to stop it.", flush=True)
            if browser:
                webbrowser.open(address)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=20)


def command(port: int) -> list[str]:
    """The server's command line: it listens on this machine only and opens no browser itself."""
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", *root),
        *("--ServerApp.port_retries=0", f"--ServerApp.root_dir={ROOT}", "--log-level=ERROR"),
    ]


def environment(token: str) -> dict[str, str]:
    """The server's environment: the book's settings, this Python first on the path,
    and the token (which a command line would show to everybody).
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(CONFIG),
        "JUPYTER_PATH": jupyter_path(),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "KINETO_LOG_LEVEL": "99",  # as lib/__init__.py sets it; a chapter imports torch before lib
        "JUPYTER_TOKEN": token,
        "JUPYTERLAB_WORKSPACES_DIR": str(_workspaces()),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def jupyter_path() -> str:
    """Jupyter's search path with the book's kernel first: it knows ``%check`` from the start,
    and prints no warnings about its sockets.
    """
    return os.pathsep.join(filter(None, [str(CONFIG), os.environ.get("JUPYTER_PATH", "")]))


def free_port() -> int:
    """The first port from 8888 on that is free."""
    for port in range(FIRST_PORT, FIRST_PORT + 200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                continue
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise BookError(f"no port between {FIRST_PORT} and {FIRST_PORT + 199} is free; choose another with --port")


def _answers(process: subprocess.Popen[bytes], port: int, within_s: float = 60) -> bool:
    """Whether the server accepts connections before it ends or the time is up."""
    until = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    return False


# ---- the workspace ---------------------------------------------------------------------------------------------------


def documents(chapter: str) -> list[str]:
    """A chapter's page and the learner's file, as paths relative to the project.

    Raises:
        BookError: there is no such chapter, or its module is not an ordinary file.
    """
    ungraded = [m for p in pages() if (m := CHAPTER_FILE.fullmatch(p["file"])) and int(m["number"]) == 0]
    for match in ungraded:
        if chapter in (match["module"], match["number"], str(int(match["number"]))):
            return [match[0]]
    found, _ = find(chapter)
    both = found.path, found.mine
    if found.mine.exists():
        read_bytes(found.mine, found.module)
    return [path.relative_to(ROOT).as_posix() for path in both if path.exists()]


def open_in_workspace(chapter: str | None) -> None:
    """Bring a chapter to the front of the saved workspace, and make one if there is none.

    Whatever is open in the workspace stays open.
    """
    asked = documents(chapter) if chapter is not None else None  # a wrong name is told before the slow import
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    _workspaces().mkdir(parents=True, exist_ok=True)
    manager = WorkspacesManager(str(_workspaces()))
    saved = next((w for w in manager.list_workspaces() if w["metadata"]["id"] == WORKSPACE), None)
    if saved is not None and asked is None:
        return
    workspace = with_documents(saved, asked or documents(_first()))
    manager.save(WORKSPACE, json.dumps(workspace))


def _workspaces() -> Path:
    return CONFIG / "lab" / "workspaces"


def _first() -> str:
    """Chapter 1 if it exists, otherwise the book's first chapter."""
    numbers = [m["number"] for p in pages() if (m := CHAPTER_FILE.fullmatch(p["file"])) and (ROOT / p["file"]).exists()]
    return next((number for number in numbers if int(number)), numbers[0])


def with_documents(saved: dict[str, Any] | None, paths: list[str]) -> dict[str, Any]:
    """A workspace that shows the first document on the left and the second on the right, both in front."""
    data = dict((saved or {}).get("data", {}))
    layout = data.get("layout-restorer:data") or {}
    widgets = []
    for path in paths:
        kind, factory = ("notebook", "Notebook") if path.endswith(".md") else ("editor", "Editor")
        widgets.append(f"{kind}:{path}")
        data.setdefault(widgets[-1], {"data": {"path": path, "factory": factory}})
    main = layout.get("main") or {}
    dock = main.get("dock")
    areas = _tab_areas(dock)
    if not areas:
        areas = [{"type": "tab-area", "currentIndex": 0, "widgets": []}]
        dock = areas[0]
    if len(areas) < len(widgets):
        areas = [areas[0], {"type": "tab-area", "currentIndex": 0, "widgets": []}]
        dock = {"type": "split-area", "orientation": "horizontal", "sizes": [0.55, 0.45], "children": [dock, areas[1]]}
    for widget, area in zip(widgets, (areas[0], areas[-1]), strict=False):
        held = next((a for a in areas if widget in a["widgets"]), area)
        if widget not in held["widgets"]:
            held["widgets"].append(widget)
        held["currentIndex"] = held["widgets"].index(widget)
    layout = {"left": {"collapsed": True, "visible": True}, **layout}
    layout["main"] = {**main, "dock": dock, "current": widgets[0]}
    data["layout-restorer:data"] = layout
    return {"data": data, "metadata": {"id": WORKSPACE}}


def _tab_areas(dock: dict[str, Any] | None) -> list[dict[str, Any]]:
    """All tab areas of a dock, from left to right."""
    if not dock:
        return []
    if dock["type"] == "tab-area":
        return [dock]
    return [area for child in dock["children"] for area in _tab_areas(child)]
