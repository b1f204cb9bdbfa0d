"""Scorers: what an answer says, and whether that is right. Each has a name and a version, recorded with every run."""
