"""Programs that nobody has read: their limits, their folder, what the guard refuses, and what is left of them."""

import time
from pathlib import Path

import pytest

from lib.given.programs import FILE_BYTES, run_program

REFUSED = {
    "a fork": "import os; os.fork()",
    "a forked terminal": "import pty; pty.fork()",
    "a shell": "import os; os.system('true')",
    "a pipe to a shell": "import os; os.popen('true')",
    "a process": "import subprocess; subprocess.run(['true'])",
    "a process, spawned": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "another program instead": "import os; os.execv('/bin/true', ['true'])",
    "the function under subprocess": "import _posixsubprocess; _posixsubprocess.fork_exec()",
    "a fresh copy of that": "import sys, subprocess; del sys.modules['_posixsubprocess']; import _posixsubprocess",
    "multiprocessing": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "a signal": "import os; os.kill(os.getppid(), 0)",
    "a signal to the group": "import os; os.killpg(0, 15)",
    "a signal by descriptor": "import signal, os; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
    "ctypes": "import ctypes",
    "ctypes from below": "import _ctypes",
    "a socket": "import socket; socket.socket()",
    "a pair of sockets": "import asyncio; asyncio.run(asyncio.sleep(0))",
    "a name's address": "import socket; socket.getaddrinfo('localhost', 80)",
    "the system's log": "import syslog; syslog.syslog('hello')",
    "removing a file": "open('a', 'w').close(); import os; os.remove('a')",
    "removing by pathlib": "import pathlib; pathlib.Path('OUTSIDE').unlink()",
    "removing a folder": "import os; os.mkdir('d'); os.rmdir('d')",
    "removing a tree": "import shutil; shutil.rmtree('.')",
    "writing outside": "open('OUTSIDE', 'w')",
    "appending outside": "open(b'OUTSIDE', 'ab')",
    "reading and writing outside": "open('OUTSIDE', 'r+')",
    "writing outside by a descriptor": "import os; os.open('OUTSIDE', os.O_WRONLY)",
    "writing upwards": "open('../stdout', 'w')",
    "writing upwards from a folder": "import os; os.mkdir('d'); open('d/../../stdout', 'w')",
    "writing after a change of folder": "import os; os.chdir('/tmp'); open('escaped-27', 'w')",
    "writing below an open folder": "import os; os.open('x', os.O_CREAT | os.O_RDWR, dir_fd=os.open('/tmp', 0))",
    "a link out of the folder": "import os; os.symlink('/tmp', 'link')",
    "a second name of a file outside": "import os; os.link('OUTSIDE', 'name')",
    "moving a file out": "import os; open('a', 'w').close(); os.rename('a', 'OUTSIDE')",
    "moving a file in": "import os; os.rename('OUTSIDE', 'a')",
    "cutting a file outside": "import os; os.truncate('OUTSIDE', 0)",
    "rights of a file outside": "import os; os.chmod('OUTSIDE', 0)",
    "a folder outside": "import os; os.mkdir('/tmp/escaped-27')",
    "a pipe outside": "import os; os.mkfifo('/tmp/escaped-27')",
    "a database outside": "import sqlite3; sqlite3.connect('OUTSIDE')",
    "shared memory": "import multiprocessing.shared_memory as s; s.SharedMemory('escaped-27', create=True, size=1)",
    "more memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "the parent's environment": "import os; open(f'/proc/{os.getppid()}/environ')",
    "the same from its folder": "import os; os.chdir('/proc'); open(f'{os.getppid()}/environ')",
    "an interpreter without the hook": "import _xxsubinterpreters as x; x.run_string(x.create(), '1')",
    "the hook's own objects": "import gc; gc.get_objects()",
    "a str that lies": "class S(str):\n    startswith = lambda *a: True\nopen(S('OUTSIDE'), 'w')",
    "builtins that lie": "import builtins, os\nbuiltins.isinstance = os.getcwd = lambda *a: '/'\nopen('OUTSIDE', 'w')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_guard_refuses(name, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    found = run_program(REFUSED[name].replace("OUTSIDE", str(outside)), timeout_s=20)
    assert found.status == "error"
    assert "PermissionError" in found.stderr
    assert outside.read_text() == "untouched"
    assert not Path("/tmp/escaped-27").exists()


def test_what_a_program_gets(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    program = "import os, sys; print(input(), __name__, os.listdir(), sorted(os.environ), sys.flags.isolated, sys.argv)"
    found = run_program(program, stdin="ß\n", timeout_s=20)
    assert found == ("ok", "ß __main__ [] ['PATH'] 1 ['program.py']\n", "")
    assert (found.status, found.stdout, found.stderr) == tuple(found)


@pytest.mark.parametrize(
    ("program", "status", "stderr"),
    [
        ("", "ok", ""),
        ("exit()", "ok", ""),
        ("import sys; sys.exit(3)", "error", ""),
        ("import sys; sys.exit('why')", "error", "why"),
        ("1 / 0", "error", "ZeroDivisionError"),
        ("def (", "error", "SyntaxError"),
        ("a\0b", "error", "null bytes"),
        ("import os; os.abort()", "error", ""),
        ("raise MemoryError", "memory", "MemoryError"),
        ("x = 'a' * 10**9", "memory", "MemoryError"),
        ("def f():\n    x = []\n    while True: x.append([])\nf()", "memory", "MemoryError"),
        ("try: 'a' * 10**9\nexcept MemoryError: print('caught')", "ok", ""),
        ("while True: print('x' * 1000)", "error", "File too large"),
        ("f = open('a', 'wb')\nwhile True: f.write(bytes(10**6))", "error", "File too large"),
        (
            "import pathlib; p = pathlib.Path('d'); p.mkdir(); (p / 'a').write_text('b'); (p / 'a').rename('c')",
            "ok",
            "",
        ),
        ("import asyncio, decimal, json, multiprocessing, subprocess, tempfile, threading", "ok", ""),
    ],
)
def test_how_a_program_ends(program, status, stderr):
    found = run_program(program, timeout_s=30)
    assert found.status == status
    assert stderr in found.stderr
    assert len(found.stdout) <= FILE_BYTES


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "import signal\nfor s in {*signal.Signals} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_a_program_that_does_not_end_is_ended(program):
    begin = time.monotonic()
    assert run_program(f"print('begun', flush=True)\n{program}", timeout_s=3).status == "timeout"
    assert time.monotonic() - begin < 20


def test_threads_left_behind_do_not_keep_a_program():
    program = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert run_program(program, timeout_s=20).status == "ok"


def test_no_process_and_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_program("import os; os.mkdir('d'); open('d/a', 'w'); print(os.getpid())", timeout_s=20)
    pid = int(run_program("import os; print(os.getpid())", timeout_s=20).stdout)
    assert not Path(f"/proc/{pid}").exists()
    assert list(tmp_path.iterdir()) == []
