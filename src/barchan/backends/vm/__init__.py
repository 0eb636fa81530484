"""Whole machines. docs/decisions/0021-disks-and-screens.md; for users: docs/vm.md."""
