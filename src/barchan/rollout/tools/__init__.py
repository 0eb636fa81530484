"""Tools: what a policy can do in its sandbox."""

from barchan.rollout.tools.base import Tool, ToolOutput, Workspace
from barchan.rollout.tools.toolbox import BUILT_IN, Toolbox, tool_named

__all__ = ["BUILT_IN", "Tool", "ToolOutput", "Toolbox", "Workspace", "tool_named"]
