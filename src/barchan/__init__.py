"""Barchan: elastic sandboxes for agentic reinforcement learning.

Everything public is listed in `__all__`; all else may change. Names are loaded on first use, so that a program pays
only for the parts it touches.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from barchan.errors import (
        BackendError,
        BarchanError,
        BlobCorrupt,
        BlobUnavailable,
        BootFailed,
        CallerError,
        CapacityError,
        Conflict,
        ConnectionLost,
        ConnectTimeout,
        Denied,
        ExecFailed,
        ExecTimeout,
        GuestError,
        GuestOutOfMemory,
        GuestWrecked,
        InitDied,
        InvalidSpec,
        LocalProtocolError,
        ModelError,
        NodeLost,
        NotFound,
        NotSnapshotable,
        OutputLimitExceeded,
        Preempted,
        ProtocolError,
        QuotaExceeded,
        ReadTimeout,
        RemoteProtocolError,
        RequirementMissing,
        RunStopped,
        SandboxExpired,
        SandboxLost,
        SetupFailed,
        SnapshotCorrupt,
        SnapshotIncompatible,
        TaskError,
        TrajectoryDiverged,
        TransportError,
    )
    from barchan.model.calls import CallResult, CallsInfo
    from barchan.model.denials import Denials
    from barchan.model.gc import GcReport
    from barchan.model.image import Rebased
    from barchan.model.node import Budget, ImageInfo, LayerInfo, LeaseInfo, NodeInfo
    from barchan.model.sandbox import (
        ExecResult,
        FileChange,
        FileInfo,
        ProcessInfo,
        SandboxInfo,
        SandboxSpec,
        SandboxStats,
        Usage,
        Zygote,
    )
    from barchan.model.snapshot_info import SnapshotInfo, SnapshotPush
    from barchan.model.tiers import TierChange, Waiting
    from barchan.model.verdict import Evidence, Verdict
    from barchan.rollout.calls import Observation, ToolCall
    from barchan.rollout.group import AsyncGroup
    from barchan.rollout.live import AsyncRollout
    from barchan.rollout.run import AsyncRun
    from barchan.rollout.sync import Group, Rollout, Run
    from barchan.rollout.task import Task
    from barchan.sdk.aio.client import AsyncClient, connect_async
    from barchan.sdk.aio.files import AsyncFiles
    from barchan.sdk.aio.prepared import AsyncPrepared, PreparedStatistics
    from barchan.sdk.aio.process import AsyncProcess
    from barchan.sdk.aio.sandbox import AsyncSandbox
    from barchan.sdk.aio.screen import AsyncScreen
    from barchan.sdk.aio.shell import AsyncShell, ShellResult
    from barchan.sdk.aio.snapshot import AsyncSnapshot
    from barchan.sdk.aio.terminal import AsyncTerminal
    from barchan.sdk.client import Client, connect
    from barchan.sdk.endpoint import set_token
    from barchan.sdk.files import Files
    from barchan.sdk.prepared import Prepared
    from barchan.sdk.sandbox import Process, Sandbox
    from barchan.sdk.screen import Screen
    from barchan.sdk.shell import Shell
    from barchan.sdk.snapshot import Snapshot
    from barchan.sdk.template import AsyncTemplateBuilder, TemplateBuilder
    from barchan.sdk.terminal import Terminal

    __version__: str

_HOMES = {
    "barchan.sdk.client": ("connect", "Client"),
    "barchan.sdk.aio.client": ("connect_async", "AsyncClient"),
    "barchan.sdk.endpoint": ("set_token",),
    "barchan.sdk.sandbox": ("Sandbox", "Process"),
    "barchan.sdk.aio.sandbox": ("AsyncSandbox",),
    "barchan.sdk.aio.process": ("AsyncProcess",),
    "barchan.sdk.files": ("Files",),
    "barchan.sdk.aio.files": ("AsyncFiles",),
    "barchan.sdk.screen": ("Screen",),
    "barchan.sdk.aio.screen": ("AsyncScreen",),
    "barchan.sdk.shell": ("Shell",),
    "barchan.sdk.snapshot": ("Snapshot",),
    "barchan.sdk.aio.snapshot": ("AsyncSnapshot",),
    "barchan.sdk.prepared": ("Prepared",),
    "barchan.sdk.aio.prepared": ("AsyncPrepared", "PreparedStatistics"),
    "barchan.sdk.aio.shell": ("AsyncShell", "ShellResult"),
    "barchan.sdk.terminal": ("Terminal",),
    "barchan.sdk.template": ("TemplateBuilder", "AsyncTemplateBuilder"),
    "barchan.sdk.aio.terminal": ("AsyncTerminal",),
    "barchan.model.calls": ("CallResult", "CallsInfo"),
    "barchan.model.denials": ("Denials",),
    "barchan.model.sandbox": (
        "SandboxSpec",
        "SandboxInfo",
        "SandboxStats",
        "ExecResult",
        "Usage",
        "ProcessInfo",
        "FileInfo",
        "FileChange",
        "Zygote",
    ),
    "barchan.rollout.run": ("AsyncRun",),
    "barchan.rollout.group": ("AsyncGroup",),
    "barchan.rollout.live": ("AsyncRollout",),
    "barchan.rollout.sync": ("Run", "Group", "Rollout"),
    "barchan.rollout.task": ("Task",),
    "barchan.rollout.calls": ("Observation", "ToolCall"),
    "barchan.model.node": ("NodeInfo", "ImageInfo", "LayerInfo", "LeaseInfo", "Budget"),
    "barchan.model.image": ("Rebased",),
    "barchan.model.snapshot_info": ("SnapshotInfo", "SnapshotPush"),
    "barchan.model.gc": ("GcReport",),
    "barchan.model.tiers": ("Waiting", "TierChange"),
    "barchan.model.verdict": ("Verdict", "Evidence"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    # connect, and what it leads to
    "connect",
    "connect_async",
    "set_token",
    "Client",
    "AsyncClient",
    "Sandbox",
    "AsyncSandbox",
    "Process",
    "AsyncProcess",
    "Files",
    "AsyncFiles",
    "Shell",
    "AsyncShell",
    "Terminal",
    "AsyncTerminal",
    "Screen",
    "AsyncScreen",
    "Snapshot",
    "AsyncSnapshot",
    "Prepared",
    "AsyncPrepared",
    "PreparedStatistics",
    "TemplateBuilder",
    "AsyncTemplateBuilder",
    # a client's runs: groups of rollouts
    "Run",
    "AsyncRun",
    "Group",
    "AsyncGroup",
    "Rollout",
    "AsyncRollout",
    "Task",
    "Budget",
    "ToolCall",
    "Observation",
    # values
    "SandboxSpec",
    "Zygote",
    "SandboxInfo",
    "SandboxStats",
    "ExecResult",
    "CallResult",
    "CallsInfo",
    "ShellResult",
    "Usage",
    "ProcessInfo",
    "FileInfo",
    "FileChange",
    "ImageInfo",
    "LayerInfo",
    "SnapshotInfo",
    "SnapshotPush",
    "GcReport",
    "Rebased",
    "NodeInfo",
    "LeaseInfo",
    "Denials",
    "Waiting",
    "TierChange",
    "Verdict",
    "Evidence",
    # errors, as drawn in errors.py
    "BarchanError",
    "CallerError",
    "InvalidSpec",
    "NotFound",
    "Conflict",
    "Denied",
    "QuotaExceeded",
    "SandboxExpired",
    "NotSnapshotable",
    "GuestError",
    "ExecFailed",
    "ExecTimeout",
    "OutputLimitExceeded",
    "GuestOutOfMemory",
    "GuestWrecked",
    "CapacityError",
    "Preempted",
    "RunStopped",
    "SandboxLost",
    "SetupFailed",
    "NodeLost",
    "BootFailed",
    "InitDied",
    "BlobUnavailable",
    "BackendError",
    "RequirementMissing",
    "SnapshotCorrupt",
    "SnapshotIncompatible",
    "BlobCorrupt",
    "TrajectoryDiverged",
    "TransportError",
    "ConnectTimeout",
    "ReadTimeout",
    "ConnectionLost",
    "ProtocolError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "ModelError",
    "TaskError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = (
        _version() if name == "__version__" else getattr(import_module(_MODULE_OF.get(name, "barchan.errors")), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("barchan")
    except PackageNotFoundError:
        return "0+source"  # run from a source tree that was not installed
