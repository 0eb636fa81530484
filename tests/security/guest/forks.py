"""Fork processes that only wait, as many as there may be, but not more than asked for; prints how many there were."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    children: list[int] = []
    for _ in range(int(sys.argv[1])):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        children.append(pid)
    print(len(children), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
