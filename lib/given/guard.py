"""What `run_program` starts as ``guard.py PROGRAM MEMORY CPU FILE MARK``: limits, an audit hook, then the program.

It guards against accidents and greedy policies. It is no prison: native code that raises no audit event is not refused.
"""

import _posixsubprocess
import _signal
import builtins
import os
import posix
import resource
import sys
import types

PREFIXES: tuple[str, ...] = (
    "socket.",
    "ctypes.",
    "subprocess.",
    "signal.",
    "syslog.",
    "pty.",
    "gc.get_",
    "shutil.rmtree",
    "sqlite3.",
)
PREFIXES += ("os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.system", "os.kill", "os.remove", "os.rmdir")
PREFIXES += ("os.link", "os.symlink", "os.chown", "os.chflags", "os.setxattr", "os.removexattr", "resource.")
PREFIXES += ("cpython.PyInterpreterState_New",)
"""Events that are refused begin with one of these."""
MODULES: tuple[str, ...] = (
    "ctypes",
    "_ctypes",
    "_posixsubprocess",
    "_signal",
    "_posixshmem",
    "_multiprocessing",
    "_sqlite3",
    "_dbm",
)
MODULES += ("_gdbm", "readline", "_xxsubinterpreters", "_testcapi", "_testinternalcapi", "_testmultiphase")
"""Modules that could do natively what the events would show."""
PATHS = {"os.rename": 2, "os.mkdir": 1, "os.truncate": 1, "os.chmod": 1, "os.utime": 1}
"""Events that change files, and how many paths they begin with."""
SILENT = ((posix, "mkfifo mknod"), (_signal, "pidfd_send_signal raise_signal"), (_posixsubprocess, "fork_exec"))
"""Functions that would raise no event."""


def make_hook(folder: str):
    """An audit hook that lets a program write in ``folder`` only, and start, signal, delete or connect nothing.

    It calls nothing that the program could have replaced.
    """
    getcwd, stat, failure = posix.getcwd, posix.stat, OSError
    kind, text, binary, integer, refusal = type, str, bytes, int, PermissionError
    prefixes, modules, paths = PREFIXES, MODULES, tuple(PATHS.items())
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def whole(path):
        path = path.decode("utf-8", "surrogateescape") if kind(path) is binary else path
        if kind(path) is not text:
            raise refusal("a path that is neither str nor bytes is refused")
        return path if path.startswith("/") else f"{getcwd()}/{path}"

    def inside(path):
        return whole(path).startswith(f"{folder}/") and "/../" not in f"{path}/" and not f"{path}".startswith("../")

    def is_folder(path):
        try:
            return stat(path).st_mode & 0o170000 == 0o040000
        except failure:
            return False

    def hook(event, args):
        if event.startswith(prefixes) or (event == "import" and args[0] in modules):
            raise refusal(f"{event} is refused in a guarded program")
        if event == "open" and kind(args[0]) is not integer:
            path = whole(args[0])
            if args[2] & writing and not inside(args[0]):
                raise refusal(f"writing outside of the program's folder is refused: {path}")
            if "/proc/" in path or path.startswith("/dev/fd") or is_folder(path):
                raise refusal(f"opening {path} is refused in a guarded program")
        for name, n_paths in paths:
            if event == name:
                for path in args[:n_paths]:
                    if kind(path) is not integer and not inside(path):
                        raise refusal(f"{event} outside of the program's folder is refused")

    return hook


def set_limits(memory: int, cpu: int, file: int) -> None:
    if sys.platform != "darwin":  # macOS cannot limit it
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def refuse(*args, **kwargs):
    raise PermissionError("this function is refused in a guarded program")


def main() -> None:
    path, (memory, cpu, size, mark) = sys.argv[1], map(int, sys.argv[2:])
    with open(path, encoding="utf-8") as file:
        source = file.read()
    os.environ.pop("LC_CTYPE", None)  # Python itself has set it
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"], sys.argv = program, ["program.py"]
    for module, names in SILENT:
        for name in names.split():
            for place in {module, os} if module is posix else {module}:
                setattr(place, name, refuse)
    reserve = [bytearray(2**20)]  # what a MemoryError is reported with
    set_limits(memory, cpu, size)
    sys.addaudithook(make_hook(posix.getcwd()))
    try:
        exec(compile(source, "program.py", "exec"), program.__dict__)
    except MemoryError:
        reserve.clear()
        os.write(mark, b"memory")
    except Exception:
        report(*sys.exc_info())
    else:
        return
    program.__dict__.clear()
    sys.exit("MemoryError")


def report(kind, error, trace) -> None:
    """Print the program's part of the traceback, and end."""
    sys.__excepthook__(kind, error.with_traceback(trace.tb_next), trace.tb_next)
    sys.exit(1)


if __name__ == "__main__":
    main()
