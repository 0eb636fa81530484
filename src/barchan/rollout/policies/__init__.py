"""Policies: who answers a task."""

from barchan.rollout.policies.base import Answer, Completion, Policy
from barchan.rollout.policies.canned import NopPolicy, OraclePolicy
from barchan.rollout.policies.chat import ChatPolicy, ChatSettings

__all__ = ["Answer", "ChatPolicy", "ChatSettings", "Completion", "NopPolicy", "OraclePolicy", "Policy"]
