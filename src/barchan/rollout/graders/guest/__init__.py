"""Programs that run inside a grader's sandbox, with the sandbox's own Python (3.9 or later) and nothing of ours
installed.

They are sent as text. They import only what an interpreter started with `-I -S` has ready, since each import is paid
once per rollout.
"""
