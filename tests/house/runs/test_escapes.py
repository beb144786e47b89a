"""Generated programs against the box: attacks by native code, which the audit hook would not see, and forged verdicts.

The attacks on the machine run behind the box without the guard's hook, so that the namespaces alone must hold. Those
that harm nobody are also run without a box, where they succeed: an attack that fails everywhere would prove nothing.
"""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from lib.given import programs as guarded
from lib.runs.evaluating import programs
from lib.runs.evaluating.box import PROCESSES

FAULT = programs.box_fault()
pytestmark = [
    pytest.mark.time_limit(180),
    pytest.mark.skipif(
        bool(FAULT), reason=f"no namespaces here, where programs run with --trust-programs only: {FAULT}"
    ),
]

HARMLESS = {
    "a file outside is read": "open('OUTSIDE').read()",
    "a file outside is written": "open('OUTSIDE', 'a').write('x')",
    "the same by a path that climbs": "open('../' * 20 + 'OUTSIDE', 'a')",
    "the same by a symbolic link": "os.symlink('OUTSIDE', 'link'); open('link', 'a')",
    "the same in another process": "subprocess.run(['sh', '-c', 'echo x >> OUTSIDE'], check=True)",
    "a file outside is renamed": "os.rename('OUTSIDE', 'OUTSIDE2'); os.rename('OUTSIDE2', 'OUTSIDE')",
    "the machine's users": "open('/etc/passwd').read()",
    "a folder of the machine": "assert os.listdir('/var')",
    "shared memory as a file": "open('/dev/shm/escaped-27', 'w'); os.remove('/dev/shm/escaped-27')",
    "shared memory of the machine": "assert os.listdir('/dev/shm')",
    "a semaphore of the system": "check(libc.semctl(SEMAPHORE, 0, 12))",
    "all processes": "assert '1' in os.listdir('/proc')",
    "another's environment": "open('/proc/VICTIM/environ').read()",
    "another's command": "open('/proc/VICTIM/cmdline').read()",
    "one's own memory as a file": "open('/proc/self/mem', 'rb')",
    "the machine's root by a process": "os.listdir('/proc/self' '/root' '/var')",
    "the kernel's settings": "os.listdir('/sys/kernel')",
    "a signal": "os.kill(VICTIM, 18)",
    "a signal by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 18)",
    "another's priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "another's processors": "os.sched_setaffinity(VICTIM, os.sched_getaffinity(0))",
    "another's limits": "resource.prlimit(VICTIM, resource.RLIMIT_CORE, (0, 0))",
    "a TCP connection": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "a UDP packet": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "a socket in a folder": "socket.socket(socket.AF_UNIX).connect('OUTSIDE.sock')",
    "a socket without a folder": "socket.socket(socket.AF_UNIX).connect('\\0escaped-27-PORT')",
}
"""Attacks that succeed where there is no box. ``check`` raises if a function of libc returned -1."""
HARMFUL = {
    "Python's own library": "open(os.__file__, 'r+')",
    "the system's programs": "open('/usr/bin/escaped-27', 'w')",
    "a file in the root": "open('/escaped-27', 'w')",
    "the first process's memory": "open('/proc/1/mem', 'rb')",
    "the root made writable": "check(libc.mount(None, b'/', None, 32, None))",
    "a mount taken away": "check(libc.umount2(b'/tmp', 2))",
    "a user namespace": "check(libc.unshare(0x10000000))",
    "a mount namespace": "check(libc.unshare(0x20000))",
    "another root": "os.chroot('.')",
    "root's rights": "os.setuid(0)",
    "a setuid program": "assert not os.statvfs('/usr').f_flag & os.ST_NOSUID",
    "new rights by a program": "assert not libc.prctl(39, 0, 0, 0, 0)",
    "the disk as a new device": "os.mknod('disk', 0o060600, os.makedev(254, 0))",
    "any device": "assert set(os.listdir('/dev')) - {'null', 'zero', 'random', 'urandom'}",
    "the terminal": "open('/dev/tty')",
    "ptrace": "check(libc.ptrace(16, VICTIM, 0, 0))",
    "ptrace of the box": "check(libc.ptrace(16, 1, 0, 0))",
    "another's memory": "b = ctypes.create_string_buffer(8); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
    "check(libc.process_vm_readv(VICTIM, v, 1, v, 1, 0))",
    "packets as they are": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "an address outside": "socket.create_connection(('192.0.2.1', 80), 2)",
    "the machine's name": "socket.sethostname('escaped-27')",
    "the machine's clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "more processes": "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "the parent's variables": "assert set(os.environ) - {'PATH', 'LC_CTYPE'}",
    "the parent's descriptors": "import fcntl\nopen_ = []\nfor fd in range(3, 256):\n    try: fcntl.fcntl(fd, 1)\n"
    "    except OSError: continue\n    open_.append(fd)\nassert len(open_) > 1  # one is the guard's mark",
}
"""Attacks that would change the machine, or need more rights than a test may have."""
BATCH = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def check(code):
    if code == -1:
        raise OSError(ctypes.get_errno(), "refused")
found = {}
for name, attack in json.loads(sys.stdin.read()).items():
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            exec(attack, dict(globals()))
            os._exit(0)
        except BaseException as error:
            os._exit(1)
    found[name] = os.waitpid(child, 0)[1]
print(json.dumps(found))
"""
VIOLENT = {
    "a fork bomb": (
        "n = 1\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "    except OSError: break\nprint('held' if n <= PROCESSES else n)",
        ("ok", "held"),
    ),
    "a thread bomb": (
        "import threading\nn = 1\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: print('held' if n <= PROCESSES else n, flush=True)\nos._exit(0)",
        ("ok", "held"),
    ),
    "death to all": (
        "try: os.kill(-1, 9)\nexcept OSError: pass\nprint('alone', flush=True)",
        ("ok", "alone"),
    ),
    "death to the box": (
        "try: os.kill(1, 9)\nexcept OSError: pass\ntime.sleep(0.1); print('the box lives')",
        ("ok", "the box lives"),
    ),
    "memory": ("x = bytearray(2**30)", ("memory", "")),
    "a full disk": (
        "n = 0\ntry:\n    while True:\n        n += open(f'/tmp/{n}', 'wb', 0).write(bytes(2**20))\n"
        "except OSError: print('held' if n <= 32 * 2**20 else n)",
        ("ok", "held"),
    ),
    "a full folder": (
        "n = 0\ntry:\n    while True:\n        open(str(n), 'w'); n += 1\n"
        "except OSError: print('held' if n <= 2048 else n)",
        ("ok", "held"),
    ),
    "endless output": ("while True: print('x' * 10**6)", ("error", "")),
    "endless work": ("while True: pass", ("timeout", "")),
    "no work at all": ("os.kill(os.getpid(), 19)", ("timeout", "")),
    "deaf to signals": (
        "for s in {*signal.Signals} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        ("timeout", ""),
    ),
    "a daemon": ("if os.fork() == 0: os.setsid(); time.sleep(60)", ("ok", "")),
    "a daemon in a session of its own that outlives a timeout": (
        "if os.fork(): time.sleep(60)\nos.setsid(); libc.prctl(1, 0, 0, 0, 0); time.sleep(60)",
        ("timeout", ""),
    ),
    "a process that leaves its session": ("libc.prctl(1, 0, 0, 0, 0); os.setsid(); time.sleep(60)", ("timeout", "")),
}
"""Programs that must be ended or held, and their status and output."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the attacks aim at: a file and a socket that anybody may open, two ports, and a process."""
    folder = tmp_path_factory.mktemp("outside")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o777)
    outside = folder / "secret"
    outside.write_text("untouched")
    outside.chmod(0o666)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    listeners = [socket.socket(kind) for kind in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX)]
    listeners[0].bind(("127.0.0.1", 0))
    port = listeners[0].getsockname()[1]
    listeners[1].bind(f"{outside}.sock")
    listeners[2].bind(f"\0escaped-27-{port}")
    for listener in listeners:
        listener.listen()
    shared = Path(f"/dev/shm/held-27-{port}")
    shared.touch()
    import ctypes

    libc = ctypes.CDLL(None)
    semaphore = libc.semget(0, 1, 0o666 | 0o1000)
    yield {"OUTSIDE": outside, "VICTIM": victim.pid, "PORT": port, "SEMAPHORE": semaphore}
    libc.semctl(semaphore, 0, 0)
    shared.unlink()
    for listener in listeners:
        listener.close()
    victim.kill()
    victim.wait()


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """Runs a program with the guard's limits, without its hook."""
    source = guarded.GUARD.read_text(encoding="utf-8")
    without = source.replace("sys.addaudithook(", "id(").replace("setattr(place, name, refuse)", "pass")
    assert without.count("id(make_hook") == 1
    assert "refuse)" not in without
    guard = tmp_path_factory.mktemp("guard") / "no_hook.py"
    guard.write_text(without, encoding="utf-8")

    def run(prefix, program, stdin="", timeout_s=60.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guarded, "GUARD", guard)
            patch.setenv("SECRET", "42")
            return guarded.run_behind(prefix, program, stdin, timeout_s)

    vars(run)["guard"] = guard
    return run


def attack(behind, prefix, attacks, place):
    """The exit status of each attack: 0 if it succeeded."""
    text = json.dumps(attacks)
    for word, value in place.items():
        text = text.replace(word, str(value))
    found = behind(prefix, BATCH, text)
    assert found.status == "ok", found
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def held(behind, place):
    return attack(behind, programs.in_box(), HARMLESS | HARMFUL, place)


@pytest.fixture(scope="module")
def free(behind, place):
    return attack(behind, (), HARMLESS, place)


def test_there_are_forty_and_more():
    assert len(HARMLESS | HARMFUL) + len(VIOLENT) + len(FORGED) > 70


@pytest.mark.parametrize("name", HARMLESS)
def test_an_attack_that_succeeds_outside_fails_in_the_box(name, held, free):
    assert free[name] == 0, "without a box this attack should succeed"
    assert held[name] != 0


@pytest.mark.parametrize("name", HARMFUL)
def test_an_attack_fails_in_the_box(name, held):
    assert held[name] != 0


def test_nothing_outside_has_changed(held, place):
    assert place["OUTSIDE"].read_text().strip("x\n") == "untouched"
    assert psutil.pid_exists(place["VICTIM"])
    assert not Path("/escaped-27").exists()
    assert not Path("/dev/shm/escaped-27").exists()


@pytest.fixture(scope="module")
def ended(behind):
    """How each violent program ends, all at once, and what was left of them."""
    head = f"import ctypes, os, signal, time\nlibc = ctypes.CDLL(None)\nPROCESSES = {PROCESSES}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded, "GUARD", behind.guard)
        with ThreadPoolExecutor(8) as pool:
            runs = {
                name: pool.submit(guarded.run_behind, programs.in_box(), head + program, "", 5.0)
                for name, (program, _) in VIOLENT.items()
            }
            found = {name: run.result() for name, run in runs.items()}
    time.sleep(0.2)
    left = [
        p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(behind.guard) in (p.info["cmdline"] or [])
    ]
    return found, left


@pytest.mark.parametrize("name", VIOLENT)
def test_a_violent_program_is_held(name, ended):
    status, said = VIOLENT[name][1]
    found = ended[0][name]
    assert found.status == status, found.stderr[-500:]
    assert len(found.stdout) <= guarded.FILE_BYTES
    assert status != "ok" or found.stdout.strip() == said


def test_no_process_is_left(ended):
    assert ended[1] == []


# ---------------------------------------------------------------------------------------------------- verdicts

TASK = {
    "prompt": 'def add(a, b):\n    """The sum of two numbers."""\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(20, 22) == 42\n",
    "entry_point": "add",
}
EVERYWHERE = "for fd in range(1, 12):\n        try: os.write(fd, {})\n        except OSError: pass\n"
FORGED = {
    "an exit with status 0": "    import os; os._exit(0)\n",
    "the same before the test": "    pass\nimport os; os._exit(0)\n",
    "a polite exit": "    raise SystemExit(0)\n",
    "a verdict on its output": "    print('passed'); print('ok'); raise SystemExit(0)\n",
    "a result that is equal to all": "    class E:\n        __eq__ = lambda *a: True\n    return E()\n",
    "a number that is equal to all": "    class E(int):\n        __eq__ = lambda *a: True\n    return E()\n",
    "no assertions": "    import builtins; builtins.AssertionError = Exception; raise AssertionError\n",
    "another check": "    import sys\n    f = sys._getframe()\n    while f:\n        f.f_globals['check'] = print\n"
    "        f = f.f_back\n",
    "optimized away": "    import sys; sys.flags = None; __debug__\n",
    "a handler of exits": "    import atexit, os; atexit.register(os._exit, 0); raise SystemExit(1)\n",
    "answers in advance": "    import os\n    " + EVERYWHERE.format("b\"('value', 3)\\n('value', 4)\\n\""),
    "code for an answer": "    import os\n    " + EVERYWHERE.format("b\"__import__('os')._exit(0)\\n\""),
    "an exception that exits": "    import os\n    " + EVERYWHERE.format("b\"('error', 'SystemExit', '0')\\n\""),
    "an answer too deep": "    import os\n    " + EVERYWHERE.format("b'(' * 100000 + b'\\n'"),
    "an answer too long": "    import os\n    " + EVERYWHERE.format("b'3' * 2000000 + b'\\n'"),
    "a patched reader": "    import ast; ast.literal_eval = lambda *a: 3; return 3\n",
    "a file for the test": "    open('test.py', 'w').write('check = print'); return 3\n",
}
"""Bodies that are wrong, and claim to be right."""


@pytest.fixture(scope="module")
def verdicts():
    bodies = FORGED | {"right": "    return a + b\n", "loud": "    print('3'); return a + b\n"}
    with ThreadPoolExecutor(4) as pool:
        limits = programs.in_box(), TASK
        runs = {name: pool.submit(programs.run_answer, *limits, body, 20.0, 2**28) for name, body in bodies.items()}
    return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_verdict_does_not_count(name, verdicts):
    assert verdicts[name].status == "failed"
    assert verdicts[name].why


def test_a_right_program_passes(verdicts):
    assert verdicts["right"] == verdicts["loud"] == ("passed", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="these tests run without root's rights already: all above shows it")
def test_the_caller_may_be_anybody():
    """Without root's rights the box is the same."""
    who: dict[str, Any] = {"user": 1234, "group": 1234, "extra_groups": []}
    system = "/usr/bin/python3"  # that of the tests may be in root's own folders
    command = [system, "-I", "-S", "-", "--", system, "-I", "-c", "import os; print(os.getuid(), os.listdir('/tmp'))"]
    done = subprocess.run(command, input=programs.BOX.read_bytes(), cwd="/var/tmp", capture_output=True, **who)
    assert done.stdout == b"1234 []\n", done.stderr
