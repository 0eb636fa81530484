"""Graders: from an artifact to the facts a verdict is made of."""
