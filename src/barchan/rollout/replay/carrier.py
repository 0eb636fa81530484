"""Carries logged operations out again, in another sandbox, and says of each what the log would say of it."""

from collections.abc import Mapping
from typing import Any

from barchan.errors import BarchanError, GuestError
from barchan.model.sandbox import DEFAULT_OUTPUT_BYTES, ExecResult
from barchan.rollout.ports import Sandbox, Shell
from barchan.rollout.replay.operations import Operation
from barchan.rollout.tools.base import CAPTURE_BYTES_MAX, is_guests_doing
from barchan.sdk.aio.shell import ShellPoint, ShellResult


class Carrier:
    """One sandbox in which operations are carried out, one after the other.

    Args:
        point: Where the agent's shell stands in it; None: it has none yet.
    """

    def __init__(self, sandbox: Sandbox, point: ShellPoint | None = None) -> None:
        self.sandbox = sandbox
        self._shell: Shell | None = None
        self._point = point

    @property
    def point(self) -> ShellPoint | None:
        """Where the agent's shell stands now."""
        return self._shell.point if self._shell is not None else self._point

    async def carry_out(self, operation: Operation) -> Mapping[str, Any]:
        """The operation's result, as a log has it; what the guest refuses is a result, too.

        Raises:
            BarchanError: The platform failed.
        """
        try:
            if operation.kind == "exec":
                return await self._exec(operation.args)
            if operation.kind == "file_read":
                return {"data": await self._read(operation.args)}
            await self._write(operation.args)
        except BarchanError as error:
            if not isinstance(error, GuestError) and not is_guests_doing(error):
                raise
            return {"error": {"type": type(error).__name__, "message": str(error)}}
        return {}

    async def _exec(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        timeout_s = float(args["timeout_s"]) if "timeout_s" in args else None
        if args.get("shell") == "persistent":
            if self._shell is None:
                self._shell = await self.sandbox.shell(max_output_bytes=CAPTURE_BYTES_MAX, point=self._point)
            return _members(await self._shell.run(args["command"], **_given(timeout_s=timeout_s)))
        asked = {name: args[name] for name in ("user", "cwd", "env", "merge_stderr", "restrained") if args.get(name)}
        if args.get("background"):
            await self.sandbox.start(args["command"], process_id=args["process_id"], **asked)
            return {}
        rlimits = {name: (int(soft), int(hard)) for name, (soft, hard) in (args.get("rlimits") or {}).items()}
        return _members(
            await self.sandbox.exec(
                args["command"],
                stdin=args.get("stdin") or b"",
                rlimits=rlimits,
                max_output_bytes=args.get("max_output_bytes") or DEFAULT_OUTPUT_BYTES,
                **asked,
                **_given(timeout_s=timeout_s),
            )
        )

    async def _read(self, args: Mapping[str, Any]) -> bytes:
        files = self.sandbox.files.as_user(args.get("user"))
        if args.get("tar"):
            return await files.read_tar(args["path"], max_bytes=args["max_bytes"])
        return await files.read(args["path"], length=args.get("length"))

    async def _write(self, args: Mapping[str, Any]) -> None:
        files, path = self.sandbox.files.as_user(args.get("user")), args["path"]
        match args.get("action"):
            case "mkdir":
                await files.mkdir(path, mode=args["mode"])
            case "remove":
                await files.remove(path, recursive=bool(args.get("recursive")))
            case _ if args.get("tar"):
                await files.write_tar(path, args["data"])
            case _:
                await files.write(path, args["data"], mode=args["mode"])


def _members(result: ExecResult | ShellResult) -> Mapping[str, Any]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
