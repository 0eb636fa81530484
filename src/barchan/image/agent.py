"""Our init as an ordinary service of a machine that boots by itself: the agent through which it is used."""

from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "_guest" / "barchan-init"
PATH = "/usr/local/sbin/barchan-init"  # in a guest
PORT = "barchan"  # of its serial line, as the guest names it
SPOOL_DIR = "/run/barchan"
SPOOL_BYTES = 32 << 20  # in memory, so that a full disk holds no output up
ARGV = (PATH, "--agent", "--serial", PORT, "--spool-dir", SPOOL_DIR, "--spool-max-bytes", str(SPOOL_BYTES))
COMMAND = " ".join(ARGV)
# For systemd. What was started through it outlives it, as processes outlive a service that is started anew.
PROPERTIES = (
    "OOMScoreAdjust=-1000",
    "Delegate=yes",
    "KillMode=process",
    "RuntimeDirectory=barchan",
    "RuntimeDirectoryMode=0700",
)
SERVICE = "\n".join(PROPERTIES)
