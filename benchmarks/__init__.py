"""Paired measurements of distcse: ratios and exact counts, never bare seconds. See README.md."""
