"""`python -m stretto_python.child VERB ...`: a verb that a script or notebook has started, and that ends with it.

Its standard input is a pipe that the script holds and never writes into. When the script is gone, even by SIGKILL, the
pipe ends, and the verb stops as after one Ctrl-C: it finishes its step and saves a checkpoint.

It is started with SIGINT blocked: an interpreter that is interrupted while it starts dies of a "fatal error".
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

from stretto.base.process import EXIT_INTERRUPTED


def _stop_with_parent(pipe: int) -> None:
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, args=(os.dup(0),), daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:  # it came while this process started
        sys.exit(EXIT_INTERRUPTED)
    runpy.run_module("stretto", run_name="__main__", alter_sys=True)
