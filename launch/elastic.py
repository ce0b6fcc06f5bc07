"""torchrun for launch/torchrun.sh; same arguments as ``python -m torch.distributed.run``. What differs:

torchrun starts ranks in sessions of their own, so that a Ctrl-C on the terminal does not reach them. Here SIGINT
and SIGUSR1 are passed on to the ranks, which save and leave in order while torchrun waits. A SIGTERM becomes a
SIGUSR1: to the ranks SIGTERM means that another rank has failed. And a failed rank has said why: torchrun adds one
line if it was killed, and no traceback.
"""

import logging
import signal
import sys
from types import FrameType

import psutil

PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGUSR1,
}


def pass_on(number: int, _frame: FrameType | None) -> None:
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(128 + number)
    for rank in ranks:
        try:
            rank.send_signal(PASSED_ON[signal.Signals(number)])
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    for received in PASSED_ON:  # before the import of torch, which takes seconds
        signal.signal(received, pass_on)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    for module in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    try:
        # SIGQUIT alone is torchrun's own: it must have one, and by default takes SIGTERM and SIGINT too.
        main(["--signals-to-handle", "SIGQUIT", *sys.argv[1:]])
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        killed = [f for f in error.failures.items() if f[1].exitcode < 0 and f[1].exitcode != -signal.SIGTERM]
        rank, failure = killed[0] if killed else error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        hint = " (by the kernel, if memory ran out: see dmesg)" if name == "SIGKILL" else ""
        print(  # noqa: T201 - the launcher's own line
            f"rank {rank}, process {failure.pid}, was ended by {name}{hint}; the same command continues from the "
            "last checkpoint",
            file=sys.stderr,
        )
        sys.exit(128 - failure.exitcode)
