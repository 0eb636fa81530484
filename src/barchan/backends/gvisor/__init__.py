"""Sandboxes whose system calls a kernel of user space answers: gVisor, in a container of ours."""
