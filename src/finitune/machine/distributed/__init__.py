"""Processes that meet, talk and add, to see whether they can train together; and what it means where they cannot."""
