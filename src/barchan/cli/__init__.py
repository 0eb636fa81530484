"""The command line: parsing and printing; what it asks for is done elsewhere."""
