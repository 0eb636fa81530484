"""How programs of other projects use Barchan: one folder per project."""
