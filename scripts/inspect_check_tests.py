"""inspect_ai's self-check on a sandbox of ours; run by `scripts/inspect_check.py`, in an environment that has both."""

import os
from collections.abc import AsyncIterator

import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - its checks are found here by pytest

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
