"""Ranks that a script starts: in warm scripts they are children that were forked when the script was, and have imported."""

import os
import pickle
import subprocess
import types
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_5d.launch import script as launcher
from tests.ranks.forks import Script


def fork_spare() -> Script | None:
    """Forks a child of this process, which becomes the next process that `ScriptLauncher` starts. Gives the child what it becomes.

    Both call it while they have one thread.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        launcher.subprocess = types.SimpleNamespace(Popen=_Started)  # type: ignore[attr-defined]
        _Started.spare = pid, writer
        return None
    os.close(writer)
    with open(reader, "rb") as file:
        written = file.read()
    if not written:  # the script has ended without it
        os._exit(0)
    script: Script = pickle.loads(written)
    return script


class _Started(subprocess.Popen[bytes]):
    """What `subprocess.Popen` gives, of a child that exists already."""

    spare: tuple[int, int] | None = None

    def _execute_child(
        self,
        args: Sequence[str],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: str | None,
        env: Mapping[str, str] | None,
        *others: Any,
    ) -> None:
        if _Started.spare is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)  # type: ignore[misc]
            return
        self.pid, writer = _Started.spare
        _Started.spare = None
        self._child_created = True
        with open(writer, "wb") as file:
            file.write(pickle.dumps(Script(args[1:], cwd or os.getcwd(), dict(os.environ if env is None else env))))
