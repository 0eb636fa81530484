"""What a create runs in its sandbox before it returns."""

from typing import TYPE_CHECKING

from barchan.errors import SetupFailed
from barchan.model.sandbox import ExecRequest, ExecResult, SandboxSpec
from barchan.node.live import Live

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

PROCESS_ID = "barchan-setup"  # the same again after a restart of the node: then it is not run twice
OUTPUT_BYTES_MAX = 64 << 10
TAIL_CHARS = 2000


async def set_up(sandboxes: "Sandboxes", live: Live) -> None:
    """Run the script of its spec, if it has one and this sandbox has not run it.

    Raises:
        SetupFailed: It failed, or took too long; with the end of its output.
    """
    spec = live.spec
    if spec.setup is None or live.is_set_up:
        return
    request = ExecRequest(
        shell=spec.setup,
        process_id=PROCESS_ID,
        timeout_s=spec.setup_timeout_s,
        max_output_bytes=OUTPUT_BYTES_MAX,
        merge_stderr=True,
    )
    async with sandboxes.tiers.busy(live):
        result = await live.processes.exec(request)
    if not result.ok:
        said = result.text.strip()[-TAIL_CHARS:] or "it said nothing"
        raise SetupFailed(f"the set-up {_how(result, spec)}: {said}", exit_code=result.exit_code)
    live.is_set_up = True


def _how(result: ExecResult, spec: SandboxSpec) -> str:
    if result.timed_out:
        return f"took longer than {spec.setup_timeout_s:g} s"
    if result.oom_killed:
        return f"needed more than {spec.memory_mib} MiB of memory"
    return f"ended with exit code {result.exit_code}"
