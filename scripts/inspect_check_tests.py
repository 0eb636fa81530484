"""inspect_ai's self-check on a sandbox of ours; run by `scripts/inspect_check.py`, in an environment that has both."""

import errno
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - its checks are found here by pytest

from barchan.compat.inspect_ai import provider
from barchan.compat.inspect_ai.config import BarchanConfig
from barchan.compat.inspect_ai.provider import BarchanEnvironment

TASK = "self-check"


@pytest_asyncio.fixture
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    """A fresh sandbox for each check, by the calls that inspect makes for a sample."""
    config = BarchanConfig(
        template=os.environ["CHECK_IMAGE"],
        backend=os.environ["CHECK_BACKEND"],
        state_dir=os.environ["CHECK_STATE_DIR"],
        memory_mib=512,
    )
    await BarchanEnvironment.task_init(TASK, config)
    environments = await BarchanEnvironment.sample_init(TASK, config, {})
    yield environments["default"]
    await BarchanEnvironment.sample_cleanup(TASK, config, environments, False)
    await BarchanEnvironment.task_cleanup(TASK, config, True)


async def test_a_file_of_many_pieces_is_written_over(
    sandbox_env: SandboxEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps owner and mode, and one that may not be written stays as it is, however much there is to write."""
    monkeypatch.setattr(provider, "STDIN_INLINE_BYTES_MAX", 1000)
    data = bytes(range(256)) * 10
    await sandbox_env.exec(["sh", "-c", "mkdir /tmp/of; touch /tmp/of/own; chmod 640 /tmp/of/own"])
    await sandbox_env.write_file("/tmp/of/own", data)
    assert await sandbox_env.read_file("/tmp/of/own", text=False) == data
    assert (await sandbox_env.exec(["stat", "-c", "%a", "/tmp/of/own"])).stdout == "640\n"
    with pytest.raises(IsADirectoryError) as refused:
        await sandbox_env.write_file("/tmp/of", data)
    assert refused.value.errno == errno.EISDIR
