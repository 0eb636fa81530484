"""Attempts to be paid without solving, in the formats that Barchan grades, each with a twin that is honest."""

from tests.hacks import functions, harbor, repository

CASES = (*functions.CASES, *repository.CASES, *harbor.CASES)
