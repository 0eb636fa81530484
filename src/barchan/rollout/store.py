"""Where a run's results go: a folder with one line per rollout, each on disk as soon as the rollout is over, and one
trajectory log per rollout.
"""

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from barchan.errors import BackendError
from barchan.rollout.attempt import Job
from barchan.rollout.record import RolloutRecord
from barchan.rollout.summary import Summary
from barchan.trajectory.format import Header, log_path
from barchan.trajectory.writer import TrajectoryWriter

ROLLOUTS = "rollouts.jsonl"
SUMMARY = "summary.json"


class RunFolder:
    """Writes `rollouts.jsonl`, `summary.json` and the trajectory logs; used as a context."""

    def __init__(self, path: Path, *, run_id: str, policy: str, version: str) -> None:
        self.path = path
        self._run_id = run_id
        self._policy = policy
        self._version = version
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / ROLLOUTS).open("xb")  # an earlier run's results are never written over
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, record: RolloutRecord) -> None:
        """Append a line and hand it to the kernel, so that a killed run keeps it.

        Raises:
            BackendError: It can't be written; a run that can't keep its results should not go on.
        """
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise BackendError(f"the results can't be written to {self.path}: {error.strerror}") from error

    async def open_log(self, job: Job) -> TrajectoryWriter:
        """Start a rollout's trajectory log; whoever asked closes it."""
        header = Header(
            rollout_id=job.rollout_id,
            run_id=self._run_id,
            task_id=job.task.task_id,
            group_index=job.group_index,
            sample_index=job.sample_index,
            epoch=0,
            created_unix_s=time.time(),
            barchan_version=self._version,
            policy=self._policy,
        )
        # In a thread, since it waits for the disk.
        return await asyncio.to_thread(TrajectoryWriter.create, log_path(self.path, job.rollout_id), header)

    def finish(self, summary: Summary) -> None:
        (self.path / SUMMARY).write_bytes(msgspec.json.format(self._encoder.encode(summary), indent=2) + b"\n")


def read_rollouts(path: Path) -> list[RolloutRecord]:
    """The records of a run's folder. A last line that was cut short by a crash is left out."""
    lines = (path / ROLLOUTS).read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=RolloutRecord) for line in lines[:-1]]
