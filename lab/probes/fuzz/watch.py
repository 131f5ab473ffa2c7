"""What a case does outside its folder: files written, programs started, connections opened.

An audit hook of Python's sees every open, rename, process and connection that goes through the interpreter, every class
that a pickle finds, and every piece of code with the file that it came from; the folder around the case is compared
before and after for what native code does. A hook cannot be taken off again, so it is only
ever put into a child that ends with its case.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_CHATS = Path(__file__).resolve().parents[3] / "eagle3core" / "chat" / "template_process.py"
CANARY = "canary"  # what inputs that carry code try to create, in the folder above their own
_PROGRAMS = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "os.startfile", "code.__new__", "ctypes.dlopen", "ctypes.dlsym/handle",
    "pickle.find_class",
}  # fmt: skip
_CHANGES = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "shutil.copyfile", "shutil.move", "shutil.rmtree",
}  # fmt: skip
_READ_FIRST = ("shutil.copyfile", "os.link", "os.symlink")  # of their two paths only the second is written
_CONNECTS = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Events of a child since `begin`.

    Args:
        allowed: folders that may be written to. folder: the case's, no code of which may run.
    """

    def __init__(self, allowed: tuple[Path, ...], folder: Path) -> None:
        self.folder = f"{folder}{os.sep}"
        self.allowed = tuple(f"{folder}{os.sep}" for folder in allowed)
        self.programs: list[str] = []
        self.outside: list[str] = []

    def begin(self) -> None:
        """Notes events from here on, to the end of the process."""
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _PROGRAMS and not _is_ours(event, arguments):
            self.programs.append(f"{event}{arguments!r}"[:200])
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(self.folder):
            self.programs.append(f"exec({arguments[0].co_filename!r})"[:200])
        elif event in _CONNECTS:
            self.outside.append(f"{event}{arguments[1:]!r}"[:200])
        elif event in _CHANGES:
            if event not in _READ_FIRST:
                self._wrote(event, arguments[0])
            if event in ("os.rename", "shutil.move", *_READ_FIRST):
                self._wrote(event, arguments[1])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            self._wrote(event, arguments[0])

    def _wrote(self, event: str, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.realpath(os.fsdecode(path))
            if name != os.devnull and not f"{name}{os.sep}".startswith(self.allowed):
                self.outside.append(f"{event} {name}"[:200])


def _is_ours(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a program is Python with the file that writes chats out, which is limited itself."""
    return event == "subprocess.Popen" and arguments[0] == sys.executable and str(_CHATS) in list(arguments[1])[1:3]


def listing(folder: Path, skip: tuple[Path, ...]) -> dict[str, tuple[int, int]]:
    """Size and time of every file under `folder`, of a folder its time alone; what lies in `skip` is left out."""
    found = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(place, name) not in skip]
        for name in files:
            status = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = (status.st_size, status.st_mtime_ns)
        found[place] = (0, 0)
    return found
