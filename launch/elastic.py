"""torchrun without the traceback: a failed rank has said why, its exit code is enough.

Same arguments as ``python -m torch.distributed.run``.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        sys.exit(first.exitcode if first.exitcode > 0 else 1)
