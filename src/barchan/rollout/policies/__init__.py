"""Policies: who answers a task."""

from barchan.rollout.policies.base import Policy, Step
from barchan.rollout.policies.canned import NopPolicy, OraclePolicy, ScriptPolicy, read_scripts
from barchan.rollout.policies.chat import ChatPolicy, ChatSettings

__all__ = ["ChatPolicy", "ChatSettings", "NopPolicy", "OraclePolicy", "Policy", "ScriptPolicy", "Step", "read_scripts"]
