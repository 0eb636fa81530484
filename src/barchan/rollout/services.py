"""A task's services: started in a sandbox by the platform, and waited for before anybody else acts there."""

import asyncio
from collections.abc import Sequence

from barchan.errors import BarchanError, TaskError
from barchan.rollout.ports import Clock, Log, Process, Sandbox
from barchan.rollout.task import Service
from barchan.rollout.tools.base import is_guests_doing

POLL_S_MIN, POLL_S_MAX = 0.05, 0.5
READY_COMMAND_S_MAX = 30.0
TAIL_BYTES = 400
_LISTENING = "0A"


async def start_services(sandbox: Sandbox, services: Sequence[Service], log: Log) -> None:
    """Start them one after the other, each once the one before it is ready. They run until the sandbox ends, as the
    processes `service-NAME`, whose output the node keeps.

    Raises:
        TaskError: One ended, or was not ready in its time; `details` say `service_not_ready` as the `cause`, and the
            tail of its `output`.
    """
    if not services:
        return
    async with sandbox.clock() as clock:
        await _start_all(sandbox, services, log, clock)


async def _start_all(sandbox: Sandbox, services: Sequence[Service], log: Log, clock: Clock) -> None:
    running: list[tuple[Service, Process]] = []
    for service in services:
        started = clock.time()
        process = await sandbox.start(
            service.command,
            process_id=f"service-{service.name}",
            user=service.user,
            cwd=service.cwd,
            env=service.env,
            stdin_open=False,
            merge_stderr=True,
        )
        if why := await _why_not_ready(sandbox, service, process, clock, started + service.ready_s_max):
            raise await _not_ready(service, process, why)
        running.append((service, process))
        ready_s = round(clock.time() - started, 3)
        log.entry("note", {"service": service.name, "command": service.command, "ready_s": ready_s})
    for service, process in running:
        state = await process.info()
        if state.exit_code:
            raise await _not_ready(service, process, f"it ended with exit code {state.exit_code}")


async def _not_ready(service: Service, process: Process, why: str) -> TaskError:
    output = await output_tail(process)
    return TaskError(f"service {service.name}: {why}", cause="service_not_ready", output=output)


async def _why_not_ready(sandbox: Sandbox, service: Service, process: Process, clock: Clock, deadline: float) -> str:
    """Wait until it is ready; "", or why it is not. One that ended with exit code 0 may have gone to the background."""
    pause_s = POLL_S_MIN
    while True:
        state = await process.info()
        if not state.running and (state.exit_code or (service.port is None and service.ready is None)):
            return f"it ended with exit code {state.exit_code}"
        left_s = deadline - clock.time()
        missing = await _missing(sandbox, service, max(left_s, POLL_S_MIN))
        if not missing:
            return ""
        if left_s <= 0:
            return f"not ready after {service.ready_s_max:g} s: {missing}"
        await asyncio.sleep(min(pause_s, max(left_s, 0.0)))
        pause_s = min(pause_s * 1.5, POLL_S_MAX)


async def _missing(sandbox: Sandbox, service: Service, left_s: float) -> str:
    if service.port is not None and not await is_listening(sandbox, service.port):
        return f"nothing listens on port {service.port}"
    if service.ready is not None:
        ready = await sandbox.exec(
            service.ready,
            user=service.user,
            cwd=service.cwd,
            env=service.env,
            timeout_s=min(left_s, READY_COMMAND_S_MAX),
            merge_stderr=True,
            max_output_bytes=4096,
        )
        if not ready.ok:
            return f"its check gave {'no answer' if ready.timed_out else f'exit code {ready.exit_code}'}"
    return ""


async def is_listening(sandbox: Sandbox, port: int) -> bool:
    """Whether something takes TCP connections to 127.0.0.1:port, by the kernel's table of the sandbox's network."""
    for name, hosts in (("tcp", ("0100007F", "00000000")), ("tcp6", ("0" * 32, "0000000000000000FFFF00000100007F"))):
        try:
            table = await sandbox.files.as_user("root").read(f"/proc/net/{name}", length=1 << 20)
        except BarchanError as error:
            if not is_guests_doing(error):
                raise
            continue  # a kernel without IPv6
        for line in table.decode("ascii", "replace").splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == _LISTENING:
                host, _, found = words[1].partition(":")
                if int(found, 16) == port and host in hosts:
                    return True
    return False


async def output_tail(process: Process) -> str:
    """The end of what it has written so far."""
    tail = b""
    async for _, _, data in process.output(follow=False):
        tail = (tail + data)[-TAIL_BYTES:]
    return tail.decode("utf-8", "replace").strip()
