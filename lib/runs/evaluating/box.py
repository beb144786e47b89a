"""A box for programs that nobody has read: a command in Linux namespaces of its own, ``box.py FOLDER ... -- COMMAND``.

The command sees a root that is read-only: the system's libraries, the folders named before ``--``, copies of the files
that its arguments name, and four devices. It can write to ``/tmp`` and to its folder, both in memory and small.
There is no network, no ``/proc`` and no ``/dev/shm``, and no process but its own, of which there can be few.
It has no capability, gets none from a setuid program, and can make no namespaces.
When the command ends, or this process is killed, every process in the box dies with it.

Nothing here needs rights: a user namespace gives them, inside of the box only. Root becomes nobody first.
"""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
"""Flags of ``unshare``, from linux/sched.h."""
NOSUID, NODEV, BIND, REC, PRIVATE = 2, 4, 4096, 16384, 1 << 18
"""Flags of ``mount``, from linux/mount.h."""
READ_ONLY = 0x1 | 0x2  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID
AT_FDCWD, AT_RECURSIVE, DETACH = -100, 0x8000, 2
DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38  # of prctl
KEYCTL = {"x86_64": 250, "aarch64": 219}
"""Number of the system call ``keyctl``, for which libc has no function."""
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NOBODY = 65534
PROCESSES = 24
"""Processes and threads in the box."""
FAILED = 125
"""Exit status if there is no box."""
SPACE = "size=32m,nr_inodes=2048,mode=1777"
"""Of each of the two folders that the command can write to."""

libc = ctypes.CDLL(None, use_errno=True)


class Attributes(ctypes.Structure):
    """``struct mount_attr``."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def call(name: str, *args: Any) -> None:
    """A function of libc.

    Raises:
        OSError: it failed; the message names it.
    """
    coded = [arg.encode() if isinstance(arg, str) else arg for arg in args]
    if getattr(libc, name)(*coded) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def make_read_only(path: str, flags: int) -> None:
    attributes = Attributes(READ_ONLY, 0, 0, 0)
    call("mount_setattr", AT_FDCWD, path, flags, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)))


def enter(ready: int, told: int) -> None:
    """Leave all namespaces; a process outside of them says who this one is in them."""
    call("unshare", NEWUSER)
    os.write(ready, b"!")
    if not os.read(told, 1):
        raise OSError("user namespace: no rights to map users")
    call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)


def map_users(process: int) -> None:
    """Each user in the box is the same one outside: who started it, and nobody too if that was root."""
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        write(f"/proc/{process}/setgroups", "deny")
        write(f"/proc/{process}/{kind}_map", "".join(f"{i} {i} 1\n" for i in dict.fromkeys((own, *extra_users()))))


def extra_users() -> list[int]:
    return [NOBODY] if os.geteuid() == 0 else []


def write(path: str, text: str) -> None:
    with open(path, "wb") as file:
        file.write(text.encode())


def build(folder: str, shown: list[str], files: dict[str, bytes]) -> None:
    """Make the root of the box, and move into it.

    Args:
        folder: The command's own, which is empty at first.
        shown: Folders and devices that are seen, read-only.
        files: Copies of files, by their paths.
    """
    call("mount", None, "/", None, REC | PRIVATE, None)
    call("mount", "tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=8m,mode=755")
    os.chdir("/tmp")
    os.umask(0o022)
    make_space("/tmp")
    for path in shown:
        place = make_place(path, is_folder=os.path.isdir(path))
        call("mount", path, place, None, BIND | REC, None)
        make_read_only(place, AT_RECURSIVE)
    for path, content in files.items():
        with open(make_place(path, is_folder=False), "wb") as file:
            file.write(content)
    make_space(folder)
    for name in os.listdir("/proc/sys/user"):
        write(f"/proc/sys/user/{name}", "0")  # no namespaces inside of these
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)
    make_read_only("/", 0)
    os.chdir(folder)


def make_space(path: str) -> None:
    call("mount", "tmpfs", make_place(path, is_folder=True), "tmpfs", NOSUID | NODEV, SPACE)


def make_place(path: str, is_folder: bool) -> str:
    """A folder or an empty file below the working directory, with the folders above it."""
    place = f".{path}"
    os.makedirs(place if is_folder else os.path.dirname(place), exist_ok=True)
    if not is_folder and not os.path.exists(place):
        write(place, "")
    return place


def become(command: list[str]) -> NoReturn:
    """Replace this process by the command, without what the box itself may do."""
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    if number := KEYCTL.get(platform.machine()):
        libc.syscall(number, 1, None)  # a session keyring of its own; it fails where there are none, which is as good
    if extra_users():
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.execv(command[0], command)


def follow(child: int) -> int:
    """Wait for a child; returns its exit status, or 128 and the signal that ended it."""
    while True:
        found, status = os.wait()
        if found == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def child_of(action: Callable[..., int], *args: Any) -> int:
    """Start a process that dies with this one, and that ends with the status that the action returns."""
    child = os.fork()
    if child:
        return child
    try:
        call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os._exit(action(*args))
    except BaseException as error:
        os.write(2, f"box: {error}\n".encode())
        os._exit(FAILED)


def first_process(command: list[str], *root: Any) -> int:
    """The first process in the box: nothing that the command starts can signal it, and all of them die with it."""
    build(*root)
    return follow(child_of(become, command))


def gate(ready: int, told: int, command: list[str], *root: Any) -> int:
    """The process that makes the namespaces; of the processes' namespace only its child is a member."""
    enter(ready, told)
    return follow(child_of(first_process, command, *root))


def start(command: list[str], *root: Any) -> int:
    """Start the command in a box, and say from outside who its users are."""
    if extra_users():
        os.setgroups([])
    (heard, ready), (told, tell) = os.pipe(), os.pipe()
    child = child_of(gate, ready, told, command, *root)
    os.close(ready)
    if os.read(heard, 1):
        map_users(child)
        os.write(tell, b"!")
    return child


def main() -> int:
    """Returns the command's exit status, or ``FAILED`` after a line that says why there is no box."""
    split = sys.argv.index("--")
    command = sys.argv[split + 1 :]
    shown = [path for path in (*SYSTEM, *sys.argv[1:split], *DEVICES) if os.path.exists(path)]
    files = {}
    for path in filter(os.path.isfile, command[1:]):
        with open(path, "rb") as file:
            files[path] = file.read()
    try:
        status = follow(start(command, os.getcwd(), shown, files))
    except OSError as error:  # these are no namespaces in which users could be told apart
        print(f"box: {error}", file=sys.stderr)
        return FAILED
    if status > 128:
        with contextlib.suppress(OSError, ValueError):  # an exit status may look like a signal
            os.kill(os.getpid(), status - 128)
    return status


if __name__ == "__main__":
    sys.exit(main())
