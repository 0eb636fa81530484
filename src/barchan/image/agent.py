"""Our init as an ordinary service of a machine that boots by itself: the agent through which it is used."""

from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "_guest" / "barchan-init"
PATH = "/usr/local/sbin/barchan-init"  # in a guest
LAUNCH_PATH = "/usr/local/sbin/barchan-agent"
PORT = "barchan"  # of its serial line, as the guest names it
SPOOL_DIR = "/run/barchan"
SPOOL_BYTES = 32 << 20  # in memory, so that a full disk holds no output up
_COMMAND = f"{PATH} --agent --serial {PORT} --spool-dir {SPOOL_DIR} --spool-max-bytes {SPOOL_BYTES}"
# Where the machine has cgroups of version 2, the agent and the programs are in groups beside each other, so that these
# are held to their limits, and it is not.
LAUNCH = f"""#!/bin/sh
mkdir -p -m 700 {SPOOL_DIR}
group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
[ "$group" != /sys/fs/cgroup/ ] || group=/sys/fs/cgroup/barchan
if [ -e /sys/fs/cgroup/cgroup.controllers ] &&
    mkdir -p "$group/init" "$group/guest" "$group/platform" &&
    echo $$ >"$group/init/cgroup.procs" &&
    echo "+memory +pids +cpu" >"$group/cgroup.subtree_control"
then
    exec 7<"$group"
    exec {_COMMAND} --cgroup-fd 7
fi
exec {_COMMAND}
"""
# For systemd. What is started through it outlives it, as a program does whose terminal is closed. No word of memory:
# what the agent were spared, every program of it would be.
PROPERTIES = ("Delegate=yes", "KillMode=process", "TasksMax=infinity")
_AS_PROPERTIES = " ".join(f"-p {item}" for item in PROPERTIES)
# In a folder with the files `agent` and `launch`: has them in their places, and starts one. An agent that runs already
# keeps the line, and the second one ends. Nobody waits for systemd to start it: it starts nothing before the system's
# basic parts are there, and on some of them cloud-init, which runs this, is one.
START = f"""#!/bin/sh
put() {{
    mkdir -p "${{2%/*}}" && cp "$1" "$2.new" && chmod 755 "$2.new" && mv "$2.new" "$2"
}}
put "$1/agent" {PATH} && put "$1/launch" {LAUNCH_PATH} || exit
modprobe virtio_console 2>/dev/null
if [ -d /run/systemd/system ]; then
    systemd-run --no-block --quiet --collect --unit barchan-agent {_AS_PROPERTIES} {LAUNCH_PATH}
else
    setsid {LAUNCH_PATH} </dev/null >/dev/null 2>&1 &
fi
"""
