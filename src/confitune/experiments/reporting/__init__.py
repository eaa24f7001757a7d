"""What runs say together: one table in memory; Markdown, terminal and HTML tables, and pictures of it."""
