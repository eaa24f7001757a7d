"""The paper: its numbers, and the commands that make its tables and figures again."""
