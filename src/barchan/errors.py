"""Every exception Barchan raises, in one tree sorted by who has to act.

    BarchanError                  code, fault, retryable, details
      CallerError                 fault=caller
        InvalidSpec NotFound Conflict Denied QuotaExceeded SandboxExpired NotSnapshotable SnapshotIncompatible
        SetupFailed
      GuestError                  fault=policy; raised only by ExecResult.check()
        ExecFailed ExecTimeout OutputLimitExceeded GuestOutOfMemory GuestWrecked
      CapacityError               fault=platform, retryable: no room now, details["retry_after_ms"]
      Preempted                   fault=platform: its run was put aside; going on takes the run's new lease
      SandboxLost                 fault=platform
        NodeLost BootFailed InitDied BlobUnavailable
      BackendError                fault=platform
        RequirementMissing SnapshotCorrupt BlobCorrupt TrajectoryDiverged
      TransportError              fault=platform, retryable
        ConnectTimeout ReadTimeout ConnectionLost
      ProtocolError
        LocalProtocolError (we broke it), RemoteProtocolError (they did)
      RunStopped                  a run's circuit breaker: voids piled up
      ModelError                  fault=model: the model endpoint failed
      TaskError                   fault=task: the task itself is broken

What a guest does (exit code, signal, time-out, out of memory) is a value, `ExecResult`, not an exception.
"""

from typing import ClassVar, Literal

Fault = Literal["none", "policy", "task", "model", "platform", "caller"]


class BarchanError(Exception):
    """Root of the tree. `details` holds small facts for programs; the message is for people."""

    code: ClassVar[str] = "error"
    fault: ClassVar[Fault] = "platform"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: str | int) -> None:
        super().__init__(message)
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        return (from_wire, (self.code, str(self), self.details))


class CallerError(BarchanError):
    """The request itself is wrong; sending it again cannot help."""

    code, fault = "caller", "caller"


class InvalidSpec(CallerError):
    code = "invalid_spec"


class NotFound(CallerError):
    code = "not_found"


class Conflict(CallerError):
    code = "conflict"


class Denied(CallerError):
    code = "denied"


class QuotaExceeded(CallerError):
    code = "quota_exceeded"


class NotSnapshotable(CallerError):
    """The guest holds something that can't be stored with its memory; the sandbox is as it was."""

    code = "not_snapshotable"


class SetupFailed(CallerError):
    """The script that was to make a new sandbox ready failed; the sandbox is gone. `details["exit_code"]`."""

    code = "setup_failed"


class SandboxExpired(CallerError):
    """The sandbox ended by its own ttl or idle timeout, or because its lease ended."""

    code = "sandbox_expired"


class SnapshotIncompatible(CallerError):
    """This node can't restore that memory snapshot; the message says what differs from the node it was made on."""

    code = "snapshot_incompatible"


class GuestError(BarchanError):
    """What ran in the sandbox did not succeed; raised only on request, by `ExecResult.check()`."""

    code, fault = "guest", "policy"


class ExecFailed(GuestError):
    code = "exec_failed"


class ExecTimeout(GuestError):
    code = "exec_timeout"


class OutputLimitExceeded(GuestError):
    code = "output_limit"


class GuestOutOfMemory(GuestError):
    code = "guest_oom"


class GuestWrecked(GuestError):
    code = "guest_wrecked"


class CapacityError(BarchanError):
    """No room now. `details["retry_after_ms"]` says when to ask again."""

    code, retryable = "capacity", True

    @property
    def retry_after_s(self) -> float:
        """When to ask again, in seconds; soon, where nobody has said."""
        return float(self.details.get("retry_after_ms", 100)) / 1e3


class Preempted(BarchanError):
    """The lease was put aside, its sandboxes with it: nothing is lost, and the message says how to go on."""

    code = "preempted"


class SandboxLost(BarchanError):
    code = "sandbox_lost"


class NodeLost(SandboxLost):
    code = "node_lost"


class BootFailed(SandboxLost):
    code = "boot_failed"


class InitDied(SandboxLost):
    code = "init_died"


class BlobUnavailable(SandboxLost):
    """Bytes of its image could not be had in time; the sandbox was ended before it could see that."""

    code = "blob_unavailable"


class BackendError(BarchanError):
    code = "backend"


class RequirementMissing(BackendError):
    """The host lacks something; the message says what and how to get it."""

    code = "requirement_missing"


class SnapshotCorrupt(BackendError):
    """A stored memory snapshot is not what was written; nothing is made of it."""

    code = "snapshot_corrupt"


class BlobCorrupt(BackendError):
    code = "blob_corrupt"


class TrajectoryDiverged(BackendError):
    """A rollout that goes on is not what its log says it was; nobody guesses which of the two is right."""

    code = "trajectory_diverged"


class TransportError(BarchanError):
    code, retryable = "transport", True


class ConnectTimeout(TransportError):
    code = "connect_timeout"


class ReadTimeout(TransportError):
    code = "read_timeout"


class ConnectionLost(TransportError):
    code = "connection_lost"


class ProtocolError(BarchanError):
    code = "protocol"


class LocalProtocolError(ProtocolError):
    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    code = "remote_protocol"


class RunStopped(BarchanError):
    """A run begins no more rollouts, for too many were void; the message says what these have in common."""

    code = "run_stopped"


class ModelError(BarchanError):
    """The model endpoint failed or answered garbage."""

    code, fault = "model", "model"


class TaskError(BarchanError):
    """The task's own definition, tests or data are broken."""

    code, fault = "task", "task"


def _tree(cls: type[BarchanError]) -> list[type[BarchanError]]:
    return [cls, *(deep for sub in cls.__subclasses__() for deep in _tree(sub))]


BY_CODE: dict[str, type[BarchanError]] = {cls.code: cls for cls in _tree(BarchanError)}


def from_wire(code: str, message: str, details: dict[str, str | int]) -> BarchanError:
    """Rebuild an error from another process by the closed table; never import a name the peer sent."""
    return BY_CODE.get(code, BackendError)(message, **details)
