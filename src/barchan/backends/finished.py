"""The same as `core.finished`, under the name by which backends and nodes know it."""

from barchan.core.finished import finished as finished
